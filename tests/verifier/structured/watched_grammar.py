"""A grammar of which a test can see what a step asks of it, and in which thread."""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Far longer than anything here takes.
PATIENCE_S = 60.0


class WatchedGrammar:
    """In place of a `GrammarState`: allows all tokens, and notes what asks for masks."""

    def __init__(self, vocab_size: int = 32, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        # The threads that asked for masks; and how often it was asked for tokens alone.
        self.asked_by: list[str] = []
        self.num_checked = 0
        self.is_asked = threading.Event()
        self._error = error
        self._masks = np.full((1, (vocab_size + 31) // 32), -1, dtype=np.int32)
        self._is_computed = False

    def forget_fault(self) -> None:
        pass

    def take_in(self, token_ids: Sequence[int], prompt_length: int) -> None:
        self._is_computed = False

    def forced(self, limit: int) -> list[int]:
        return []

    def has_masks(self, draft_token_ids: Sequence[int]) -> bool:
        return self._is_computed

    def allows(self, token_ids: Sequence[int]) -> bool:
        self.num_checked += 1
        if self._error is not None:
            raise self._error
        return True

    def allowed(self, draft_token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        self.asked_by.append(threading.current_thread().name)
        self.is_asked.set()
        assert self.may_end.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        self._is_computed = True
        return self._masks
