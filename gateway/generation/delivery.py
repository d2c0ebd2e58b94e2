"""When decided tokens are shown to the clients: soon, and few clients at a time.

Owns that order. Making text of a step's tokens and writing them to many clients takes long, so few
clients are served per iteration of the event loop: whatever else is due, such as the next step or a
new request, is handled between two iterations and not after all clients.

A generation waits once, however many steps it gathers: under load a client's chunks merge by
themselves, and the waiting generations are bounded by the live sequences.

Making, sending and reading a message takes gateway and client more time than a step of a small
model. So a stream gets at most two messages per interval, usually one, with the tokens of all steps
in between. Its first and its last tokens never wait, and where steps are longer than the interval
none does.

One message takes the event loop about as long whatever it holds, so with many streams the interval
is longer: one message to each stream may take half of it. The other half is left for what the
verifiers send. A loop that only writes would read a verifier's steps more slowly than they are
made, and what a verifier has not sent merges into no message: it waits, and each new request
behind it.

A stop string must be found soon, since the verifier goes on until then: such a stream gathers
nothing while all can have a message per step. With so many streams that the interval is longer, it
gathers as the others do.
"""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from gateway.generation.generation import Generation

#: Clients served before the event loop polls its sockets again.
CLIENTS_PER_ITERATION = 16

#: The share of the event loop's time that messages to streams may take.
_SHARE = 0.5

#: Messages over which the time of one is measured.
MESSAGES_PER_MEASUREMENT = 1024

# The measurement has all that the loop does. If it does much else, few messages cause it.
_MAX_MESSAGE_S = 400e-6


class Delivery:
    """Generations with tokens that are not shown yet; on the event loop."""

    def __init__(
        self,
        publish: Callable[[Sequence[Generation]], None],
        *,
        interval_s: float,
        num_streams: Callable[[], int],
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """Begins empty.

        Args:
            publish: shows the generations' decided tokens to their clients.
            interval_s: for how long a stream's tokens are gathered at least; 0: not at all.
            num_streams: how many generations get tokens.
            thread_time: the processor time of the event loop's thread, in seconds.
        """
        self._publish = publish
        self._min_interval_s = interval_s
        self._interval_s = interval_s
        self._num_streams = num_streams
        self._thread_time = thread_time
        # Processor time of the loop per message, and since when the next measurement runs.
        self._message_s = 0.0
        self._num_messages = 0
        self._measured_at_s = thread_time()
        self._loop = asyncio.get_running_loop()
        # Oldest first; thousands may wait, and a plain dict is slow to give its oldest entry.
        self._waiting: OrderedDict[Generation, None] = OrderedDict()
        self._next_run: asyncio.Handle | None = None
        # Gather tokens until the next tick, when all of them are served.
        self._gathering: dict[Generation, None] = {}
        self._next_tick: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._gathering

    def add(self, generation: Generation) -> None:
        """The generation has new tokens; hot path."""
        interval_s = self._interval_s
        if generation.is_urgent and interval_s == self._min_interval_s:
            interval_s = 0.0
        if interval_s and generation.may_gather:
            if generation in self._gathering:
                return
            due_s = generation.served_at_s + interval_s
            if self._loop.time() < due_s:
                self._gathering[generation] = None
                if self._next_tick is None:
                    self._next_tick = self._loop.call_at(due_s, self._tick)
                return
        self._gathering.pop(generation, None)
        self._serve(generation)

    def discard(self, generation: Generation) -> None:
        """Nobody wants the generation's tokens any more."""
        self._waiting.pop(generation, None)
        self._gathering.pop(generation, None)

    def _tick(self) -> None:
        self._next_tick = None
        gathering, self._gathering = self._gathering, {}
        for generation in gathering:
            self._serve(generation)

    def _serve(self, generation: Generation) -> None:
        self._waiting[generation] = None
        if self._next_run is None:
            self._next_run = self._loop.call_soon(self._run)

    def _run(self) -> None:
        now_s = self._loop.time()
        generations = list(itertools.islice(self._waiting, CLIENTS_PER_ITERATION))
        for generation in generations:
            del self._waiting[generation]
            generation.served_at_s = now_s
        # The others are served even if these fail.
        self._next_run = self._loop.call_soon(self._run) if self._waiting else None
        if self._min_interval_s:
            self._fit_interval(len(generations))
        self._publish(generations)

    def _fit_interval(self, num_messages: int) -> None:
        """Makes the interval as long as so many streams need; hot path."""
        self._num_messages += num_messages
        if self._num_messages >= MESSAGES_PER_MEASUREMENT:
            now_s = self._thread_time()
            message_s = (now_s - self._measured_at_s) / self._num_messages
            self._message_s = min(message_s, _MAX_MESSAGE_S)
            self._num_messages, self._measured_at_s = 0, now_s
        needed_s = self._num_streams() * self._message_s / _SHARE
        self._interval_s = max(self._min_interval_s, needed_s)
