"""Which drafters one session may name, and how many new ones.

An entry of `--drafters` admits any host below its name, so a session can make names up: each costs
a connection, and every session is told of it. Owns how fast a session may name drafters that it has
not named lately; a sequence that names one beyond that goes without it. Knows no connection.
"""

import time
from collections.abc import Callable

from servicekit.logs import get_logger
from verifier.errors import InvalidRequestError

logger = get_logger(__name__)

#: New names at once; a verifier uses no more drafters at a time.
MAX_NEW_NAMES = 256
#: After that, one more in so many seconds.
NEW_NAME_INTERVAL_S = 1.0

_LOG_INTERVAL_S = 60.0


class NamedDrafters:
    """The drafters that one session may name; owned by the event loop."""

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
        # Since the last log line; and when the next one may be written.
        self._num_unused = 0
        self._next_log_s = clock()

    def admit(self, address: str, *, field: str) -> bool:
        """Whether a drafter that the session names is used; False: it named too many others lately.

        Args:
            field: where it names it.

        Raises:
            InvalidRequestError: the operator does not allow it.
        """
        if not self._admits(address):
            raise InvalidRequestError(
                f"{address!r} is not among this verifier's --drafters", field=field
            )
        if address in self._named:
            del self._named[address]
        elif not self._take():
            self._log_unused(address)
            return False
        self._named[address] = None
        if len(self._named) > MAX_NEW_NAMES:
            del self._named[next(iter(self._named))]
        return True

    def _take(self) -> bool:
        now_s = self._clock()
        num_freed = (now_s - self._freed_at_s) / NEW_NAME_INTERVAL_S
        self._num_free = min(float(MAX_NEW_NAMES), self._num_free + num_freed)
        self._freed_at_s = now_s
        if self._num_free < 1:
            return False
        self._num_free -= 1
        return True

    def _log_unused(self, address: str) -> None:
        """One line a minute at most."""
        self._num_unused += 1
        now_s = self._clock()
        if now_s >= self._next_log_s:
            logger.warning(
                "too_many_new_drafters", drafter=address, num_without_drafts=self._num_unused
            )
            self._num_unused, self._next_log_s = 0, now_s + _LOG_INTERVAL_S
