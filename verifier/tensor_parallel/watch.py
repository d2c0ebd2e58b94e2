"""What happens when another rank is gone: it is said once, and this process ends soon."""

import os
import threading
from concurrent.futures import Future

from servicekit.logs import get_logger
from verifier.tensor_parallel.connection import RankLostError

logger = get_logger(__name__)

# How long a process has to end by itself. One that is stuck in a collective cannot.
_LAST_WORDS_S = 5.0

# A collective may fail before the peer's end is heard of.
_EXPLANATION_S = 2.0


class Watch:
    """Told by the reading threads of connections; asked by anyone.

    Attributes:
        lost: fails with RankLostError when a rank is gone.
    """

    def __init__(self, *, last_words_s: float = _LAST_WORDS_S) -> None:
        self.lost: Future[None] = Future()
        self._last_words_s = last_words_s
        self._lock = threading.Lock()

    def rank_lost(self, reason: str) -> None:
        """Logs the first loss and ends the process in a few seconds, whatever it does."""
        with self._lock:
            if self.lost.done():
                return
            logger.error("rank_lost", reason=reason)
            self.lost.set_exception(RankLostError(reason))
        killer = threading.Timer(self._last_words_s, os._exit, (1,))
        killer.daemon = True
        killer.start()

    def explain(self, error: Exception) -> Exception:
        """Why a step failed: RankLostError if a rank is gone, else the error itself."""
        try:
            return self.lost.exception(_EXPLANATION_S) or error  # type: ignore[return-value]
        except TimeoutError:
            return error
