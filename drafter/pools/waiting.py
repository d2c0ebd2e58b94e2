"""Texts that were fed and are still to be taken into their pools, first come, first served.

Owns their order and the bound on how many bytes wait. Does not know what becomes of them
(`pool_store.py`).
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from drafter.pool_index.records import POOL_RECORD_BYTES, TEXT_RECORD_BYTES, Text


class WaitingTexts:
    """Owned by the event loop, through the store.

    Invariants (see `check_integrity`): `num_bytes` is what the texts count for, and never above its
    bound; each has tokens left that wait.

    Attributes:
        texts: the first to be taken in, which may have been in part, comes first.
        num_bytes: what they count for, until they are taken in whole.
    """

    def __init__(self, max_bytes: int) -> None:
        self.texts: deque[Text] = deque()
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def has_room_for(self, token_ids: npt.NDArray[np.uint32]) -> bool:
        """Whether a text of these tokens may wait."""
        return self.num_bytes + _bytes_of(token_ids) <= self._max_bytes

    def add(self, text: Text) -> None:
        """Has a text wait, for which there is room."""
        assert text.waiting is not None
        text.waiting_bytes = _bytes_of(text.waiting)
        self.num_bytes += text.waiting_bytes
        self.texts.append(text)

    def end(self, text: Text) -> None:
        """Says that the first one waits no more."""
        assert self.texts[0] is text
        self.texts.popleft()
        self.num_bytes -= text.waiting_bytes
        text.waiting = None

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert all(text.waiting is not None and len(text.waiting) > 0 for text in self.texts)
        assert self.num_bytes == sum(text.waiting_bytes for text in self.texts)
        assert self.num_bytes <= self._max_bytes


def _bytes_of(token_ids: npt.NDArray[np.uint32]) -> int:
    # What waits is counted with its record and a pool's: neither is bounded otherwise.
    return token_ids.nbytes + TEXT_RECORD_BYTES + POOL_RECORD_BYTES
