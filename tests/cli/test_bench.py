"""`tandem bench` without a server: its flags, workloads and sums."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.load.answer import Answer, Summary
from tandem.load.run import Amount, run_turn
from tandem.load.workloads import Prompt, WorkloadError, read_workload


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rate", "2", "--concurrency", "2"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--seconds", "-1"], "--seconds"),
        (["--timeout", "inf"], "--timeout"),
        (["--requests", "0"], "--requests"),
        (["--workload", "/nonexistent.jsonl"], "--workload"),
        (["--speculation", "maybe"], "--speculation"),
        (["--api", "chat"], "--api"),
        (["--api", "responses", "--url", "http://127.0.0.1:1/v1"], "--api"),
        (["--url", "127.0.0.1:8000"], "--url"),
        (["--url", "http:///v1"], "--url"),
        (["--url", "http://[::1/v1"], "--url"),
        (["--url", "http://127.0.0.1:99999/v1"], "--url"),
        (["--url", "http://127.0.0.1:x/v1"], "--url"),
        (["--url", "http://127.0.0.1:1/v1", "--target", "127.0.0.1:1"], "--url"),
        (["--url", "http://me:secret@127.0.0.1:1/v1"], "--url"),
        (["--url", "http://:secret@127.0.0.1:1/v1"], "--url"),
        (["--url", "http://me:secret@/v1"], "--url"),
        (["--url", "ftp://me:secret@host/v1"], "--url"),
        (["--url", "me:secret@127.0.0.1:8000/v1"], "--url"),
        (["--target", "gateway"], "--target"),
        # Before anything is measured.
        (["--json", "/nonexistent/file"], "--json"),
        (["--json", "/"], "--json"),
        (["--plot", "/nonexistent/file.png"], "--plot"),
        (["--plot", "file.jpeg"], "--plot"),
    ],
)
def test_wrong_flags_are_one_line_that_names_the_flag(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *flags])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem bench: ")
    assert named in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("host", "flags", "is_refused"),
    [
        ("gateway.invalid", [], True),
        ("unix", [], True),
        ("gateway.invalid", ["--allow-plaintext-token"], False),
        ("127.0.0.1", [], False),
        ("[::1]", [], False),
        ("localhost", [], False),
    ],
)
def test_a_token_goes_out_in_plaintext_only_to_this_machine_or_by_permission(
    host: str,
    flags: list[str],
    is_refused: bool,
    unused_tcp_port: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text("secret")
    flags = [*flags, "--token-file", str(tmp_path / "token")]
    assert main(["bench", "--url", f"http://{host}:{unused_tcp_port}/v1", *flags]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert (f"to {host} in plaintext" in line) == ("in plaintext" in line) == is_refused
    assert "secret" not in line


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"prompt": 1}',
        '{"prompt": [1.5]}',
        '{"prompt": "a", "max_new_tokens": 0}',
        '{"prompt": "a", "max_new_tokens": true}',
        '{"prompt": "a", "temperature": "warm"}',
        '{"prompt": "a", "temperature": 1' + 400 * "0" + "}",
        "[" * 100_000,
    ],
)
def test_a_wrong_line_of_a_file_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(WorkloadError, match=r"prompts\.jsonl"):
        read_workload(str(file), max_new_tokens=9)


class CountingEndpoint:
    """Answers at once; knows which prompts came and how many were under way together."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def answer(self, prompt: Prompt, *, speculates: bool, arrived_at_s: float) -> Answer:
        assert isinstance(prompt.prompt, str)
        self.prompts.append(prompt.prompt)
        return Answer(output_tokens=1)


@pytest.mark.stand_in
@pytest.mark.parametrize("rate_per_s", [None, 1e6])
async def test_turns_go_on_where_the_last_one_ended(rate_per_s: float | None) -> None:
    endpoint = CountingEndpoint()
    prompts = itertools.cycle(Prompt(prompt=text, max_new_tokens=1) for text in "abc")
    for _ in range(2):
        answers = await run_turn(
            endpoint, prompts, Amount(requests=2), concurrency=1, rate_per_s=rate_per_s
        )
        assert len(answers) == 2
    assert endpoint.prompts == ["a", "b", "c", "a"]


@contextlib.contextmanager
def serving(
    usage: object,
    bodies: list[tuple[str, Any]] | None = None,
    keys: list[str | None] | None = None,
    is_whole: bool = True,
) -> Iterator[str]:
    """The base URL of a server whose streams have one chunk with output, and this usage.

    Args:
        bodies: gets what is posted, with its path.
        keys: gets the header Authorization of each call.
        is_whole: False: streams end after their output, without a reason.
    """
    ends: dict[str, dict[str, Any]] = {
        "/v1/completions": {"text": ""},
        "/v1/chat/completions": {"delta": {}},
    }
    kinds: dict[str, list[dict[str, Any]]] = {
        "/v1/completions": [{"text": "a"}],
        "/v1/chat/completions": [
            {"delta": {"role": "assistant", "content": ""}},
            {"delta": {"content": "a"}},
        ],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if keys is not None:
                keys.append(self.headers["Authorization"])
            self._answer("application/json", json.dumps({"data": [{"id": "demo"}]}))

        def do_POST(self) -> None:
            if keys is not None:
                keys.append(self.headers["Authorization"])
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if bodies is not None:
                bodies.append((self.path, body))
            end = {**ends[self.path], "finish_reason": "stop"}
            choices = kinds[self.path] + [end] * is_whole
            chunks: list[object] = [{"choices": [{"index": 0, **each}]} for each in choices]
            if is_whole:
                chunks.append({"choices": [], "usage": usage})
            text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
            self._answer("text/event-stream", text + "data: [DONE]\n\n" * is_whole)

        def _answer(self, content_type: str, content: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.stand_in
def test_another_server_gets_no_token_but_that_of_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_TOKEN", "of the gateways")
    (tmp_path / "token").write_text("its own")
    keys: list[str | None] = []
    for flags in ([], ["--token-file", str(tmp_path / "token")]):
        with serving({"completion_tokens": 1}, keys=keys) as url:
            assert main(["bench", "--url", url, "--requests", "1", *flags]) == 0
    assert keys == ["Bearer none"] * 2 + ["Bearer its own"] * 2


@pytest.mark.stand_in
def test_a_stream_that_breaks_off_is_a_failed_request(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({"completion_tokens": 1}, is_whole=False) as url:
        assert main(["bench", "--url", url, "--requests", "2"]) == 1
    assert "2 requests failed: the answer broke off" in capsys.readouterr().err


@pytest.mark.stand_in
def test_chat_sends_each_prompt_as_a_users_message_and_counts_chunks_with_content(
    tmp_path: Path,
) -> None:
    file = tmp_path / "result.json"
    sent: dict[str, list[tuple[str, Any]]] = {"completions": [], "chat": []}
    for api, bodies in sent.items():
        with serving({"completion_tokens": 1}, bodies) as url:
            flags = ("--api", api, "--workload", "source", "--speculation", "both")
            amount = ("--requests", "3", "--json", str(file))
            assert main(["bench", "--url", url, *flags, *amount]) == 0
        for found in json.loads(file.read_text())["speculation"].values():
            assert (found["requests"], found["output_tokens"]) == (3, 3)
            # One chunk has output: there is no gap between two.
            assert found["latency_ms"]["TTFT"] == found["latency_ms"]["E2E"]
            assert found["latency_ms"]["ITL"]["p50"] is None
    assert {path for path, _ in sent["completions"]} == {"/v1/completions"}
    assert {path for path, _ in sent["chat"]} == {"/v1/chat/completions"}
    prompts = sorted(body.pop("prompt") for _, body in sent["completions"])
    messages = [body.pop("messages") for _, body in sent["chat"]]
    assert all(each["role"] == "user" for [each] in messages)
    assert sorted(each["content"] for [each] in messages) == prompts
    others = [sorted(json.dumps(body) for _, body in bodies) for bodies in sent.values()]
    assert others[0] == others[1], "all but the prompt is the same"


def summary() -> Summary:
    answers = [
        Answer(received_at_s=[0.1, 0.2, 0.4], output_tokens=5, num_drafts=2, num_draft_tokens=4,
               num_accepted_tokens=2),
        Answer(received_at_s=[0.3], output_tokens=1),
        Answer(received_at_s=[9.0], error="UNAVAILABLE: gone"),
    ]  # fmt: skip
    return Summary(answers=answers, duration_s=2.0)


def test_a_summary_adds_up_what_did_not_fail() -> None:
    found = summary()
    assert found.latencies_s("TTFT") == [0.1, 0.3]
    assert found.latencies_s("ITL") == pytest.approx([0.1, 0.2])
    assert found.latencies_s("TPOT") == pytest.approx([0.3 / 4])
    assert found.latencies_s("E2E") == [0.4, 0.3]
    assert (found.tokens_per_s, found.requests_per_s, found.num_failed) == (3.0, 1.0, 1)
    assert (found.acceptance_rate, found.mean_acceptance_length) == (0.5, 2.0)
    assert found.errors() == {"UNAVAILABLE: gone": 1}
    assert found.percentiles_ms()["TTFT"]["p50"] == pytest.approx(200.0)
