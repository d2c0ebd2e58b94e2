"""The stored histories: found by id, ordered by last use, within bounds.

Owns the order of last use, the count of all histories' bytes, and eviction of the least recently
used. Does not know deltas, streams, nor how long a history may be stored (`store.py`).
"""

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from drafter.history.history import History


class EvictionReason(Enum):
    """Why a sequence was forgotten that no client released."""

    SEQUENCES = "sequences"
    BYTES = "bytes"
    IDLE = "idle"
    STREAM_ENDED = "stream_ended"


class StoredHistories:
    """Owned by the event loop, through the store.

    Alone changes a history's `last_used_s` and `is_stored`. Invariants (see `check_integrity`):
    `by_id` holds the histories in the order of their last use; `num_bytes` is the sum of their
    bytes and never above `max_bytes`, which any single history fits into. `on_removal` is called
    with every history that is removed, and `on_eviction` after that if it was evicted.

    Attributes:
        num_bytes: memory of all histories.
        by_id: the histories by their sequences' ids, the least recently used first.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_bytes: int,
        on_removal: Callable[[History], None],
        on_eviction: Callable[[EvictionReason], None],
    ) -> None:
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._on_removal = on_removal
        self._on_eviction = on_eviction
        self.num_bytes = 0
        self.by_id: OrderedDict[str, History] = OrderedDict()

    def oldest(self) -> History:
        """Returns the least recently used; there must be one."""
        return next(iter(self.by_id.values()))

    def add(self, history: History, now_s: float) -> None:
        """Stores a history, whose id is not there, as the most recently used, evicting others."""
        while len(self.by_id) >= self._max_sequences:
            self.evict(self.oldest(), EvictionReason.SEQUENCES)
        history.last_used_s = now_s
        self.by_id[history.sequence_id] = history
        history.is_stored = True
        self._make_room(history, history.allocated_bytes)
        self.num_bytes += history.allocated_bytes

    def touch(self, history: History, now_s: float) -> None:
        """Makes a history the most recently used one."""
        history.last_used_s = now_s
        self.by_id.move_to_end(history.sequence_id)

    def append(self, history: History, token_ids: npt.NDArray[np.uint32]) -> None:
        """Appends to the most recently used history, evicting others to make room."""
        num_bytes = history.allocated_bytes
        self._make_room(history, history.bytes_after(len(token_ids)) - num_bytes)
        history.append(token_ids)
        self.num_bytes += history.allocated_bytes - num_bytes

    def grow_table(self, history: History, index: int) -> None:
        """Grows a table of a history's index, evicting others to make room; see the store."""
        num_bytes = history.allocated_bytes
        if history.is_stored:
            self._make_room(history, history.table_growth_bytes(index))
        history.grow_table(index)
        if history.is_stored:
            self.num_bytes += history.allocated_bytes - num_bytes

    def evict(self, history: History, reason: EvictionReason) -> None:
        """Removes a history that no client released."""
        self.remove(history)
        self._on_eviction(reason)

    def remove(self, history: History) -> None:
        """Removes a history."""
        del self.by_id[history.sequence_id]
        self.num_bytes -= history.allocated_bytes
        history.is_stored = False
        self._on_removal(history)

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        histories = self.by_id.values()
        assert self.num_bytes == sum(history.allocated_bytes for history in histories)
        assert self.num_bytes <= self._max_bytes
        assert len(histories) <= self._max_sequences
        uses = [history.last_used_s for history in histories]
        assert uses == sorted(uses), "histories are ordered by last use"
        for sequence_id, history in self.by_id.items():
            assert history.is_stored
            history.check_integrity()
            assert history.sequence_id == sequence_id

    def _make_room(self, history: History, num_new_bytes: int) -> None:
        """Evicts others before a history grows."""
        while self.num_bytes + num_new_bytes > self._max_bytes:
            # The history itself fits alone, but is evicted if all others were used later.
            self.evict(self.oldest(), EvictionReason.BYTES)
            if not history.is_stored:
                break
