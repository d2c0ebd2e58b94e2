"""`tandem bench` without a server: its flags, workloads and sums."""

import contextlib
import importlib.util
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.load import plot, workloads
from tandem.load.answer import Answer, Summary
from tandem.load.run import Amount, poisson_arrivals_s, run_turn
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


def test_an_absent_server_is_one_line(
    unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    for flags in (["--target", address], ["--url", f"http://{address}/v1"]):
        assert main(["bench", *flags]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("tandem bench: ")


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_TOKEN", "secret")
    assert main(["bench", "--url", f"http://{host}:{unused_tcp_port}/v1", *flags]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert (f"to {host} in plaintext" in line) == ("in plaintext" in line) == is_refused
    assert "secret" not in line


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_workload_is_the_same_for_equal_seeds(name: str) -> None:
    first, again, other = (read_workload(name, max_new_tokens=7, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {prompt.max_new_tokens for prompt in first} == {7}
    assert all(prompt.prompt for prompt in first)


def test_a_file_may_say_the_length_and_temperature_of_each_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a"}, {"prompt": [1, 2], "max_new_tokens": 3, "temperature": 1}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_workload(str(file), max_new_tokens=9)
    assert sorted(found, key=lambda prompt: prompt.max_new_tokens) == [
        Prompt(prompt=[1, 2], max_new_tokens=3, temperature=1.0),
        Prompt(prompt="a", max_new_tokens=9),
    ]


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
    ],
)
def test_a_wrong_line_of_a_file_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(WorkloadError, match=r"prompts\.jsonl"):
        read_workload(str(file), max_new_tokens=9)


def test_arrivals_are_as_many_per_second_as_wanted() -> None:
    count = 20_000
    *_, last_s = itertools.islice(poisson_arrivals_s(50.0, seed=0), count)
    assert count / last_s == pytest.approx(50.0, rel=0.05)


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
def serving(usage: object) -> Iterator[str]:
    """The base URL of a server whose streams have one chunk, with this usage."""
    chunk = {"choices": [{"index": 0, "text": "a"}], "usage": usage}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("application/json", json.dumps({"data": [{"id": "demo"}]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer("text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

        def _answer(self, content_type: str, content: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.stand_in
@pytest.mark.parametrize("odd", [None, "4", 1.5, True, -1, pytest.param(10**400, id="huge")])
def test_what_is_no_count_in_the_usage_of_a_server_is_0(odd: object, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    usage = {"completion_tokens": odd, "speculation": dict.fromkeys(names, odd)}
    with serving(usage) as url:
        assert main(["bench", "--url", url, "--requests", "2", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["speculation"]["on"]
    assert (found["requests"], found["failed"], found["output_tokens"]) == (2, 0, 0)
    assert found["acceptance_rate"] is None
    assert found["mean_acceptance_length"] is None


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


def test_a_plot_is_drawn_or_the_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plot.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(SystemExit):
            main(["bench", "--plot", str(file)])
        assert "--plot: needs matplotlib" in capsys.readouterr().err
    else:
        plot.draw({"on": summary(), "off": summary()}, file)
        assert file.read_bytes().startswith(b"\x89PNG")
