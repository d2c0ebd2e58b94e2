"""`tandem bench` without a server: its flags, workloads and sums."""

import contextlib
import importlib.util
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cli import main
from tandem.cli.benchmark import run as benchmark_run
from tandem.cli.benchmark.report import print_table
from tandem.load import plot, workloads
from tandem.load.answer import Answer, Summary
from tandem.load.run import Amount, run_turn
from tandem.load.workloads import Prompt, WorkloadError, read_workload
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, sampling_pb2
from tandem.values import UndraftedSteps, Usage


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
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text("secret")
    flags = [*flags, "--token-file", str(tmp_path / "token")]
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


@pytest.mark.stand_in
async def test_arrivals_end_with_the_time_however_far_behind_they_are() -> None:
    """Those that the time leaves unsent are not sent later."""
    prompts = itertools.repeat(Prompt(prompt="a", max_new_tokens=1))
    rate_per_s, seconds = 1e6, 0.1
    answers = await run_turn(
        CountingEndpoint(), prompts, Amount(seconds=seconds), concurrency=1, rate_per_s=rate_per_s
    )
    assert 0 < len(answers) < rate_per_s * seconds / 2
    assert max(answer.sent_late_s for answer in answers) > seconds / 4


@pytest.mark.stand_in
async def test_variants_begin_each_turn_with_the_same_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the faster one, which sends more, does not fill the prefix cache for the other alone."""
    firsts: dict[bool, list[str]] = {True: [], False: []}

    async def turn(
        endpoint: object, prompts: Iterator[Prompt], *_: object, speculates: bool, **__: object
    ) -> list[Answer]:
        texts = [str(next(prompts).prompt) for _ in range(5 if speculates else 2)]
        firsts[speculates].append(texts[0])
        return [Answer() for _ in texts]

    @contextlib.asynccontextmanager
    async def no_server(*_: object) -> AsyncIterator[object]:
        yield None

    monkeypatch.setattr(benchmark_run, "run_turn", turn)
    monkeypatch.setattr(benchmark_run, "_endpoint", no_server)
    unused: Any = None
    plan = benchmark_run.Plan(
        prompts=[Prompt(prompt=str(number), max_new_tokens=1) for number in range(100)],
        variants={"on": True, "off": False},
        turns=[Amount(seconds=1.0)] * 3,
        concurrency=1,
        rate_per_s=None,
        seed=0,
    )
    await benchmark_run.run(plan, unused, unused)
    assert firsts[True] == firsts[False] == ["0", "5", "10"]


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


class TwoModels(gateway_pb2_grpc.GenerationServiceServicer):
    """Notes which of its models requests name."""

    def __init__(self) -> None:
        self.named: set[str] = set()

    def Generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[gateway_pb2.GenerateResponse]:
        self.named.add(request.model_id)
        yield gateway_pb2.GenerateResponse(started=gateway_pb2.Started(seed=1))
        yield gateway_pb2.GenerateResponse(
            finished=gateway_pb2.Finished(finish_reason=sampling_pb2.FINISH_REASON_STOP)
        )

    LoadPool: Any = None  # not called

    def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.ListModelsResponse:
        models = [gateway_pb2.Model(model_id=each) for each in ("first", "second")]
        return gateway_pb2.ListModelsResponse(models=models)


@pytest.mark.stand_in
@pytest.mark.parametrize(("flags", "named"), [([], "first"), (["--model-id", "second"], "second")])
def test_a_gateway_of_several_models_is_asked_for_the_first_or_for_that_of_the_flag(
    flags: list[str], named: str
) -> None:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), TwoModels()
    gateway_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert main(["bench", "--target", address, "--requests", "2", *flags]) == 0
    finally:
        server.stop(0).wait()
    assert servicer.named == {named}


@pytest.mark.stand_in
def test_a_stream_that_breaks_off_is_a_failed_request(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({"completion_tokens": 1}, is_whole=False) as url:
        assert main(["bench", "--url", url, "--requests", "2"]) == 1
    assert "2 requests failed: the answer broke off" in capsys.readouterr().err


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


def test_chat_refuses_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": [1, 2]}')
    with pytest.raises(SystemExit):
        main(["bench", "--url", "http://127.0.0.1:1/v1", "--api", "chat", "--workload", str(file)])
    assert "token ids; chat needs texts" in capsys.readouterr().err


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (("--seconds", "0.5"), r"tandem bench: \d+ requests after \d+ s"),
        (("--requests", "100"), r"tandem bench: \d+ of 100 requests after \d+ s"),
    ],
)
def test_without_a_terminal_lines_say_how_far_it_is(
    amount: Sequence[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.cli.benchmark.progress._LINE_INTERVAL_S", 0.02)
    with serving({"completion_tokens": 1}) as url:
        assert main(["bench", "--url", url, *amount]) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert lines
    assert all(re.fullmatch(expected, line) for line in lines)
    assert "requests after" not in shown.out, "figures alone"


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


def test_the_table_says_why_drafts_bring_little(capsys: pytest.CaptureFixture[str]) -> None:
    usage = Usage(num_steps=11, undrafted=UndraftedSteps(no_match=9, late=1))
    print_table({"on": Summary(answers=[Answer(usage=usage)], duration_s=1.0)})
    assert capsys.readouterr().out.splitlines()[-1] == (
        "speculation on: 1.00 tokens per step: in 90% of the steps, nothing that repeats was found"
    )


def test_an_answer_in_one_message_does_not_tell_how_long_a_token_took() -> None:
    assert Answer(received_at_s=[0.3], output_tokens=7).latencies_s()["TPOT"] == []


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


@pytest.mark.stand_in
def test_a_file_that_cannot_be_written_costs_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({"completion_tokens": 1}) as url:
        assert main(["bench", "--url", url, "--requests", "2", "--json", "/dev/full"]) == 1
    printed = capsys.readouterr()
    assert "No space left" in printed.err
    assert "requests/s" in printed.out
