"""`tandem top`: what running services do now, from their metrics, in the terminal.

Owns the flags, the windows of snapshots and the tables.
"""

import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.cli.ports import (
    DEFAULT_DRAFTER_METRICS_PORT,
    DEFAULT_HTTP_PORT,
    DEFAULT_VERIFIER_METRICS_PORT,
)
from tandem.cli.scraping import History, ScrapeError, metrics_url, scrape
from tandem.cli.service_figures import figures, kind_of
from tandem.cli.terminal import drop_output, is_live, output_console, printable
from tandem.cli.tls_context import tls_context

EXAMPLES = (
    "tandem top",
    "tandem top gateway:8000 verifier-0:9102 verifier-1:9102 drafter:9101 --interval 5",
    "tandem top 127.0.0.1:8000 --once",
)

_DEFAULT_PORTS = (DEFAULT_HTTP_PORT, DEFAULT_VERIFIER_METRICS_PORT, DEFAULT_DRAFTER_METRICS_PORT)
_KINDS = ("gateway", "verifier", "drafter")
# Where no terminal tells its width, lines are as long as they need to be.
_PLAIN_WIDTH = 200
_MAX_CONCURRENT = 32


def command(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS...",
            help="HOST:PORT or URL of the metrics of each service; a gateway's are on its HTTP "
            "port, under TLS https://HOST:PORT (default: the default ports on this machine)",
        ),
    ] = None,
    *,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="time between frames")
    ] = 2.0,
    window: Annotated[
        float,
        typer.Option(
            min=0.0, max=3600.0, metavar="SECONDS", help="rates and quantiles are of so long"
        ),
    ] = 10.0,
    once: Annotated[
        bool, typer.Option("--once", help="print one frame, of one interval, and exit")
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="certificates to trust for https (PEM)")
    ] = None,
) -> int:
    """Shows what services do: requests, tokens/s, acceptance, depth, K/V and latencies.

    Reads /metrics of any number of services. Latencies are the median and the 99th percentile;
    "-" means that nothing happened. Without a terminal, each frame is plain text.

    Without addresses it reads 127.0.0.1:8000, :9102 and :9101, where a gateway, a verifier and a
    drafter that are started by hand serve their metrics. After tandem up, give it the addresses
    that up prints: its verifiers and drafters use free ports.
    """
    given = addresses or [f"127.0.0.1:{port}" for port in _DEFAULT_PORTS]
    try:
        watched = [_Watched(address, 0.0 if once else window) for address in given]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="ADDRESS") from None
    try:
        tls = tls_context(tls_ca) if tls_ca else None
    except OSError as error:
        raise typer.BadParameter(f"{tls_ca}: {error}", param_hint="--tls-ca") from None
    console = output_console(_PLAIN_WIDTH)
    try:
        if once:
            frames = _frames(watched, interval, tls)
            next(frames)
            console.print(next(frames))
            return 0 if any(each.error is None for each in watched) else 1
        if is_live(sys.stdout):
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for frame in _frames(watched, interval, tls):
                    live.update(frame, refresh=True)
        else:
            for frame in _frames(watched, interval, tls):
                console.print(frame)
    except BrokenPipeError:
        drop_output()
        return 0
    return 0


class _Watched:
    """One service, with the snapshots of its window.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, address: str, window_s: float) -> None:
        self.address = address
        self.url = metrics_url(address)
        self.error: str | None = None
        self.history = History(window_s)

    @property
    def kind(self) -> str | None:
        window = self.history.window
        return kind_of(window.new) if window else None

    def update(self, tls: ssl.SSLContext | None) -> None:
        try:
            self.history.add(scrape(self.url, tls))
        except ScrapeError as error:
            self.error = str(error)
            self.history.clear()
        else:
            self.error = None if self.kind else "these are not the metrics of a service of Tandem"


def _frames(
    watched: Sequence[_Watched], interval_s: float, tls: ssl.SSLContext | None
) -> Iterator[Group]:
    """Frames without end, `interval_s` apart."""
    with ThreadPoolExecutor(_MAX_CONCURRENT) as executor:
        while True:
            started_at_s = time.monotonic()
            list(executor.map(lambda each: each.update(tls), watched))
            yield _frame(watched)
            time.sleep(max(0.0, started_at_s + interval_s - time.monotonic()))


def _frame(watched: Sequence[_Watched]) -> Group:
    shown: list[Table | Text] = []
    for kind in _KINDS:
        rows = [
            (each.address, figures(kind, window))
            for each in watched
            if each.error is None and each.kind == kind and (window := each.history.window)
        ]
        if not rows:
            continue
        table = Table(box=box.SIMPLE, title=f"{kind}s", title_justify="left", pad_edge=False)
        table.add_column("address", no_wrap=True)
        for title in rows[0][1]:
            table.add_column(title, justify="right", no_wrap=True)
        for address, found in rows:
            table.add_row(Text(printable(address)), *found.values())
        shown.append(table)
    shown += [
        Text(f"{each.address}: {printable(' '.join(each.error.split()))}", style="red")
        for each in watched
        if each.error is not None
    ]
    return Group(*shown)
