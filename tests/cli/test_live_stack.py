"""The commands against one real stack: `tandem up` in a terminal, with the bundled model."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.metrics import read_metrics
from examples.demo_model.dataset import read_heldout
from tandem.cli import main
from tandem.ready_line import parse_ready_line
from tests.cli.pseudo_terminal import PseudoTerminal, pseudo_terminal

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]
# A held-out task that the model solves exactly, with accepted drafts.
TASK = read_heldout()[53]
# A terminal that pytest's own environment may not have.
ENVIRON = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(REPOSITORY)}
for name in ("NO_COLOR", "TANDEM_TOKEN"):
    ENVIRON.pop(name, None)


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A `tandem up` that serves."""

    process: subprocess.Popen[str]
    addresses: Mapping[str, str]
    terminal: PseudoTerminal


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with pseudo_terminal() as terminal:
        process = subprocess.Popen(
            [*command("up"), "--port", "0", "--http-port", "0", "--allow-trace"],
            stdout=subprocess.PIPE,
            stderr=terminal.descriptor,
            text=True,
            # The steps, and so the accepted drafts, are the same on every machine.
            env=ENVIRON | {"TANDEM_GATEWAY_DRAFT_WAIT": "always"},
        )
        try:
            assert process.stdout is not None
            addresses = parse_ready_line(process.stdout.readline())
            assert addresses is not None, terminal.shown
            # The drafter may still compile its kernels.
            terminal.wait_for("metrics at")
            yield RunningStack(process, addresses, terminal)
            process.send_signal(signal.SIGINT)
            assert process.wait(120.0) == 0
        finally:
            process.kill()
            process.communicate()
    terminal.wait_for(r"gateway +stopped")
    # The cursor is shown again.
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tandem", *arguments]


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command without a terminal, within this process; exit code, stdout and stderr."""
    monkeypatch.delenv("TANDEM_TOKEN", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


def run_in_terminal(*arguments: str, status: int = 0, **environ: str) -> str:
    """All that the command shows in a terminal, as a process of its own."""
    with pseudo_terminal() as terminal:
        found = subprocess.run(
            command(*arguments),
            stdout=terminal.descriptor,
            stderr=terminal.descriptor,
            env=ENVIRON | environ,
            timeout=120.0,
        ).returncode
    assert found == status, terminal.shown
    return terminal.shown


def test_up_shows_a_table_of_all_services_below_their_logs(stack: RunningStack, run: Run) -> None:
    run("generate", TASK["prompt"], "--target", stack.addresses["grpc"])
    stack.terminal.wait_for(
        "drafter-0",
        "verifier-0 .*serves at",
        f"gateway .*serves at {stack.addresses['grpc']}",
        '"event": "request_opened"',
    )


def test_generate_marks_accepted_drafts_in_a_terminal_and_ends_with_the_cost(
    stack: RunningStack, run: Run
) -> None:
    flags = ("--target", stack.addresses["grpc"], "--show-drafts")
    shown = _without_wait(run_in_terminal("generate", TASK["prompt"], *flags))
    shown = shown.replace("\r\n", "\n")
    # Most of the answer repeats the prompt; the new name is the model's own at least once.
    drafted = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", shown, re.DOTALL))
    assert 0 < len(drafted) < len(TASK["reference"])
    text = shown.replace("\x1b[1;32m", "").replace("\x1b[0m", "")
    assert text.startswith(TASK["reference"])
    assert "drafts accepted, mean acceptance length" in text
    plain = _without_wait(run_in_terminal("generate", TASK["prompt"], *flags, NO_COLOR="1"))
    assert "\x1b" not in plain
    status, output, errors = run("generate", TASK["prompt"], *flags)
    assert (status, output.rstrip(), errors) == (0, TASK["reference"].rstrip(), "")


def _without_wait(shown: str) -> str:
    """Without what a slow machine shows before the first token."""
    return re.sub(
        r"\x1b\[\?25[lh]|\x1b\[\d*[AK]|\r(?!\n)|[-\\|/] waiting for the first token(\r?\n)?",
        "",
        shown,
    )


def test_bench_finds_equal_output_and_accepted_drafts_over_both_apis(
    stack: RunningStack, run: Run, tmp_path: Path
) -> None:
    load = ("--requests", "4", "--concurrency", "2", "--max-new-tokens", "64")
    results = {}
    for flags in (
        ("--target", stack.addresses["grpc"]),
        ("--url", f"http://{stack.addresses['http']}/v1"),
    ):
        file = tmp_path / "result.json"
        status, shown, errors = run(
            "bench", *flags, *load, "--speculation", "both", "--json", str(file)
        )
        assert status == 0
        # A slow machine takes longer than the time between two such lines.
        assert all("requests after" in line for line in errors.splitlines())
        assert "times the tokens/s with speculation" in shown
        assert "\x1b" not in shown
        results[flags[0]] = json.loads(file.read_text())["speculation"]
    for found in results.values():
        on, off = found["on"], found["off"]
        assert on["requests"] == off["requests"] == 4
        assert on["output_tokens"] == off["output_tokens"] > 0
        assert on["mean_acceptance_length"] > 1
        assert off["acceptance_rate"] is None
        for latency in ("TTFT", "ITL", "TPOT", "E2E"):
            percentiles = on["latency_ms"][latency]
            assert 0 <= percentiles["p50"] <= percentiles["p90"] <= percentiles["p99"]
    assert results["--target"]["on"]["output_tokens"] == results["--url"]["on"]["output_tokens"]


def test_all_commands_and_the_openai_api_tell_the_numbers_of_the_metrics(
    stack: RunningStack, run: Run, tmp_path: Path
) -> None:
    counters = {
        "prompt_tokens": "tandem_prompt_tokens_total",
        "output_tokens": "tandem_generation_tokens_total",
        "num_steps": "tandem_generation_steps_total",
        "num_drafts": "tandem_spec_decode_num_drafts_total",
        "num_draft_tokens": "tandem_spec_decode_num_draft_tokens_total",
        "num_accepted_tokens": "tandem_spec_decode_num_accepted_tokens_total",
    }
    before = read_metrics(stack.addresses["http"])

    def counted() -> dict[str, float]:
        """Since the last time."""
        nonlocal before
        old, before = before, read_metrics(stack.addresses["http"])
        return {name: before.total(each) - old.total(each) for name, each in counters.items()}

    target = ("--target", stack.addresses["grpc"])
    _, output, _ = run("generate", TASK["prompt"], *target, "--json")
    usage = json.loads(output)["usage"]
    assert counted() == {name: usage[name] for name in counters}
    assert usage["num_accepted_tokens"] > 0

    body = {"model": "model", "prompt": TASK["prompt"], "max_tokens": 2000, "temperature": 0}
    request = urllib.request.Request(
        f"http://{stack.addresses['http']}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.loads(answer.read())["usage"]
    assert counted() == {
        **{name: told["speculation"].get(name) for name in counters},
        "prompt_tokens": told["prompt_tokens"],
        "output_tokens": told["completion_tokens"],
    }

    file = tmp_path / "result.json"
    assert run("bench", *target, "--requests", "4", "--json", str(file))[0] == 0
    increase = counted()
    [found] = json.loads(file.read_text())["speculation"].values()
    assert found["output_tokens"] == increase["output_tokens"]
    assert found["acceptance_rate"] == (
        increase["num_accepted_tokens"] / increase["num_draft_tokens"]
    )


def test_doctor_finds_the_gateway_and_what_it_serves(stack: RunningStack) -> None:
    # Without a model, whose description would take seconds.
    flags = ("--target", stack.addresses["grpc"], "--model", "/nonexistent")
    shown = run_in_terminal("doctor", *flags, status=1)
    assert "fail\x1b[0m model: /nonexistent is no folder" in shown
    assert f"gateway {stack.addresses['grpc']}: serves model (1 verifier)" in shown
    assert "\x1b[32mok  \x1b[0m" in shown
