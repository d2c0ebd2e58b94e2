"""Every table, of a small model and of peers that are scripts."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.real import __main__ as real
from benchmarks.real import pools
from benchmarks.real.forward import ROWS
from tests.servicekit.gguf_files import write_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Answers each prompt with its last token and 7.
SERVER = f"""#!{sys.executable}
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = [asked["prompt"][-1], 7] if asked["n_predict"] > 1 else [7]
        self.answer({{"tokens": tokens}})

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
BENCH = f"""#!{sys.executable}
import json, sys
rows = sys.argv[sys.argv.index("--n-prompt") + 1].split(",")
print(json.dumps([{{"n_prompt": int(n), "avg_ns": int(n) * 2e6}} for n in rows]))
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(600)
def test_every_server_is_measured(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": TEMPLATE}
    model = write_model(tmp_path / "small.gguf", "Q4_1", context=4096, metadata=metadata)
    peers = f"llama-server={program(tmp_path / 'server', SERVER)}"
    peers += f",llama-bench={program(tmp_path / 'bench', BENCH)}"
    file = tmp_path / "figures.json"
    real.main(["--quick", "--model", str(model), "--peers", peers, "--json", str(file)])
    figures = json.loads(file.read_text())
    assert [row["what"] for row in figures["start"]][1] == "llama-server"
    own, bench = figures["threads 1"]["rows"]
    assert all(float(own[f"{rows}, ms"]) > 0 for rows in ROWS)
    assert (bench["12, ms"], bench["12 ÷ 1"]) == ("24.0", "12.00")
    speeds = {row["tokens/s"]: row for row in figures["threads 1"]["speeds"]}
    assert speeds["tandem, drafts"]["same"] == speeds["tandem, plain"]["same"] == "5/5"
    assert speeds["llama-server, plain"]["same"] == "0/5"
    assert float(speeds["tokens per step with drafts"]["chat"]) >= 1
    assert float(speeds["tandem, plain ÷ llama-server, plain"]["8 streams"]) > 0


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--model", "nowhere.gguf"], "--model: .*nowhere.gguf is no file"),
        (["--peers", "llama-server=nowhere"], "llama-server: 'nowhere' is no file"),
        (["--peers", "vllm"], "there is no peer 'vllm'"),
    ],
)
def test_what_cannot_be_measured_is_named(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        real.main(argv)
    assert re.search(reason, capsys.readouterr().err)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(600)
def test_requests_are_compared_with_and_without_pools(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": TEMPLATE}
    model = write_model(tmp_path / "small.gguf", "Q4_1", context=4096, metadata=metadata)
    file = tmp_path / "figures.json"
    pools.main(["--quick", "--model", str(model), "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    numbers = {row["kind"]: row["same"] for row in rows}
    same = {"loaded": "1/1", "written": "", "reworded": "3/3", "agent": "5/5", "turns": "4/4"}
    assert numbers == same
