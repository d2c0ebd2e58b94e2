"""When decided tokens are shown to the clients: after the hints.

Owns that order. Making text of a step's tokens and writing them to many clients takes longer than
the whole round trip to the drafter, so it must not delay a hint:

- while drafts are awaited, clients wait, but never longer than `max_delay_s`;
- few clients are served per iteration of the event loop, so that a step which ends meanwhile is
  handled between two iterations and not after all clients.

A generation waits once, however many steps it gathers: under load a client's chunks merge by
themselves, and the waiting generations are bounded by the live sequences.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from gateway.generation.generation import Generation

#: Clients served before the event loop polls its sockets again.
CLIENTS_PER_ITERATION = 4


class Delivery:
    """Generations with tokens that are not shown yet; on the event loop."""

    def __init__(
        self,
        *,
        publish: Callable[[Sequence[Generation]], None],
        awaits_drafts: Callable[[], bool],
        max_delay_s: float,
    ) -> None:
        """Begins empty.

        Args:
            publish: shows the generations' decided tokens to their clients.
            awaits_drafts: whether a hint is expected.
            max_delay_s: how long it may delay clients.
        """
        self._publish = publish
        self._awaits_drafts = awaits_drafts
        self._max_delay_s = max_delay_s
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[Generation, float] = {}  # oldest first
        self._next_run: asyncio.Handle | None = None
        self._is_delayed = False  # whether the next run is a timer's

    @property
    def is_idle(self) -> bool:
        return not self._due_s and self._next_run is None

    def add(self, generation: Generation, now_s: float) -> None:
        """The generation has new tokens; hot path."""
        if generation not in self._due_s:
            self._due_s[generation] = now_s + self._max_delay_s

    def discard(self, generation: Generation) -> None:
        """Nobody wants the generation's tokens any more."""
        self._due_s.pop(generation, None)
        if not self._due_s:
            self._cancel_run()

    def resume(self) -> None:
        """Schedules a run after a change: tokens were added, or hints were forwarded."""
        if not self._due_s:
            return
        if self._next_run is not None:
            if not self._is_delayed or self._awaits_drafts():
                return
            self._cancel_run()
        self._schedule()

    def _run(self) -> None:
        self._next_run = None
        if not self._must_wait():
            generations = list(itertools.islice(self._due_s, CLIENTS_PER_ITERATION))
            for generation in generations:
                del self._due_s[generation]
            try:
                self._publish(generations)
            finally:
                # The others are served even if these fail.
                if self._due_s:
                    self._schedule()
        elif self._due_s:
            self._schedule()

    def _schedule(self) -> None:
        self._is_delayed = self._must_wait()
        if self._is_delayed:
            self._next_run = self._loop.call_at(next(iter(self._due_s.values())), self._run)
        else:
            # The peers' writers, woken before, run first.
            self._next_run = self._loop.call_soon(self._run)

    def _must_wait(self) -> bool:
        return self._awaits_drafts() and self._loop.time() < next(iter(self._due_s.values()))

    def _cancel_run(self) -> None:
        if self._next_run is not None:
            self._next_run.cancel()
            self._next_run = None
