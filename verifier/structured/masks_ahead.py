"""Computes the masks of a step's grammars while its forward pass runs.

A device computes beside the engine's thread, which computes the masks then. A CPU's forward pass
runs on the engine's thread, without the interpreter lock, so the masks have a thread of their own.
It may come late, where other processes have the processors: what it has not begun when the forward
pass is over, the engine's thread computes. So a step waits for no more than the masks of one
sequence. Where the system has no thread left, that thread computes them all.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from servicekit.logs import get_logger
from verifier.structured.grammar_state import GrammarState

logger = get_logger(__name__)

# A sequence's state, and the drafts that the step verifies.
Asked = tuple[GrammarState, SequenceOf[int]]

# To wake the thread costs the caller more than one mask.
_LEAST_ASKED = 2

# A mask takes far less, unless the engine has failed in the middle of a step.
_LAST_MASK_S = 1.0


class MasksAhead:
    """Owned by the engine thread. For each step it calls `begin`, then `finish`: in between, no
    other thread may use the grammars of the step.

    Invariant: what is not in `_asked` any more is computed by the thread that took it; the thread
    here holds `_computing` from before it takes until the masks are there.
    """

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque()
        self._computing = threading.Lock()
        # Held but while the thread has to look for what is asked.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, asked: Iterable[Asked]) -> None:
        """Lets the thread compute the masks that are not there yet, unless that saves no time. The
        first call that needs the thread starts it; where that fails, `finish` computes all masks,
        and no later call tries again.
        """
        assert not self._asked, "the last step was not finished"
        self._asked += [each for each in asked if not each[0].has_masks(each[1])]
        if len(self._asked) < _LEAST_ASKED:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                logger.warning("masks_without_a_thread", reason=str(error))
        self._wake()

    def finish(self) -> None:
        """Returns when all masks are there, or what raises when they are computed is known to the
        grammar, whose `allowed` raises it.
        """
        while self._compute_next():
            pass
        with self._computing:
            pass

    def close(self) -> None:
        """Ends the thread, or gives it up if the library does not return; idempotent."""
        self._is_closed = True
        self._wake()
        # It may never have started.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_LAST_MASK_S)

    def _wake(self) -> None:
        # Nobody else releases it, so it is not released twice.
        if self._asleep.locked():
            self._asleep.release()

    def _run(self) -> None:
        while True:
            self._asleep.acquire()
            if self._is_closed:
                return
            is_left = True
            while is_left:
                with self._computing:
                    is_left = self._compute_next()

    def _compute_next(self) -> bool:
        """Computes the masks of one sequence; False if none is left."""
        try:
            state, draft_token_ids = self._asked.popleft()
        except IndexError:
            return False
        # Whoever asks for the masks meets it again, and knows which sequence it ends.
        with contextlib.suppress(BaseException):
            state.allowed(draft_token_ids)
        return True
