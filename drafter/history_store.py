"""All sequences' histories: what is known of which sequence, for how long, within which bounds.

Owns creation, appending by position, release and every reason to forget: too many sequences, too
many bytes, idle too long, the stream that created them is gone. Does not know how drafts are found,
nor anything of RPCs.

Positions (`base_length`) make deltas idempotent. With K known tokens and a delta [base, end):

    base = 0          creates the sequence, or creates it anew
    base = K          continues it
    0 < base < K      tokens [base, min(end, K)) must agree with the known ones; the rest, if any,
                      is appended. They differ: out of sync, start over (known_length 0)
    base > K          a gap: out of sync, send from K (0 if the sequence is unknown)
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from drafter.history import History
from drafter.indexed_text import TOKEN_BYTES, most_tokens
from drafter.messages import SequenceDelta
from drafter.ngram_params import NgramParams
from drafter.refusals import InvalidDeltaError, OutOfSyncError
from drafter.sequence_table import (
    COUNT,
    HEADER,
    NEWEST,
    OLDEST,
    add,
    make_table,
    remove,
    slot_of,
    slots_in_order,
    touch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """How much is kept, and for how long.

    Raises:
        ValueError: a bound that nothing would fit into.
    """

    max_sequences: int
    max_sequence_bytes: int
    """Of one sequence, its index included; bounds how many tokens it may have."""
    max_history_bytes: int
    """Of all sequences together."""
    idle_ttl_s: float
    """How long a sequence is kept that nobody appends to."""
    stream_grace_s: float = 30.0
    """How long a sequence is kept after the stream that created it has ended."""

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences: {self.max_sequences} is under 1")
        if self.max_sequence_bytes < TOKEN_BYTES:
            raise ValueError(f"max_sequence_bytes: {self.max_sequence_bytes} is under one token")
        if self.max_history_bytes < self.max_sequence_bytes:
            raise ValueError(
                f"max_history_bytes: {self.max_history_bytes} is under max_sequence_bytes, "
                f"{self.max_sequence_bytes}"
            )

    def max_sequence_tokens(self, params: NgramParams) -> int:
        """How many tokens a sequence may have: so many that its index fits whatever they are."""
        return most_tokens(params, self.max_sequence_bytes)


class EvictionReason(Enum):
    """Why a sequence was forgotten that nobody released."""

    SEQUENCES = "sequences"
    BYTES = "bytes"
    IDLE = "idle"
    STREAM_ENDED = "stream_ended"


class StreamLease:
    """Which sequences a stream created; the store's record of that stream.

    Attributes:
        sequence_ids: created on this stream, still known, and not created again elsewhere.
        free_at_s: when they are forgotten; None while the stream lives.
    """

    __slots__ = ("free_at_s", "sequence_ids")

    def __init__(self) -> None:
        self.sequence_ids: set[str] = set()
        self.free_at_s: float | None = None


class _Entry:
    __slots__ = ("history", "lease")

    def __init__(self, history: History, lease: StreamLease | None) -> None:
        self.history = history
        self.lease = lease


class HistoryStore:
    """Owned by the event loop: every method runs to its end without an await, so streams may
    interleave between any two calls.

    Invariants (see `check_integrity`): the table holds the entries, in the order of their last use;
    `history_bytes` is the sum of what the entries' texts occupy and never above its bound; an entry
    is in the set of the lease that it names, and in no other.

    Attributes:
        limits: the bounds.
        history_bytes: what all histories occupy.
        table: the sequences as kernels see them, which may append what fits where it is.
        by_slot: the histories by their slots in the table; None: the slot is free.
    """

    def __init__(
        self,
        limits: StoreLimits,
        *,
        clock: Callable[[], float],
        on_eviction: Callable[[EvictionReason], None],
    ) -> None:
        """Makes an empty store.

        Args:
            limits: the bounds.
            clock: seconds, monotonic.
            on_eviction: called for every sequence forgotten that nobody released.
        """
        self.limits = limits
        self.history_bytes = 0
        self._clock = clock
        self._on_eviction = on_eviction
        self._entries: dict[str, _Entry] = {}
        self.table = make_table(limits.max_sequences)
        self.by_slot: list[History | None] = []
        self._ended_leases: deque[StreamLease] = deque()

    def has_expired_stream(self, now_s: float) -> bool:
        """Whether `forget_expired` may have something to do for a stream that has ended."""
        if not self._ended_leases:
            return False
        free_at_s = self._ended_leases[0].free_at_s
        return free_at_s is not None and free_at_s <= now_s

    @property
    def num_sequences(self) -> int:
        return len(self._entries)

    def now_s(self) -> float:
        """The time by the store's clock."""
        return self._clock()

    def start_stream(self) -> StreamLease:
        """Returns what `append` is given for the deltas of a stream."""
        return StreamLease()

    def end_stream(self, lease: StreamLease) -> None:
        """Lets the stream's sequences go after the grace. Ending a stream twice is fine."""
        if lease.free_at_s is None:
            lease.free_at_s = self._clock() + self.limits.stream_grace_s
            self._ended_leases.append(lease)

    def append(self, delta: SequenceDelta, lease: StreamLease | None = None) -> History:
        """Takes a delta, and returns the sequence's history with it.

        Args:
            delta: whose position must fit what is known, see the module's docstring.
            lease: of the stream that it came on; None: it came by a unary call, and a sequence
                that it creates is not tied to any stream.

        Raises:
            OutOfSyncError: the delta leaves a gap or contradicts the known tokens.
            InvalidDeltaError: the sequence would be longer than one may be.
        """
        if delta.base_length == 0:
            return self._create(delta, lease)
        now_s = self._clock()
        entry = self._entries.get(delta.sequence_id)
        if entry is None or self._forget_if_expired(entry, now_s):
            raise OutOfSyncError(0)
        history = entry.history
        num_overlapping = history.length - delta.base_length
        if num_overlapping < 0:
            raise OutOfSyncError(history.length)
        token_ids = delta.token_ids
        if num_overlapping > 0:
            known = history.buffer[delta.base_length : history.length]
            overlap = token_ids[:num_overlapping]
            if not np.array_equal(known[: len(overlap)], overlap):
                raise OutOfSyncError(0)
            token_ids = token_ids[num_overlapping:]
        _check_length(history.length + len(token_ids), history.max_tokens)

        touch(self.table, history.slot, now_s)
        if len(token_ids) > 0:
            self._grow(history, token_ids)
        return history

    def extend(self, history: History, token_ids: npt.NDArray[np.uint32], now_s: float) -> bool:
        """Appends to a sequence that has not expired, if nobody has to go for that.

        Returns:
            Whether it was done; if not, `append` says why, or makes room.
        """
        num_new_bytes = history.bytes_after(len(token_ids)) - history.allocated_bytes
        if (
            history.length + len(token_ids) > history.max_tokens
            or self.history_bytes + num_new_bytes > self.limits.max_history_bytes
        ):
            return False
        touch(self.table, history.slot, now_s)
        self._grow(history, token_ids)
        return True

    def grow_table(self, history: History, index: int) -> None:
        """Makes room in a table of a history's index, evicting others if need be.

        The history may have been forgotten since it was asked about; then only its last answer is
        still to be made.
        """
        num_bytes = history.allocated_bytes
        if history.is_kept:
            self._make_room(history, history.table_growth_bytes(index))
        history.grow_table(index)
        if history.is_kept:
            self.table.records[history.slot, HEADER] = history.address
            self.history_bytes += history.allocated_bytes - num_bytes

    def release(self, sequence_id: str) -> History | None:
        """Forgets a sequence, and returns what was known of it; None: it is unknown."""
        entry = self._entries.get(sequence_id)
        if entry is None:
            return None
        self._remove(entry)
        return entry.history

    def forget_expired(self, most: int) -> int:
        """Forgets up to `most` sequences that are idle too long or whose stream is gone.

        Others that expired stay counted until a later call, but are not used any more.

        Returns:
            How many were forgotten; fewer than `most`: no expired ones are left.
        """
        now_s = self._clock()
        num_forgotten = 0
        while self._ended_leases and num_forgotten < most:
            lease = self._ended_leases[0]
            assert lease.free_at_s is not None
            if lease.free_at_s > now_s:
                break
            if lease.sequence_ids:
                self._evict(
                    self._entries[next(iter(lease.sequence_ids))], EvictionReason.STREAM_ENDED
                )
                num_forgotten += 1
            else:
                self._ended_leases.popleft()
        while self._entries and num_forgotten < most:
            oldest = self._oldest()
            if not self._is_idle(oldest, now_s):
                break
            self._evict(oldest, EvictionReason.IDLE)
            num_forgotten += 1
        return num_forgotten

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        entries = list(self._entries.items())
        assert self.history_bytes == sum(e.history.allocated_bytes for _, e in entries)
        assert self.history_bytes <= self.limits.max_history_bytes
        assert len(entries) <= self.limits.max_sequences
        slots = slots_in_order(self.table)
        assert sorted(slots) == sorted(entry.history.slot for _, entry in entries)
        assert len(slots) == self.table.ends[COUNT]
        assert not slots or slots[-1] == self.table.ends[NEWEST]
        uses = self.table.last_used_s[slots].tolist()
        assert uses == sorted(uses), "entries are ordered by last use"
        for sequence_id, entry in entries:
            assert entry.history.allocated_bytes <= self.limits.max_sequence_bytes
            assert entry.history.is_kept
            entry.history.check_integrity()
            slot = entry.history.slot
            assert entry.history.sequence_id == sequence_id
            assert slot_of(self.table, sequence_id) == slot
            assert self.by_slot[slot] is entry.history
            assert self.table.records[slot, HEADER] == entry.history.address
            assert entry.lease is None or sequence_id in entry.lease.sequence_ids
        for lease in self._ended_leases:
            for sequence_id in lease.sequence_ids:
                assert self._entries[sequence_id].lease is lease

    def _create(self, delta: SequenceDelta, lease: StreamLease | None) -> History:
        max_tokens = self.limits.max_sequence_tokens(delta.params)
        if max_tokens < 0:
            raise InvalidDeltaError(
                "params",
                f"with them not even an empty sequence fits into {self.limits.max_sequence_bytes} "
                "bytes",
            )
        _check_length(len(delta.token_ids), max_tokens)
        if delta.prompt_length > max_tokens:
            raise InvalidDeltaError(
                "prompt_length",
                f"{delta.prompt_length} is over the {max_tokens} tokens kept of such a sequence",
            )
        self.release(delta.sequence_id)
        while len(self._entries) >= self.limits.max_sequences:
            self._evict(self._oldest(), EvictionReason.SEQUENCES)
        history = History(
            sequence_id=delta.sequence_id,
            params=delta.params,
            prompt_length=delta.prompt_length,
            max_tokens=max_tokens,
        )
        id_bytes = np.frombuffer(delta.sequence_id.encode(), dtype=np.uint8)
        slot = history.slot = add(self.table, id_bytes, history.address, self._clock())
        if slot == len(self.by_slot):
            self.by_slot.append(history)
        else:
            self.by_slot[slot] = history
        self._entries[delta.sequence_id] = _Entry(history, lease)
        history.is_kept = True
        self._make_room(history, history.allocated_bytes)
        self.history_bytes += history.allocated_bytes
        if lease is not None:
            lease.sequence_ids.add(delta.sequence_id)
        if len(delta.token_ids) > 0:
            self._grow(history, delta.token_ids)
        return history

    def _grow(self, history: History, token_ids: npt.NDArray[np.uint32]) -> None:
        """Appends to the most recently used sequence, evicting others to make room."""
        num_bytes = history.allocated_bytes
        self._make_room(history, history.bytes_after(len(token_ids)) - num_bytes)
        history.append(token_ids)
        self.history_bytes += history.allocated_bytes - num_bytes

    def _make_room(self, history: History, num_new_bytes: int) -> None:
        """Evicts others before a history grows."""
        while self.history_bytes + num_new_bytes > self.limits.max_history_bytes:
            # Not the history itself, which fits if it is alone (`StoreLimits`); unless it was not
            # used for so long that all others came after it, and they are more than it.
            self._evict(self._oldest(), EvictionReason.BYTES)
            if not history.is_kept:
                break

    def _oldest(self) -> _Entry:
        history = self.by_slot[int(self.table.ends[OLDEST])]
        assert history is not None, "there is one"
        return self._entries[history.sequence_id]

    def _is_idle(self, entry: _Entry, now_s: float) -> bool:
        return now_s - float(self.table.last_used_s[entry.history.slot]) >= self.limits.idle_ttl_s

    def _forget_if_expired(self, entry: _Entry, now_s: float) -> bool:
        lease = entry.lease
        if lease is not None and lease.free_at_s is not None and lease.free_at_s <= now_s:
            self._evict(entry, EvictionReason.STREAM_ENDED)
            return True
        if self._is_idle(entry, now_s):
            self._evict(entry, EvictionReason.IDLE)
            return True
        return False

    def _evict(self, entry: _Entry, reason: EvictionReason) -> None:
        self._remove(entry)
        self._on_eviction(reason)

    def _remove(self, entry: _Entry) -> None:
        history = entry.history
        del self._entries[history.sequence_id]
        remove(self.table, history.slot)
        self.by_slot[history.slot] = None
        self.history_bytes -= history.allocated_bytes
        history.is_kept = False
        if entry.lease is not None:
            entry.lease.sequence_ids.discard(history.sequence_id)


def _check_length(num_tokens: int, max_tokens: int) -> None:
    if num_tokens > max_tokens:
        raise InvalidDeltaError(
            "token_ids",
            f"with them the sequence has {num_tokens} tokens, over the {max_tokens} kept of "
            "such a one",
        )
