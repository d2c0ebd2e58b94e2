"""When decided tokens are shown to the clients: soon, and few clients at a time.

Owns that order. Making text of a step's tokens and writing them to many clients takes long, so few
clients are served per iteration of the event loop: whatever else is due, such as the next step or a
new request, is handled between two iterations and not after all clients.

A generation waits once, however many steps it gathers: under load a client's chunks merge by
themselves, and the waiting generations are bounded by the live sequences.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

from gateway.generation.generation import Generation

#: Clients served before the event loop polls its sockets again.
CLIENTS_PER_ITERATION = 4


class Delivery:
    """Generations with tokens that are not shown yet; on the event loop."""

    def __init__(self, publish: Callable[[Sequence[Generation]], None]) -> None:
        """Begins empty.

        Args:
            publish: shows the generations' decided tokens to their clients.
        """
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        # Oldest first; thousands may wait, and a plain dict is slow to give its oldest entry.
        self._waiting: OrderedDict[Generation, None] = OrderedDict()
        self._next_run: asyncio.Handle | None = None

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def add(self, generation: Generation) -> None:
        """The generation has new tokens; hot path."""
        self._waiting[generation] = None
        if self._next_run is None:
            self._next_run = self._loop.call_soon(self._run)

    def discard(self, generation: Generation) -> None:
        """Nobody wants the generation's tokens any more."""
        self._waiting.pop(generation, None)

    def _run(self) -> None:
        generations = list(itertools.islice(self._waiting, CLIENTS_PER_ITERATION))
        for generation in generations:
            del self._waiting[generation]
        # The others are served even if these fail.
        self._next_run = self._loop.call_soon(self._run) if self._waiting else None
        self._publish(generations)
