"""The stored histories: found by id and by slot, ordered by last use, within bounds.

Owns the table in which kernels find sequences, the count of all histories' bytes, and eviction of
the least recently used. Does not know deltas, streams, nor how long a history may be stored
(`store.py`).
"""

from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from drafter.history.history import History
from drafter.history.id_table import (
    COUNT,
    HEADER,
    NEWEST,
    OLDEST,
    add,
    make_table,
    remove,
    slot_of,
    slots_by_last_use,
    touch,
)


class EvictionReason(Enum):
    """Why a sequence was forgotten that no client released."""

    SEQUENCES = "sequences"
    BYTES = "bytes"
    IDLE = "idle"
    STREAM_ENDED = "stream_ended"


class StoredHistories:
    """Owned by the event loop, through the store.

    Alone changes a history's `slot` and `is_stored`. Invariants (see `check_integrity`): the table
    holds the histories in the order of their last use; `num_bytes` is the sum of their bytes and
    never above `max_bytes`, which any single history fits into. `on_removal` is called with
    every history that is removed, and `on_eviction` after that if it was evicted.

    Attributes:
        num_bytes: memory of all histories.
        table: the sequences as kernels see them; kernels append tokens that fit the buffers.
        by_slot: the histories by their slots in the table; None: the slot is free.
        by_id: the histories by their sequences' ids.
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
        self.table = make_table(max_sequences)
        self.by_slot: list[History | None] = []
        self.by_id: dict[str, History] = {}

    def oldest(self) -> History:
        """Returns the least recently used; there must be one."""
        history = self.by_slot[int(self.table.ends[OLDEST])]
        assert history is not None, "there is one"
        return history

    def last_used_s(self, history: History) -> float:
        """Returns the time of a history's last `add` or `touch`."""
        return float(self.table.last_used_s[history.slot])

    def add(self, history: History, now_s: float) -> None:
        """Stores a history, whose id is not there, as the most recently used, evicting others."""
        while len(self.by_id) >= self._max_sequences:
            self.evict(self.oldest(), EvictionReason.SEQUENCES)
        id_bytes = np.frombuffer(history.sequence_id.encode(), dtype=np.uint8)
        slot = history.slot = add(self.table, id_bytes, history.address, now_s)
        if slot == len(self.by_slot):
            self.by_slot.append(history)
        else:
            self.by_slot[slot] = history
        self.by_id[history.sequence_id] = history
        history.is_stored = True
        self._make_room(history, history.allocated_bytes)
        self.num_bytes += history.allocated_bytes

    def touch(self, history: History, now_s: float) -> None:
        """Makes a history the most recently used one."""
        touch(self.table, history.slot, now_s)

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
            self.table.records[history.slot, HEADER] = history.address
            self.num_bytes += history.allocated_bytes - num_bytes

    def evict(self, history: History, reason: EvictionReason) -> None:
        """Removes a history that no client released."""
        self.remove(history)
        self._on_eviction(reason)

    def remove(self, history: History) -> None:
        """Removes a history."""
        del self.by_id[history.sequence_id]
        remove(self.table, history.slot)
        self.by_slot[history.slot] = None
        self.num_bytes -= history.allocated_bytes
        history.is_stored = False
        self._on_removal(history)

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        histories = self.by_id.values()
        assert self.num_bytes == sum(history.allocated_bytes for history in histories)
        assert self.num_bytes <= self._max_bytes
        assert len(histories) <= self._max_sequences
        slots = slots_by_last_use(self.table)
        assert sorted(slots) == sorted(history.slot for history in histories)
        assert len(slots) == self.table.ends[COUNT]
        assert not slots or slots[-1] == self.table.ends[NEWEST]
        uses = self.table.last_used_s[slots].tolist()
        assert uses == sorted(uses), "histories are ordered by last use"
        for sequence_id, history in self.by_id.items():
            assert history.is_stored
            history.check_integrity()
            assert history.sequence_id == sequence_id
            assert slot_of(self.table, sequence_id) == history.slot
            assert self.by_slot[history.slot] is history
            assert self.table.records[history.slot, HEADER] == history.address

    def _make_room(self, history: History, num_new_bytes: int) -> None:
        """Evicts others before a history grows."""
        while self.num_bytes + num_new_bytes > self._max_bytes:
            # The history itself fits alone, but is evicted if all others were used later.
            self.evict(self.oldest(), EvictionReason.BYTES)
            if not history.is_stored:
                break
