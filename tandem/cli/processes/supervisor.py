"""Keeps a set of server processes running until they are stopped.

Owns the processes: starts them, reads their addresses from the ready lines, restarts those that
die, stops all. Does not know what they serve.

- A process that ends before its first ready line is a `StartError`: its configuration is wrong, and
  a restart would not help. One that dies later is restarted, with backoff, on the same addresses,
  so that its peers find it again.
- Processes are started in tiers and stopped tier by tier in reverse, with SIGTERM and, after a
  timeout, SIGKILL.
- No orphans: on Linux the kernel kills each process when the supervisor's main thread dies for any
  reason (PR_SET_PDEATHSIG). On other systems this holds only for an orderly stop.
- A terminal's Ctrl-C reaches the supervisor only, since each process has its own session.
- stderr is inherited, or descriptors of the caller's: the supervisor neither changes nor delays
  logs.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.cli.processes.death_with_parent import dying_with_parent
from tandem.ready_line import parse_ready_line

Report = Callable[[str], None]

# How long a process may take to end after SIGKILL; one in an uninterruptible wait is abandoned.
_KILL_WAIT_S = 5.0
# Longest line read from a process's stdout; nothing but the ready line belongs there.
_LINE_LIMIT_BYTES = 1 << 20


class StartError(Exception):
    """A process ended or timed out before its ready line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Timeouts of starting, restarting and stopping."""

    start_timeout_s: float = 600.0
    """From start to ready line; loading a large model takes minutes."""
    stop_timeout_s: float = 40.0
    """From SIGTERM to SIGKILL; more than the services' default drain of 30 s."""
    first_backoff_s: float = 0.5
    """Wait before a restart; doubles at each restart, up to `max_backoff_s`."""
    max_backoff_s: float = 30.0
    healthy_after_s: float = 30.0
    """A process that served this long restarts with `first_backoff_s` again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to run."""

    name: str
    """For messages, e.g. "verifier-0"."""
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of this process."""
    listen_flags: Mapping[str, str] = field(default_factory=lambda: {"grpc": "--listen"})
    """The flag that sets each kind of address of the ready line."""
    listen: Mapping[str, str] = field(default_factory=lambda: {"grpc": "127.0.0.1:0"})
    """Each address at the first start; port 0 is any. Restarts use those of the ready line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process at this moment."""

    name: str
    addresses: Mapping[str, str] | None
    """Where it serves; None while it starts, and after it ended."""
    is_stopped: bool
    """Whether it ended, or shall, because all are stopped."""


class Supervisor:
    """Runs processes. Belongs to the event loop of the main thread, and to one task there.

    Args:
        stderr: the descriptor that a process writes its stderr to, by its name; without one, this
            process's stderr.
    """

    def __init__(
        self,
        report: Report,
        policy: Policy | None = None,
        *,
        stderr: Mapping[str, int] | None = None,
    ) -> None:
        self._report = report
        self._policy = policy or Policy()
        self._stderr = stderr or {}
        self._tiers: list[list[_Process]] = []
        self._is_stopping = False

    async def start(self, specs: Sequence[ProcessSpec]) -> list[dict[str, str]]:
        """Starts a tier; returns each process's addresses when all serve.

        Raises:
            StartError: one did not start to serve. The others are left to `stop`.
        """
        tier = [
            _Process(spec, self._policy, self._report, self._stderr.get(spec.name))
            for spec in specs
        ]
        self._tiers.append(tier)
        starts = [asyncio.ensure_future(process.start()) for process in tier]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        return [dict(process.addresses) for process in tier]

    def states(self) -> list[ProcessState]:
        """All processes, in the order of their tiers."""
        return [
            ProcessState(
                name=process.name, addresses=process.serves_at, is_stopped=self._is_stopping
            )
            for tier in self._tiers
            for process in tier
        ]

    async def watch(self) -> None:
        """Restarts processes that die; never returns."""
        await asyncio.gather(*(process.watch for tier in self._tiers for process in tier))

    async def stop(self) -> None:
        """Stops everything, last tier first. Idempotent."""
        self._is_stopping = True
        for tier in self._tiers:
            for process in tier:
                await process.unwatch()
        for tier in reversed(self._tiers):
            await asyncio.gather(*(process.stop() for process in tier))

    def kill(self) -> None:
        """SIGKILLs all processes; a `stop` that runs meanwhile then ends at once."""
        for tier in self._tiers:
            for process in tier:
                process.kill()


class _Process:
    """One process, across its restarts.

    Invariant: at most one operating-system process at a time, `_running`; `addresses` change only
    when a ready line arrives.
    """

    def __init__(
        self, spec: ProcessSpec, policy: Policy, report: Report, stderr: int | None
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._policy = policy
        self._report = report
        self._stderr = stderr
        self._running: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[dict[str, str]] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.addresses: Mapping[str, str] = spec.listen

    @property
    def serves_at(self) -> Mapping[str, str] | None:
        is_ready = self._ready is not None and self._ready.done()
        is_alive = self._running is not None and self._running.returncode is None
        return self.addresses if is_ready and is_alive else None

    @property
    def watch(self) -> asyncio.Task[None]:
        assert self._watch is not None, "the process has not started"
        return self._watch

    async def start(self) -> None:
        await self._start_once()
        self._watch = asyncio.create_task(self._restart_when_dead())

    async def unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            # Its own error, if any, is `watch`'s: it must not keep the others from being stopped.
            await asyncio.wait([self._watch])

    async def stop(self) -> None:
        process = self._running
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._policy.stop_timeout_s)
        except TimeoutError:
            bound_s = self._policy.stop_timeout_s
            self._report(f"{self._spec.name} did not stop within {bound_s:g} s; killing it")
            self.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_WAIT_S)
        await self._end_reader()
        self._running = None

    def kill(self) -> None:
        """Kills the process and, since it leads its own group, what it started."""
        if self._running is not None and self._running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)

    async def _restart_when_dead(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = self._policy.first_backoff_s
        while True:
            assert self._running is not None
            served_since = loop.time()
            status = await self._running.wait()
            if loop.time() - served_since >= self._policy.healthy_after_s:
                backoff_s = self._policy.first_backoff_s
            event = f"{self._spec.name} {_ended(status)}"
            while True:
                self._report(f"{event}; starting it again in {backoff_s:g} s")
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._policy.max_backoff_s)
                try:
                    await self._start_once()
                except StartError as error:
                    event = str(error)
                else:
                    break

    async def _start_once(self) -> None:
        """Starts the process and waits for its ready line.

        Raises:
            StartError: it could not be started, ended, or was not ready in time; it no longer runs.
        """
        await self._end_reader()
        flags = [
            part
            for kind, flag in self._spec.listen_flags.items()
            for part in (flag, self.addresses[kind])
        ]
        command = self._spec.command
        try:
            if shutil.which(command[0]) is None:
                raise FileNotFoundError(f"no command {command[0]!r}")
            self._running = await asyncio.create_subprocess_exec(
                *dying_with_parent(command),
                *flags,
                env={**os.environ, **self._spec.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._stderr,
                limit=_LINE_LIMIT_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"{self._spec.name} could not be started: {error}") from error
        assert self._running.stdout is not None
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_stdout(self._running.stdout, self._ready))
        ended = asyncio.create_task(self._running.wait())
        either: set[asyncio.Future[Any]] = {self._ready, ended}
        try:
            await asyncio.wait(
                either,
                timeout=self._policy.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._ready.done():
                self.addresses = self._ready.result()
            elif ended.done():
                raise StartError(f"{self._spec.name} {_ended(ended.result())} before it was ready")
            else:
                self.kill()
                await self._running.wait()
                raise StartError(
                    f"{self._spec.name} was not ready within {self._policy.start_timeout_s:g} s"
                )
        finally:
            ended.cancel()
        self._report(f"{self._spec.name} serves at {self.addresses['grpc']}")

    async def _read_stdout(
        self, stdout: asyncio.StreamReader, ready: asyncio.Future[dict[str, str]]
    ) -> None:
        """Reads to the end, so that the process never blocks; reports other lines on stderr."""
        while True:
            try:
                line = (await stdout.readline()).decode(errors="replace")
            except ValueError:  # longer than the limit; the reader has dropped it
                continue
            if not line:
                return
            addresses = None if ready.done() else parse_ready_line(line)
            if addresses is None or not self._spec.listen_flags.keys() <= addresses.keys():
                self._report(f"{self._spec.name} printed: {line.rstrip()}")
            else:
                ready.set_result(addresses)

    async def _end_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None


def _ended(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
