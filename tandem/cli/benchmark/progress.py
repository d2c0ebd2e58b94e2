"""How far `tandem bench` is, on stderr: a bar on a terminal, else a line now and then."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.cli.terminal import has_colour, is_live, report

_LINE_INTERVAL_S = 10.0


@contextlib.asynccontextmanager
async def progress(total: int | None) -> AsyncIterator[Callable[[], None]]:
    """Shows it until the end; yields what is to be called after each request.

    Args:
        total: of the requests; None: not known.
    """
    if is_live(sys.stderr):
        with Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr, no_color=not has_colour(sys.stderr)),
            transient=True,
        ) as bar:
            task = bar.add_task("requests", total=total)
            yield lambda: bar.advance(task)
        return
    num_done = 0

    def advance() -> None:
        nonlocal num_done
        num_done += 1

    async def report_forever() -> None:
        started_at_s = time.monotonic()
        of_total = "" if total is None else f" of {total}"
        while True:
            await asyncio.sleep(_LINE_INTERVAL_S)
            seconds = time.monotonic() - started_at_s
            report("bench", f"{num_done}{of_total} requests after {seconds:.0f} s")

    lines = asyncio.create_task(report_forever())
    try:
        yield advance
    finally:
        lines.cancel()
        await asyncio.gather(lines, return_exceptions=True)
