"""All sequences' histories: what a delta may say of which sequence, and for how long it is known.

Owns creation, appending by position, release, and which stream created what: a sequence is
forgotten when it is idle for too long or its stream is gone. Does not know how histories are found
and room is made for them (`kept_histories.py`), how drafts are found, nor anything of RPCs.

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

import numpy as np

from drafter.history.delta import SequenceDelta
from drafter.history.history import History
from drafter.history.lru import EvictionReason, StoredHistories
from drafter.ngram.params import NgramParams
from drafter.ngram.text import TOKEN_BYTES, tokens_that_fit
from drafter.refusals import InvalidDeltaError, OutOfSyncError


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
        return tokens_that_fit(params, self.max_sequence_bytes)


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


class HistoryStore:
    """Owned by the event loop: every method runs to its end without an await, so streams may
    interleave between any two calls.

    Invariant (see `check_integrity`): a sequence that was created on a stream is in the set of that
    stream's lease for as long as it is known, and in no other.

    Attributes:
        limits: the bounds.
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
        self._clock = clock
        self._kept = StoredHistories(
            max_sequences=limits.max_sequences,
            max_bytes=limits.max_history_bytes,
            on_removal=self._untie,
            on_eviction=on_eviction,
        )
        self.table = self._kept.table
        self.by_slot = self._kept.by_slot
        # Of the sequences that came on a stream, by their ids.
        self._leases: dict[str, StreamLease] = {}
        self._ended_leases: deque[StreamLease] = deque()

    def has_expired_stream(self, now_s: float) -> bool:
        """Whether `forget_expired` may have something to do for a stream that has ended."""
        return bool(self._ended_leases) and (self._ended_leases[0].free_at_s or 0.0) <= now_s

    @property
    def num_sequences(self) -> int:
        return len(self._kept.by_id)

    @property
    def history_bytes(self) -> int:
        """What all histories occupy."""
        return self._kept.num_bytes

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
        history = self._kept.by_id.get(delta.sequence_id)
        if history is None or self._forget_if_expired(history, now_s):
            raise OutOfSyncError(0)
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

        self._kept.touch(history, now_s)
        if len(token_ids) > 0:
            self._kept.append(history, token_ids)
        return history

    def grow_table(self, history: History, index: int) -> None:
        """Makes room in a table of a history's index, evicting others if need be.

        The history may have been forgotten since it was asked about; then only its last answer is
        still to be made.
        """
        self._kept.grow_table(history, index)

    def release(self, sequence_id: str) -> History | None:
        """Forgets a sequence, and returns what was known of it; None: it is unknown."""
        history = self._kept.by_id.get(sequence_id)
        if history is not None:
            self._kept.remove(history)
        return history

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
                history = self._kept.by_id[next(iter(lease.sequence_ids))]
                self._kept.evict(history, EvictionReason.STREAM_ENDED)
                num_forgotten += 1
            else:
                self._ended_leases.popleft()
        while self._kept.by_id and num_forgotten < most:
            oldest = self._kept.oldest()
            if not self._is_idle(oldest, now_s):
                break
            self._kept.evict(oldest, EvictionReason.IDLE)
            num_forgotten += 1
        return num_forgotten

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        self._kept.check_integrity()
        for history in self._kept.by_id.values():
            assert history.allocated_bytes <= self.limits.max_sequence_bytes
        for sequence_id, lease in self._leases.items():
            assert sequence_id in self._kept.by_id
            assert sequence_id in lease.sequence_ids
        for lease in {*self._leases.values(), *self._ended_leases}:
            for sequence_id in lease.sequence_ids:
                assert self._leases[sequence_id] is lease

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
        history = History(
            sequence_id=delta.sequence_id,
            params=delta.params,
            prompt_length=delta.prompt_length,
            max_tokens=max_tokens,
        )
        self._kept.add(history, self._clock())
        if lease is not None:
            self._leases[delta.sequence_id] = lease
            lease.sequence_ids.add(delta.sequence_id)
        if len(delta.token_ids) > 0:
            self._kept.append(history, delta.token_ids)
        return history

    def _untie(self, sequence_id: str) -> None:
        """Says that a sequence is not known any more."""
        lease = self._leases.pop(sequence_id, None)
        if lease is not None:
            lease.sequence_ids.discard(sequence_id)

    def _is_idle(self, history: History, now_s: float) -> bool:
        return now_s - self._kept.last_used_s(history) >= self.limits.idle_ttl_s

    def _forget_if_expired(self, history: History, now_s: float) -> bool:
        lease = self._leases.get(history.sequence_id)
        if lease is not None and lease.free_at_s is not None and lease.free_at_s <= now_s:
            self._kept.evict(history, EvictionReason.STREAM_ENDED)
            return True
        if self._is_idle(history, now_s):
            self._kept.evict(history, EvictionReason.IDLE)
            return True
        return False


def _check_length(num_tokens: int, max_tokens: int) -> None:
    if num_tokens > max_tokens:
        raise InvalidDeltaError(
            "token_ids",
            f"with them the sequence has {num_tokens} tokens, over the {max_tokens} kept of "
            "such a one",
        )
