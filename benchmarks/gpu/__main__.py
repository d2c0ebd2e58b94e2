"""What the verifier does on this GPU, in one run of less than 8 minutes, from random weights.

    python -m benchmarks.gpu [--rows decode stack] [--json FILE] [--png FILE] [--quick]

First runs tests/gpu and says what failed. Then the rows, each for some seconds; a row that fails
says why, and the others go on. Weights have the shapes of Llama-3-8B (steps, attention) and
Qwen3-0.6B (the rest), and mean nothing. Where acceptance matters, recorded texts are replayed: the
model computes all it must, and then the recorded text's next token is made the likeliest. Rows:

    load          a step of one layer of the small model: whether it can be loaded at all
    decode        a step over the time to read weights and K/V once at the speed of a copy
    verify        a step that verifies 8 drafts of each sequence over a plain one
    long          the same at the end of texts of 100,000 tokens together, by two layers
    kernel        bytes of K/V per second of one layer's attention over those of a copy
    products      a layer's products: strict and FP8 over the others, by number of rows
    speculation   replayed code edits: speculation on over off
    host          time of a step of 64 sequences outside the model's forward pass
    random        replayed text that never repeats: speculation on over off
    stack         services over gRPC over the engine in process
    strict        engines without drafts: numerics strict over fast
    sweep         every attention backend at several sizes
    transformers  the engine without drafts over transformers' continuous batching and generate

What is compared runs by turns; a figure is the median of the rounds, with its 95 % bootstrap
interval. Goals that are missed are bold. --device cpu runs the same rows with a tiny model: that
the command works, nothing about speed.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.own_tests import TestsRun, run_tests
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.supervisor import Supervisor
from benchmarks.serving.report import draw, table
from benchmarks.serving.turns import Measure

# Of the whole run, which ends with what is being stopped.
ALL_S = 460.0
_TESTS_S = 180.0


async def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a test or a row failed; a missed goal is no failure."""
    arguments = _parse(argv)
    started_at_s = time.monotonic()
    tests = None
    if not arguments.no_tests:
        tests = await run_tests(_TESTS_S)
        print(f"{tests}\n", flush=True)
    measures: list[Measure] = []

    def keep(measure: Measure) -> None:
        measures.append(measure)
        *_, line = table([measure]).splitlines()
        print(f"{time.monotonic() - started_at_s:3.0f} s {line}", flush=True)
        write()

    def write() -> None:
        # A later row may fail: what is measured is kept.
        if arguments.json:
            run = _figures(supervisor.machine, tests, measures, time.monotonic() - started_at_s)
            arguments.json.write_text(json.dumps(run, indent=1) + "\n")

    with _folder(arguments.folder) as folder:
        supervisor = Supervisor(
            device=arguments.device,
            folder=folder,
            is_quick=arguments.quick,
            end_s=started_at_s + ALL_S,
            keep=keep,
        )
        await supervisor.run(arguments.rows)
    duration_s = time.monotonic() - started_at_s
    print(f"{supervisor.machine}; all in {duration_s:.0f} s\n\n{table(measures)}")
    write()
    if arguments.png and any(measure.value is not None for measure in measures):
        draw(measures, supervisor.machine, arguments.png)
    return 1 if supervisor.failed or (tests is not None and tests.failed) else 0


async def _until_terminated() -> int:
    """`main`, which SIGTERM cancels: processes that it started end, its temporary folder goes."""
    running = asyncio.ensure_future(main())

    def terminate() -> None:
        # Another one would cancel the ending.
        if not running.cancelling():
            running.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await running
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # by SIGINT
        return 128 + signal.SIGTERM


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="hardly anything, to see it work")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints stay, 17 GB; else a temporary folder"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here, after each row")
    parser.add_argument("--png", type=Path, help="also draw the figures here; needs matplotlib")
    arguments = parser.parse_args(argv)
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install 'tandem-serve[docs]'")
    return arguments


@contextlib.contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        yield named.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        yield Path(folder)


def _figures(
    machine: str, tests: TestsRun | None, measures: Sequence[Measure], duration_s: float
) -> dict[str, object]:
    return {
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        "machine": machine,
        "duration_s": duration_s,
        "tests": None if tests is None else asdict(tests),
        "measures": [asdict(measure) for measure in measures],
    }


if __name__ == "__main__":
    sys.exit(asyncio.run(_until_terminated()))
