"""Messages of peers, or parts of them, that are invalid and ignored.

Owns how they are reported: all are counted; per peer and reason, one line is logged per minute at
most, so that a peer that keeps failing fills no disk.
"""

import time
from collections.abc import Callable

from gateway.metrics import GatewayMetrics
from servicekit.logs import Logger

_LOG_INTERVAL_S = 60.0
# Of a peer's own words, in a log line.
_MAX_DETAIL_CHARACTERS = 200


class IgnoredMessages:
    """Counts and logs for one gateway; on the event loop."""

    def __init__(
        self,
        *,
        metrics: GatewayMetrics,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        # By peer and reason, both of fixed sets: when the next line may be logged, and how many
        # messages were counted since the last line.
        self._next_log_s: dict[tuple[str, str], float] = {}
        self._num_unlogged: dict[tuple[str, str], int] = {}

    def record(self, peer: str, name: str, reason: str, detail: str = "") -> None:
        """Reports one ignored message, or an ignored part of one.

        Args:
            peer: "verifier" or "drafter".
            name: the peer's address.
            reason: one of `metrics.IGNORED_REASONS`.
            detail: what was wrong with it.
        """
        self._metrics.count_ignored(peer, reason)
        key = (name, reason)
        now_s = self._clock()
        if now_s < self._next_log_s.get(key, 0.0):
            self._num_unlogged[key] = self._num_unlogged.get(key, 0) + 1
            return
        self._next_log_s[key] = now_s + _LOG_INTERVAL_S
        self._logger.warning(
            "peer_message_ignored",
            peer=peer,
            address=name,
            reason=reason,
            detail=detail[:_MAX_DETAIL_CHARACTERS],
            num_unlogged=self._num_unlogged.pop(key, 0),
        )
