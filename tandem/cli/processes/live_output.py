"""What `tandem up` shows in a terminal: a table of the services, and their logs above it.

Owns the table and the pipes that logs come through. Does not start, stop or restart anything.
"""

import asyncio
import io
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tandem.cli.processes.supervisor import ProcessState, Supervisor
from tandem.cli.terminal import has_colour, printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_REFRESHES_PER_S = 4
# Longest line of a log that is shown; the rest follows as further lines.
_LINE_LIMIT_BYTES = 64 << 10
# How long logs may still come once all processes have ended.
_LAST_LOGS_S = 1.0
_BAR_CELLS = 10
# In the line of a log that says how far a start is.
_LOADING = b'"event": "loading"'


class LiveOutput:
    """The table and the logs on a terminal; belongs to the event loop.

    Args:
        names: of the processes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._supervisor: Supervisor | None = None
        # Since when a process starts, by name, and what turns meanwhile; and how far it is.
        self._starting: dict[str, tuple[float, Spinner]] = {}
        self._progress: dict[str, str] = {}
        self._console = Console(
            file=_lossy_stderr(), no_color=not has_colour(sys.stderr), highlight=False
        )
        self._live = Live(
            get_renderable=self._table,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        pipes = {name: os.pipe() for name in names}
        self._read_ends = {name: reading for name, (reading, _) in pipes.items()}
        #: Where each process writes its logs, by its name.
        self.log_descriptors: Mapping[str, int] | None = {
            name: writing for name, (_, writing) in pipes.items()
        }
        self._logs: list[asyncio.Task[None]] = []

    def report(self, line: str) -> None:
        self._print(f"tandem up: {' '.join(line.split())}")

    def watch(self, supervisor: Supervisor) -> None:
        """Shows this supervisor's processes from now on."""
        self._supervisor = supervisor

    async def __aenter__(self) -> Self:
        for name, read_end in self._read_ends.items():
            reader = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            await asyncio.get_running_loop().connect_read_pipe(
                lambda protocol=protocol: protocol,  # type: ignore[misc]
                os.fdopen(read_end, "rb"),
            )
            self._logs.append(asyncio.create_task(self._print_logs(name, reader)))
        self._live.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        # The ends of the pipes, unless a process that was abandoned still holds one.
        for descriptor in (self.log_descriptors or {}).values():
            os.close(descriptor)
        await asyncio.wait(self._logs, timeout=_LAST_LOGS_S)
        for reading in self._logs:
            reading.cancel()
        await asyncio.gather(*self._logs, return_exceptions=True)
        self._live.stop()

    async def _print_logs(self, name: str, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reader.readuntil()
            except asyncio.LimitOverrunError:
                line = await reader.read(_LINE_LIMIT_BYTES)
            except asyncio.IncompleteReadError as error:
                line = error.partial
                if not line:
                    return
            if _LOADING in line and (progress := _progress(line)):
                self._progress[name] = progress
            else:
                self._print(printable(line.decode(errors="replace").rstrip("\n")))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _table(self) -> Table:
        """Called by the thread that refreshes the terminal."""
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column("service", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for state in [] if self._supervisor is None else self._supervisor.states():
            table.add_row(state.name, self._state(state))
        return table

    def _state(self, state: ProcessState) -> Spinner | Text:
        if state.addresses is not None:
            self._starting.pop(state.name, None)
            self._progress.pop(state.name, None)
            return Text(f"serves at {state.addresses['grpc']}", style="green")
        if state.is_stopped:
            return Text("stopped")
        now_s = time.monotonic()
        since_s, spinner = self._starting.setdefault(
            state.name, (now_s, Spinner("line", style="yellow"))
        )
        progress = self._progress.get(state.name, "starting")
        spinner.update(text=f"{progress}, {now_s - since_s:.0f} s")
        return spinner


class _LossyFile(io.FileIO):
    """A file that drops what cannot be written: a terminal may be closed while services run."""

    def write(self, content: "ReadableBuffer", /) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def _lossy_stderr() -> io.TextIOWrapper:
    file = io.BufferedWriter(_LossyFile(sys.stderr.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, encoding=sys.stderr.encoding, errors=sys.stderr.errors)


def _progress(line: bytes) -> str:
    """What a line of a log says of a start; "" if it says nothing that is known."""
    try:
        entry = json.loads(line)
        part = printable(str(entry["part"]))
        if "percent" not in entry:
            return f"{int(entry['compiled'])} {part} compiled"
        percent = min(100, max(0, int(entry["percent"])))
    except (ValueError, KeyError, TypeError):
        return ""
    filled = "#" * (percent * _BAR_CELLS // 100)
    return f"{part} {filled:.<{_BAR_CELLS}} {percent} %"
