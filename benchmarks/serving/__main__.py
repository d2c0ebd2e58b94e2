"""What serving through gateway, drafter and verifier costs, and what drafts bring, in one run.

    python -m benchmarks.serving [--rows stack load] [--dtype float32] [--json FILE] [--quick]

Prints a table in Markdown; progress goes to standard error. The rows:

    stack     the whole stack (services are processes) over the engine in process
    http      the same requests over HTTP and over gRPC
    random    text that never repeats: speculation on over off
    load      latencies at 25 to 100 % of the load that the services take without drafts
    replicas  two verifiers over one
    drafters  sixteen drafters over one

The two parts of a ratio run next to each other, round after round. A figure is the median of the
rounds' ratios, with the 95 % bootstrap interval of that median. A goal that is missed is bold.
Services start once and are reused. Compare figures of one run only.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict

from benchmarks.arguments import add_model, command_parser, write_figures
from benchmarks.machine import processor
from benchmarks.report import Measure, measures_table
from benchmarks.serving import http, load, throughput
from benchmarks.serving.setting import FULL, QUICK, Setting
from servicekit.logs import configure_logs

ROWS: Mapping[str, Callable[[Setting], AsyncIterator[Measure]]] = {
    "stack": throughput.measure_stack,
    "http": http.measure,
    "random": throughput.measure_random,
    "load": load.measure,
    "replicas": throughput.measure_replicas,
    "drafters": throughput.measure_drafters,
}


async def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    measures: list[Measure] = []
    for dtype in arguments.dtype:
        async with contextlib.AsyncExitStack() as exits:
            setting = Setting(
                model=arguments.model.resolve(),
                dtype=dtype,
                threads=arguments.threads,
                streams=arguments.streams,
                amount=QUICK if arguments.quick else FULL,
                exits=exits,
            )
            for name in arguments.rows:
                async for measure in ROWS[name](setting):
                    measures.append(measure)
                    # A later row may fail: what is measured is kept.
                    figures = {"measures": [asdict(each) for each in measures]}
                    write_figures("serving", arguments, figures)
    print(f"{processor()}, threads: {arguments.threads}\n\n{measures_table(measures)}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("serving", __doc__)
    add_model(parser)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    return parser.parse_args(argv)


if __name__ == "__main__":
    # The engine in this process logs like a service, to standard error.
    configure_logs("warning", "benchmark")
    asyncio.run(main())
