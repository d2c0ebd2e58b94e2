"""The commands against one real stack: `tandem up` in a terminal, with the bundled model."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.demo_model.dataset import read_heldout
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

    @property
    def metrics(self) -> list[str]:
        """As `tandem up` reports them."""
        shown = self.terminal.wait_for("tandem top ", "\n")
        line = shown.split("tandem top ")[1].splitlines()[0]
        return line.split()


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
            terminal.wait_for("watch it with: tandem top")
            yield RunningStack(process, addresses, terminal)
            process.send_signal(signal.SIGINT)
            assert process.wait(120.0) == 0
            # The cursor is shown again.
            assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")
        finally:
            process.kill()
            process.communicate()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tandem", *arguments]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command without a terminal."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=ENVIRON | environ,
        timeout=120.0,
    )


def run_in_terminal(*arguments: str, **environ: str) -> str:
    """All that the command shows in a terminal."""
    with pseudo_terminal() as terminal:
        status = subprocess.run(
            command(*arguments),
            stdout=terminal.descriptor,
            stderr=terminal.descriptor,
            env=ENVIRON | environ,
            timeout=120.0,
        ).returncode
    assert status == 0, terminal.shown
    return terminal.shown


def test_up_shows_a_table_of_all_services_below_their_logs(stack: RunningStack) -> None:
    run("generate", TASK["prompt"], "--target", stack.addresses["grpc"])
    shown = stack.terminal.wait_for("K/V used", "drafter-0", "verifier-0", "gateway", "0%")
    assert f"serves at {stack.addresses['grpc']}" in shown
    assert '"event": "request_opened"' in shown


def test_generate_marks_accepted_drafts_in_a_terminal_and_ends_with_the_cost(
    stack: RunningStack,
) -> None:
    flags = ("--target", stack.addresses["grpc"], "--show-drafts")
    shown = run_in_terminal("generate", TASK["prompt"], *flags).replace("\r\n", "\n")
    assert "\x1b[1;32m" in shown
    text = shown.replace("\x1b[1;32m", "").replace("\x1b[0m", "")
    assert text.startswith(TASK["reference"])
    assert "drafts accepted, mean acceptance length" in text
    plain = run_in_terminal("generate", TASK["prompt"], *flags, NO_COLOR="1")
    assert "\x1b" not in plain
    piped = run("generate", TASK["prompt"], *flags)
    assert (piped.stdout.rstrip(), piped.stderr) == (TASK["reference"].rstrip(), "")


def test_top_prints_a_frame_of_every_kind_of_service(stack: RunningStack) -> None:
    address, verifier, drafter = stack.metrics
    assert address == stack.addresses["http"]
    shown = run("top", address, f"http://{verifier}/metrics", drafter, "--once", "--interval", "1")
    assert shown.returncode == 0
    assert "\x1b" not in shown.stdout
    for text in ("gateways", "verifiers", "drafters", "tokens/s", "TTFT ms", "K/V used", "depth"):
        assert text in shown.stdout


def test_top_names_what_does_not_answer_and_what_is_no_service(
    stack: RunningStack, unused_tcp_port: int
) -> None:
    absent = f"127.0.0.1:{unused_tcp_port}"
    stranger = f"http://{stack.addresses['http']}/health"
    shown = run("top", absent, stranger, "--once", "--interval", "0.1")
    assert shown.returncode == 1
    assert f"{absent}: Connection refused" in shown.stdout
    assert f"{stranger}: " in shown.stdout


def test_bench_finds_equal_output_and_accepted_drafts_over_both_apis(
    stack: RunningStack, tmp_path: Path
) -> None:
    load = ("--requests", "4", "--concurrency", "2", "--max-new-tokens", "64")
    results = {}
    for flags in (
        ("--target", stack.addresses["grpc"]),
        ("--url", f"http://{stack.addresses['http']}/v1"),
    ):
        file = tmp_path / "result.json"
        done = run("bench", *flags, *load, "--speculation", "both", "--json", str(file))
        assert (done.returncode, done.stderr) == (0, "")
        assert "times the tokens/s with speculation" in done.stdout
        assert "\x1b" not in done.stdout
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


def test_bench_counts_what_the_server_refuses(stack: RunningStack, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [1 << 30]}))
    for flags, reason in (
        (("--target", stack.addresses["grpc"]), "INVALID_ARGUMENT: "),
        (("--url", f"http://{stack.addresses['http']}/v1"), "HTTP 400: "),
    ):
        done = run("bench", *flags, "--workload", str(prompts), "--rate", "50", "--requests", "2")
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert line.startswith(f"tandem bench: 2 requests failed: {reason}")


def test_doctor_finds_the_gateway_and_what_it_serves(stack: RunningStack) -> None:
    shown = run_in_terminal("doctor", "--target", stack.addresses["grpc"])
    assert f"gateway {stack.addresses['grpc']}: serves model (1 verifiers)" in shown
    assert "\x1b[32mok  \x1b[0m" in shown


@pytest.mark.parametrize(
    ("name", "until"), [("top", "gateways"), ("bench", "0:00:01"), ("generate", "\n")]
)
def test_ctrl_c_in_a_terminal_ends_without_a_traceback(
    stack: RunningStack, name: str, until: str
) -> None:
    flags = {
        "top": (stack.addresses["http"],),
        "bench": ("--target", stack.addresses["grpc"], "--seconds", "600", "--concurrency", "1"),
        # Random ids at a high temperature: no end token comes soon.
        "generate": (
            *("--target", stack.addresses["grpc"], "--token-ids", "50,51,52"),
            *("--temperature", "50", "--no-speculation"),
        ),
    }
    with pseudo_terminal() as terminal:
        process = subprocess.Popen(
            command(name, *flags[name]),
            stdout=terminal.descriptor,
            stderr=terminal.descriptor,
            env=ENVIRON,
        )
        try:
            terminal.wait_for(until)
            process.send_signal(signal.SIGINT)
            assert process.wait(60.0) == 130
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in terminal.shown
    # A hidden cursor, or another screen, is not left behind.
    for hide, show in (("\x1b[?25l", "\x1b[?25h"), ("\x1b[?1049h", "\x1b[?1049l")):
        assert terminal.shown.rfind(show) >= terminal.shown.rfind(hide)
