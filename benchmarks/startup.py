"""How long `tandem up` takes to a model's first token, and what its processes hold.

    python -m benchmarks.startup [--model PATH] [--rounds 3] [--json FILE] [--quick]

Runs in a copy of the source with an empty cache folder, so that the first round compiles all
kernels and checks the model against transformers; the others find what the first has kept. Memory
is read after the first token: RSS, and PSS, which divides a page that several processes share among
them. Linux only. --quick measures one start from this repository, with what its caches have.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from benchmarks.arguments import command_parser, write_figures
from benchmarks.machine import processor
from benchmarks.services import REPOSITORY
from benchmarks.termination import clear_up_on_sigterm
from benchmarks.workloads import BUNDLED_MODEL
from tandem.client import Chunk, GenerationRequest, TandemClient
from tandem.ready_line import parse_ready_line

_COPIED = ("drafter", "gateway", "servicekit", "tandem", "verifier")
_PROMPT = "<|code|>def mean(values): return sum(values)<|rename|>values<|to|>numbers<|out|>"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one process until the first token: processor time, its ended children's included, which
    other work on the machine hardly changes; and memory in MB.
    """

    cpu_s: float
    rss_mb: float
    pss_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One `tandem up`."""

    # Seconds since its start: "drafter-0 serves", ..., "ready", "first token".
    seconds: dict[str, float]
    usage: dict[str, Usage]


@contextmanager
def source_without_kernels() -> Iterator[Path]:
    """A copy of the source that has the interpreter's compiled files only."""
    with tempfile.TemporaryDirectory(prefix="tandem-startup-") as folder:
        for name in _COPIED:
            shutil.copytree(
                REPOSITORY / name,
                Path(folder) / name,
                ignore=shutil.ignore_patterns("*.nbi", "*.nbc"),
            )
        yield Path(folder)


def measure_start(source: Path, model: Path) -> Start:
    """Starts everything, generates one token, and stops everything.

    Raises:
        RuntimeError: `tandem up` ended before it was ready.
    """
    seconds: dict[str, float] = {}
    command = [sys.executable, "-m", "tandem", "up", "--port", "0", "--http-port", "0"]
    begin_s = time.perf_counter()
    with subprocess.Popen(
        [*command, "--model", str(model)],
        cwd=source,
        env=_environment(source),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        log = threading.Thread(
            target=_read_log, args=(process.stderr, begin_s, seconds), daemon=True
        )
        log.start()
        try:
            addresses = parse_ready_line(process.stdout.readline())
            if addresses is None:
                raise RuntimeError("tandem up was not ready; start it by hand to see why")
            seconds["ready"] = time.perf_counter() - begin_s
            with TandemClient(addresses["grpc"]) as client:
                events = client.stream(GenerationRequest(prompt=_PROMPT))
                next(event for event in events if isinstance(event, Chunk))
                seconds["first token"] = time.perf_counter() - begin_s
            return Start(seconds=seconds, usage=_usage_by_name(process.pid))
        finally:
            process.terminate()
            process.wait(_TIMEOUT_S)
            log.join()


def _environment(source: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    if source != REPOSITORY:
        environment["XDG_CACHE_HOME"] = str(source / "cache")
        environment.pop("NUMBA_CACHE_DIR", None)
    return environment


def _read_log(stream: Iterator[str], begin_s: float, seconds: dict[str, float]) -> None:
    for line in stream:
        found = re.match(r"tandem up: (\S+ serves) at", line)
        if found:
            seconds[found[1]] = time.perf_counter() - begin_s


def _usage_by_name(up: int) -> dict[str, Usage]:
    """Of `tandem up` and its children, by name."""
    children = Path(f"/proc/{up}/task/{up}/children").read_text().split()
    return {_name_of(pid): usage_of(pid) for pid in [str(up), *children]}


def _name_of(pid: str) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    module = command[command.index("-m") + 1]
    return "tandem up" if module == "tandem" else module


def usage_of(pid: str) -> Usage:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = dict(line.split()[:2] for line in rollup)
    # Fields 14 to 17: user and system time, and those of ended children; the second is the name, in
    # brackets.
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return Usage(
        cpu_s=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        rss_mb=int(kilobytes["Rss:"]) / 1024,
        pss_mb=int(kilobytes["Pss:"]) / 1024,
    )


def _print_tables(first: Start, later: list[Start]) -> None:
    print(f"{'seconds after the start':32}{'no kernels':>12}{'warm':>12}")
    for name in sorted(first.seconds, key=first.seconds.__getitem__):
        warm_s = [start.seconds[name] for start in later if name in start.seconds]
        warm = f"{statistics.median(warm_s):12.2f}" if warm_s else ""
        print(f"{name:32}{first.seconds[name]:12.2f}{warm}")
    print(f"\n{'until the first token':24}" + 2 * f"{'CPU s':>10}{'RSS MB':>10}{'PSS MB':>10}")
    print(f"{'':24}{'no kernels':>10}{'':20}{'warm':>10}")
    totals = [0.0] * 6
    for name, usage in first.usage.items():
        usages = zip(*(astuple(start.usage[name]) for start in later), strict=True)
        row = [*astuple(usage), *(statistics.median(each) for each in usages)]
        totals = [total + value for total, value in zip(totals, row, strict=True)]
        _print_usage(name, row)
    _print_usage("all", totals)


def _print_usage(name: str, row: list[float]) -> None:
    print(f"{name:24}" + (2 * "{:10.2f}{:10.0f}{:10.0f}").format(*row))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("startup", __doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="folder, or GGUF file")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts, one at least")
    arguments = parser.parse_args(argv)
    model = arguments.model.resolve()
    clear_up_on_sigterm()
    if arguments.quick:
        first = measure_start(REPOSITORY, model)
        later = [first]
    else:
        with source_without_kernels() as source:
            first = measure_start(source, model)
            later = [measure_start(source, model) for _ in range(max(1, arguments.rounds))]
    print(processor() + "\n")
    _print_tables(first, later)
    warm = [asdict(start) for start in later]
    write_figures("startup", arguments, {"first": asdict(first), "warm": warm})


if __name__ == "__main__":
    main()
