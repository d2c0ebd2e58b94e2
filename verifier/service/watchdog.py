"""Tells whether the engine makes progress: what a liveness probe wants to know.

Owns that judgement alone. Load does not count, however high: a restart would only add to it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from verifier.engine.engine import Engine
from verifier.engine.observation import EngineLoad

# Between two looks, as a part of the stall timeout.
_LOOKS_PER_TIMEOUT = 4


class Watchdog:
    """Looks at the engine again and again, from the event loop.

    The engine is stuck when its thread has ended, when it takes no command for the stall timeout
    (commands are taken between steps: one step does not end), or when it has sequences, takes
    commands, and finishes no step for the stall timeout on top of the longest that a sequence may
    wait for its client's drafts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stall_timeout_s: float,
        draft_idle_timeout_s: float,
        on_change: Callable[[bool], None],
    ) -> None:
        """Begins by taking the engine for alive.

        Args:
            engine: a started engine.
            stall_timeout_s: see the class.
            draft_idle_timeout_s: the engine's bound on waits for a draft.
            on_change: told whether the engine is alive, whenever that changes.
        """
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = stall_timeout_s / _LOOKS_PER_TIMEOUT
        # In looks, not in time: looks that were late because the process stood still don't count.
        self._max_idle_checks = _LOOKS_PER_TIMEOUT + int(draft_idle_timeout_s / self._interval_s)
        self._on_change = on_change
        self._is_alive = True

    async def run(self, stopped: "asyncio.Future[None]") -> None:
        """Until cancelled, or until the engine's thread has ended.

        Args:
            stopped: done when it has; only watched.
        """
        num_steps, num_idle_looks = 0, 0
        while (load := await self._next_load(stopped)) is not None:
            if load.num_steps > num_steps or not load.num_running + load.num_waiting:
                num_idle_looks = 0
            else:
                num_idle_looks += 1
            num_steps = load.num_steps
            self._tell(num_idle_looks <= self._max_idle_checks)
            await asyncio.wait({stopped}, timeout=self._interval_s)
        self._tell(False)

    async def _next_load(self, stopped: "asyncio.Future[None]") -> EngineLoad | None:
        """What the engine says between two steps; None when its thread has ended."""
        if stopped.done():
            return None
        answer = asyncio.wrap_future(self._engine.call(lambda: self._engine.load))
        timeout_s: float | None = self._stall_timeout_s
        while not answer.done() and not stopped.done():
            either: set[asyncio.Future[Any]] = {answer, stopped}
            done, _ = await asyncio.wait(
                either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._tell(False)
                timeout_s = None
        if not answer.done():
            answer.cancel()
            return None
        return answer.result()

    def _tell(self, is_alive: bool) -> None:
        if is_alive != self._is_alive:
            self._is_alive = is_alive
            self._on_change(is_alive)
