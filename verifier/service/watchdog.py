"""Decides whether the engine makes progress, for liveness probes.

Load never counts as a stall, however high: a restart would only add to it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from verifier.engine.engine import Engine

#: So much earlier than its last check a stall may have begun, as a part of the timeout.
CHECKS_PER_TIMEOUT = 4


class Watchdog:
    """Checks the engine periodically, from the event loop.

    The engine is stalled in three cases: its thread has ended; it handles no command for the stall
    timeout (commands are handled between steps, so one step does not end); or it has sequences and
    handles commands, but finishes no step for the stall timeout. Sequences that wait for their
    drafts need no step: the engine bounds that wait itself.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stall_timeout_s: float,
        on_change: Callable[[bool], None],
    ) -> None:
        """The engine, which must be started, counts as alive at first.

        Args:
            stall_timeout_s: see the class.
            on_change: called with whether the engine is alive, whenever that changes.
        """
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = stall_timeout_s / CHECKS_PER_TIMEOUT
        self._on_change = on_change
        self._is_alive = True

    async def run(self, stopped: "asyncio.Future[None]") -> None:
        """Runs until cancelled, or until the engine thread has ended.

        Args:
            stopped: done when it has ended; never cancelled here.
        """
        num_steps = 0
        # Counted in checks, not in time, so that a suspended process is not taken for a stall.
        num_idle_checks = 0
        while (needs_step := await self._needs_step(stopped)) is not None:
            before, num_steps = num_steps, self._engine.load.num_steps
            num_idle_checks = num_idle_checks + 1 if needs_step and num_steps == before else 0
            self._report(num_idle_checks <= CHECKS_PER_TIMEOUT)
            await asyncio.wait({stopped}, timeout=self._interval_s)
        self._report(False)

    async def _needs_step(self, stopped: "asyncio.Future[None]") -> bool | None:
        """Whether the engine has something to compute; None when its thread has ended."""
        if stopped.done():
            return None
        engine = self._engine

        def needs_step() -> bool:
            load = engine.load
            return load.num_running + load.num_waiting > 0 and not engine.awaits_hints

        answer = asyncio.wrap_future(engine.call(needs_step))
        timeout_s: float | None = self._stall_timeout_s
        while not answer.done() and not stopped.done():
            either: set[asyncio.Future[Any]] = {answer, stopped}
            done, _ = await asyncio.wait(
                either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._report(False)
                timeout_s = None
        if not answer.done():
            answer.cancel()
            return None
        return answer.result()

    def _report(self, is_alive: bool) -> None:
        if is_alive != self._is_alive:
            self._is_alive = is_alive
            self._on_change(is_alive)
