"""Handles the loss of another rank: logs it once, and ends this process soon."""

import os
import threading
from concurrent.futures import Future

from servicekit.logs import get_logger
from verifier.tensor_parallel.connection import RankLostError

logger = get_logger(__name__)

# How long the process may take to end by itself; it cannot if it is stuck in a collective.
_EXIT_TIMEOUT_S = 5.0

# A collective may fail before the end of the peer is noticed.
_EXPLANATION_S = 2.0


class Watch:
    """Thread-safe. The reading threads of connections call `rank_lost`.

    Attributes:
        lost: fails with RankLostError when a rank is lost.
    """

    def __init__(self, *, exit_timeout_s: float = _EXIT_TIMEOUT_S) -> None:
        self.lost: Future[None] = Future()
        self._exit_timeout_s = exit_timeout_s
        self._lock = threading.Lock()

    def rank_lost(self, reason: str) -> None:
        """Logs the first loss, and ends the process after a few seconds at the latest."""
        with self._lock:
            if self.lost.done():
                return
            logger.error("rank_lost", reason=reason)
            self.lost.set_exception(RankLostError(reason))
        killer = threading.Timer(self._exit_timeout_s, os._exit, (1,))
        killer.daemon = True
        killer.start()

    def explain(self, error: Exception) -> Exception:
        """Why a step failed: RankLostError if a rank is lost, else the error itself."""
        try:
            return self.lost.exception(_EXPLANATION_S) or error  # type: ignore[return-value]
        except TimeoutError:
            return error
