"""Messages of one verifier, or parts of them, that are invalid and ignored.

Owns how they are reported: all are counted; per reason, one line is logged per minute at most, so
that a verifier that keeps failing fills no disk.
"""

import time
from collections.abc import Callable

from gateway.metrics import GatewayMetrics
from servicekit.logs import Logger

_LOG_INTERVAL_S = 60.0
# Of a verifier's own words, in a log line.
_MAX_DETAIL_CHARACTERS = 200


class IgnoredMessages:
    """Counts and logs for one link; on the event loop."""

    def __init__(
        self,
        *,
        verifier: str,
        metrics: GatewayMetrics,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with nothing recorded."""
        self._verifier = verifier
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        # By reason: when the next line may be logged, and how many messages came since the last.
        self._next_log_s: dict[str, float] = {}
        self._num_unlogged: dict[str, int] = {}

    def record(self, reason: str, detail: str = "") -> None:
        """Reports one ignored message, or an ignored part of one.

        Args:
            reason: one of `metrics.IGNORED_REASONS`.
            detail: what was wrong with it.
        """
        self._metrics.count_ignored(reason)
        now_s = self._clock()
        if now_s < self._next_log_s.get(reason, 0.0):
            self._num_unlogged[reason] = self._num_unlogged.get(reason, 0) + 1
            return
        self._next_log_s[reason] = now_s + _LOG_INTERVAL_S
        self._logger.warning(
            "peer_message_ignored",
            verifier=self._verifier,
            reason=reason,
            detail=detail[:_MAX_DETAIL_CHARACTERS],
            num_unlogged=self._num_unlogged.pop(reason, 0),
        )
