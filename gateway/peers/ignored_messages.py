"""What peers said that makes no sense, and is ignored.

Owns how it is told: all of it is counted, and of each peer and reason a line is logged at most
once a minute, so that a peer that goes wrong for good fills no disk.
"""

import time
from collections.abc import Callable

from gateway.metrics import GatewayMetrics
from servicekit.logs import Logger

_LOG_INTERVAL_S = 60.0
# Of what a peer wrote, in a log line.
_MAX_DETAIL_CHARACTERS = 200


class OddMessages:
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
        # By peer and reason, both of fixed sets: when a line may be logged again, and how many
        # were counted since the last.
        self._next_log_s: dict[tuple[str, str], float] = {}
        self._num_unlogged: dict[tuple[str, str], int] = {}

    def note(self, peer: str, name: str, reason: str, detail: str = "") -> None:
        """One message, or a part of one, is ignored.

        Args:
            peer: "verifier" or "drafter".
            name: the peer's address.
            reason: one of `metrics.IGNORED_REASONS`.
            detail: what was odd about it.
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
