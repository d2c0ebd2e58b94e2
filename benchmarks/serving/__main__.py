"""What serving through gateway, drafter and verifier costs, and what drafts bring, in one run.

    python -m benchmarks.serving [--rows hop stack] [--dtype float32] [--json FILE] [--png FILE]

Prints a table in Markdown; progress goes to standard error. The rows:

    hop         the hint that a step waits for, over a bare echo from a busy thread
    stack       the whole stack (services and client are processes) over the engine in process
    openvino    the whole stack over OpenVINO GenAI with its best prompt lookup
    host        processor time of verifier and gateway for drafts, per step of 64 sequences
    http        the same requests over HTTP and over gRPC
    spans       the same requests traced by OpenTelemetry, over not traced
    structured  JSON that echoes its input: a schema over none, and speculation on over off
    random      text that never repeats: speculation on over off
    delay       the drafter 0 to 100 ms late: speculation on over off, and the gain that is left
    load        latencies at 25 to 100 % of the load that the services take without drafts
    gateway     processor time of the gateway per message that it streams
    replicas    two verifiers over one
    simulation  the simulation of draft flow over what is measured

The two parts of a ratio run next to each other, round after round. A figure is the median of the
rounds' ratios, with the 95 % bootstrap interval of that median. A goal that is missed is bold.
Services start once and are reused. Compare figures of one run only.

--pin runs the verifier, and what it is compared with, on the first core and all else on the second:
what changes by that is what sharing the cores costs.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.arguments import stated
from benchmarks.machine import processor
from benchmarks.peers.__main__ import CACHE
from benchmarks.serving import (
    gateway_cost,
    hop,
    host,
    http,
    load,
    simulation,
    spans,
    structured,
    throughput,
)
from benchmarks.serving.report import draw, figures, table
from benchmarks.serving.setting import FULL, QUICK, Setting, client_core, pinned
from benchmarks.serving.turns import RowResult
from benchmarks.workloads import BUNDLED_MODEL
from servicekit.logs import configure_logs

ROWS: Mapping[str, Callable[[Setting], Awaitable[RowResult]]] = {
    "hop": hop.measure,
    "stack": throughput.measure_in_process,
    "openvino": throughput.measure_openvino,
    "host": host.measure,
    "http": http.measure,
    "spans": spans.measure,
    "structured": structured.measure,
    "random": throughput.measure_random,
    "delay": throughput.measure_delayed,
    "load": load.measure,
    "gateway": gateway_cost.measure,
    "replicas": throughput.measure_replicas,
    "simulation": simulation.measure,
}


async def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    amount = QUICK if arguments.quick else FULL
    if arguments.rounds:
        amount = dataclasses.replace(amount, rounds=arguments.rounds)
    heading = f"{processor()}, threads: {arguments.threads}" + (", pinned" if arguments.pin else "")
    results: list[RowResult] = []
    with pinned(client_core(arguments.pin)):
        for dtype in arguments.dtype:
            async with contextlib.AsyncExitStack() as exits:
                setting = Setting(
                    model=arguments.model.resolve(),
                    dtype=dtype,
                    threads=arguments.threads,
                    streams=arguments.streams,
                    amount=amount,
                    pins=arguments.pin,
                    cache=arguments.cache,
                    say=_say,
                    exits=exits,
                )
                for name in arguments.rows:
                    results.append(await ROWS[name](setting))
                    # A later row may fail: what is measured is kept.
                    _write(arguments, results)
    measures = [measure for result in results for measure in result.measures]
    if not measures:
        sys.exit("nothing was measured: no row that was chosen has such --streams")
    print(f"{heading}\n\n{table(measures)}")
    if arguments.png:
        draw(measures, heading, arguments.png)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    parser.add_argument(
        "--streams", nargs="+", type=int, default=[1, 16, 64], help="of those that a row measures"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"at least 2; default {FULL.rounds}; row random may take more, row load has its own",
    )
    parser.add_argument("--pin", action="store_true", help="a core for the model alone")
    parser.add_argument("--quick", action="store_true", help="hardly anything, to see it work")
    parser.add_argument("--cache", type=Path, default=CACHE, help="environments of peers")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--png", type=Path, help="also draw the figures here")
    arguments = parser.parse_args(argv)
    if arguments.rounds is not None and arguments.rounds < 2:
        parser.error("--rounds: at least 2")
    if arguments.pin and "replicas" in arguments.rows:
        parser.error("--pin: name --rows without replicas, whose verifiers need a core each")
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        # Now, not when all is measured.
        parser.error("--png needs matplotlib, which the extra `docs` installs")
    return arguments


def _write(arguments: argparse.Namespace, results: Sequence[RowResult]) -> None:
    if arguments.json:
        written = figures(results, stated(arguments))
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # The engine in this process logs like a service, to standard error.
    configure_logs("warning", "benchmark")
    asyncio.run(main())
