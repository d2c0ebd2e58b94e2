"""How many requests are admitted: choices at a time, and prompt tokens that wait.

Owns both counts. A choice waits until its first output comes: until then a verifier has its prompt
to compute, and how long that takes depends on the sum of prompts, not on their number. Quotas of
single tenants belong here, too. On the event loop. Knows no request.
"""

import asyncio
from collections.abc import Callable

from gateway.errors import RETRY_AFTER_MS, OverloadedError, UnavailableError


class Admission:
    """Counts the admitted requests and refuses what is over the limits."""

    def __init__(
        self, *, max_choices: int, max_waiting_tokens: int, on_shed: Callable[[str], None]
    ) -> None:
        """Begins empty and open.

        Args:
            max_choices: the most choices at a time, over all requests.
            max_waiting_tokens: the most tokens of waiting choices, over all requests; a request
                may have more while no other waits.
            on_shed: called with the reason of every refusal.
        """
        self._max_choices = max_choices
        self._max_waiting_tokens = max_waiting_tokens
        self._on_shed = on_shed
        self.num_requests = 0
        self.num_choices = 0
        self.num_waiting_tokens = 0
        self.is_draining = False
        self._emptied = asyncio.Event()

    def admit(self, num_choices: int) -> "AdmittedRequest":
        """Admits one request, which must `leave`.

        Raises:
            UnavailableError: draining.
            OverloadedError: there are too many choices.
        """
        if self.is_draining:
            self._on_shed("draining")
            raise UnavailableError("the server is shutting down", retry_after_ms=RETRY_AFTER_MS)
        if self.num_choices + num_choices > self._max_choices:
            self._on_shed("concurrency")
            raise OverloadedError(
                f"{self.num_choices} of at most {self._max_choices} choices are being generated",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.num_choices += num_choices
        self.num_requests += 1
        return AdmittedRequest(self, num_choices)

    async def drain(self) -> None:
        """Admits nobody from now on and returns when all have left."""
        self.is_draining = True
        while self.num_requests:
            self._emptied.clear()
            await self._emptied.wait()

    def check_idle(self) -> None:
        """Checks that no request is admitted.

        Raises:
            AssertionError: one is; it names the count.
        """
        assert self.num_requests == 0, f"{self.num_requests} requests are admitted"
        assert self.num_choices == 0, f"{self.num_choices} choices are admitted"
        assert self.num_waiting_tokens == 0, f"{self.num_waiting_tokens} tokens are waiting"

    def _wait(self, num_tokens: int, *, instead_of: int) -> None:
        others = self.num_waiting_tokens - instead_of
        if others > 0 and others + num_tokens > self._max_waiting_tokens:
            self._on_shed("waiting_tokens")
            raise OverloadedError(
                f"{others} prompt tokens are waiting; {num_tokens} more would exceed the limit of "
                f"{self._max_waiting_tokens}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.num_waiting_tokens = others + num_tokens

    def _leave(self, num_choices: int, num_waiting_tokens: int) -> None:
        self.num_choices -= num_choices
        self.num_waiting_tokens -= num_waiting_tokens
        self.num_requests -= 1
        if self.num_requests == 0:
            self._emptied.set()


class AdmittedRequest:
    """One request's share of the counts, from `Admission.admit` to `leave`."""

    def __init__(self, admission: Admission, num_choices: int) -> None:
        self._admission = admission
        self._num_choices = num_choices
        self._num_waiting = num_choices
        self._num_tokens = 0

    def wait_with(self, num_tokens: int) -> None:
        """Sets with how many tokens each choice waits; before any choice began.

        Raises:
            OverloadedError: too many tokens are waiting; the count is as before.
        """
        assert self._num_waiting == self._num_choices
        self._admission._wait(
            num_tokens * self._num_waiting, instead_of=self._num_tokens * self._num_waiting
        )
        self._num_tokens = num_tokens

    def begin_choice(self) -> None:
        """The first output of one more choice came: it no longer waits."""
        self._num_waiting -= 1
        self._admission.num_waiting_tokens -= self._num_tokens

    def leave(self) -> None:
        """The request is over."""
        self._admission._leave(self._num_choices, self._num_tokens * self._num_waiting)
