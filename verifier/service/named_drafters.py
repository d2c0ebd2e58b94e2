"""Which drafters one session may name, and how many new ones.

An entry of `--drafters` admits any host below its name, so a session can make names up: each costs
a connection, and every session is told of it. Owns how fast a session may name drafters that it has
not named lately. Knows no connection.
"""

import time
from collections.abc import Callable

from verifier.errors import InvalidRequestError, OverloadedError

#: New names at once; a verifier uses no more drafters at a time.
MAX_NEW_NAMES = 256
#: After that, one more in so many seconds.
NEW_NAME_INTERVAL_S = 1.0


class NamedDrafters:
    """Of one session; on the event loop."""

    def __init__(
        self, admits: Callable[[str], bool], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins with none.

        Args:
            admits: whether the operator allows an address at all.
            clock: in seconds.
        """
        self._admits = admits
        self._clock = clock
        # The one that was named last is the last; as many as may be new at once.
        self._named: dict[str, None] = {}
        self._num_free = float(MAX_NEW_NAMES)
        self._freed_at_s = clock()

    def check(self, address: str, *, field: str) -> None:
        """Checks an address that the session names.

        Args:
            field: where it does.

        Raises:
            InvalidRequestError: the operator does not allow it.
            OverloadedError: the session has named too many others lately.
        """
        if not self._admits(address):
            raise InvalidRequestError(
                f"{address!r} is not among this verifier's --drafters", field=field
            )
        if address in self._named:
            del self._named[address]
        else:
            self._take(address, field)
        self._named[address] = None
        if len(self._named) > MAX_NEW_NAMES:
            del self._named[next(iter(self._named))]

    def _take(self, address: str, field: str) -> None:
        now_s = self._clock()
        num_freed = (now_s - self._freed_at_s) / NEW_NAME_INTERVAL_S
        self._num_free = min(float(MAX_NEW_NAMES), self._num_free + num_freed)
        self._freed_at_s = now_s
        if self._num_free < 1:
            raise OverloadedError(
                f"{address!r} is new, and too many drafters were named lately",
                field=field,
                retry_after_ms=int(1000 * NEW_NAME_INTERVAL_S),
            )
        self._num_free -= 1
