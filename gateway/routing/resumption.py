"""Choices whose verifier is gone, until another one goes on with them.

Owns when each is tried: soon, few per iteration of the event loop, since a verifier may leave
thousands behind; then at intervals and whenever a verifier comes, until its time is over. Knows no
verifier: the coordinator places them.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from gateway.generation.generation import Generation

#: Choices tried before the event loop polls its sockets again.
CHOICES_PER_ITERATION = 16
_RETRY_INTERVAL_S = 0.25


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Displaced:
    """One choice without a verifier.

    Attributes:
        reason: why it lost that verifier, for metrics.
        expires_s: when it fails, if none of the verifiers there are takes it.
        refused_by: names of verifiers that are asked only after all others.
    """

    generation: Generation
    reason: str
    expires_s: float
    refused_by: frozenset[str] = frozenset()


class Resumption:
    """All displaced choices; on the event loop."""

    def __init__(
        self,
        *,
        timeout_s: float,
        place: Callable[[Displaced], bool],
        fail: Callable[[Displaced], None],
        on_load: Callable[[], None],
    ) -> None:
        """Args:
        timeout_s: how long a choice waits for a verifier.
        place: opens a choice at a verifier, or finds it over; False if none can take it now.
        fail: ends a choice whose time is over.
        on_load: called when `num_waiting` has changed.
        """
        self._timeout_s = timeout_s
        self._place = place
        self._fail = fail
        self._on_load = on_load
        self._loop = asyncio.get_running_loop()
        # Each is in one of the two, in the order of their turns: soon, or after an interval.
        self._due: deque[Displaced] = deque()
        self._later: deque[Displaced] = deque()
        self._next_run: asyncio.Handle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._due) + len(self._later)

    def generations(self) -> Sequence[Generation]:
        """The choices that wait."""
        return [displaced.generation for displaced in (*self._due, *self._later)]

    def add(
        self, generation: Generation, reason: str, refused_by: frozenset[str] = frozenset()
    ) -> None:
        """The choice needs a verifier; it is tried soon."""
        self._due.append(
            Displaced(
                generation=generation,
                reason=reason,
                expires_s=self._loop.time() + self._timeout_s,
                refused_by=refused_by,
            )
        )
        self._on_load()
        self._run_soon()

    def put_back(self, displaced: Displaced) -> None:
        """It was refused: it is tried again after an interval, or when a verifier comes."""
        self._later.append(displaced)
        self._on_load()
        if self._next_run is None:
            self._next_run = self._loop.call_later(_RETRY_INTERVAL_S, self.wake)

    def wake(self) -> None:
        """A verifier came: tries all."""
        self._due += self._later
        self._later.clear()
        if self._due:
            self._run_soon()

    def _run_soon(self) -> None:
        if self._next_run is not None:
            self._next_run.cancel()
        self._next_run = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._next_run = None
        for _ in range(min(CHOICES_PER_ITERATION, len(self._due))):
            displaced = self._due.popleft()
            if self._place(displaced):
                continue
            if self._loop.time() >= displaced.expires_s:
                self._fail(displaced)
            else:
                self._later.append(displaced)
        self._on_load()
        if self._due:
            self._run_soon()
        elif self._later and self._next_run is None:
            self._next_run = self._loop.call_later(_RETRY_INTERVAL_S, self.wake)
