"""Clients after hints: when decided tokens are handed to the clients' streams.

Owns that order and nothing else. Making text of a step's tokens and writing them to many clients
takes longer than the whole hop to the drafter and back, so it must not sit in front of a hint:

- while drafts are awaited, clients wait, but never longer than `max_delay_s`;
- clients are served a few per turn of the event loop, so that a step which ends meanwhile is
  handled between two turns and not behind all of them.

A generation that waits is there once, however many steps it gathers: under load a client's chunks
merge by themselves, and what waits is bounded by the live sequences.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from gateway.generation.generation import Generation

#: How many clients are served before the event loop looks at its sockets again.
CLIENTS_PER_TURN = 4


class Delivery:
    """Generations with tokens that their clients have not been shown; on the event loop."""

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
            awaits_drafts: whether a hint is on its way.
            max_delay_s: how long it may hold up clients.
        """
        self._publish = publish
        self._awaits_drafts = awaits_drafts
        self._max_delay_s = max_delay_s
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[Generation, float] = {}  # oldest first
        self._next_turn: asyncio.Handle | None = None
        self._is_waiting = False  # whether the next turn is a timer's

    @property
    def is_idle(self) -> bool:
        return not self._due_s and self._next_turn is None

    def add(self, generation: Generation, now_s: float) -> None:
        """The generation has new tokens; hot path."""
        if generation not in self._due_s:
            self._due_s[generation] = now_s + self._max_delay_s

    def discard(self, generation: Generation) -> None:
        """Nobody wants the generation's tokens any more."""
        self._due_s.pop(generation, None)
        if not self._due_s:
            self._cancel_turn()

    def go_on(self) -> None:
        """Something changed: tokens were added, or hints were forwarded."""
        if not self._due_s:
            return
        if self._next_turn is not None:
            if not self._is_waiting or self._awaits_drafts():
                return
            self._cancel_turn()
        self._schedule()

    def _turn(self) -> None:
        self._next_turn = None
        if not self._must_wait():
            turn = list(itertools.islice(self._due_s, CLIENTS_PER_TURN))
            for generation in turn:
                del self._due_s[generation]
            try:
                self._publish(turn)
            finally:
                # The others are served whatever happens to these.
                if self._due_s:
                    self._schedule()
        elif self._due_s:
            self._schedule()

    def _schedule(self) -> None:
        self._is_waiting = self._must_wait()
        if self._is_waiting:
            self._next_turn = self._loop.call_at(next(iter(self._due_s.values())), self._turn)
        else:
            # Behind the writers that were woken before: their messages go first.
            self._next_turn = self._loop.call_soon(self._turn)

    def _must_wait(self) -> bool:
        return self._awaits_drafts() and self._loop.time() < next(iter(self._due_s.values()))

    def _cancel_turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
