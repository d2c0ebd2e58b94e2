"""The histories of all sequences: which deltas are accepted, and how long a sequence is known.

Owns creation, appending by position, release, and which stream created which sequence: a sequence
is forgotten when it is idle for too long or its stream is gone. Does not know how histories are
found and evicted (`lru.py`), how drafts are found, nor RPCs.

Positions (`base_length`) make deltas idempotent. With K known tokens and a delta [base, end):

    base = 0          creates the sequence, or creates it anew
    base = K          continues it
    0 < base < K      tokens [base, min(end, K)) must equal the known ones; the rest, if any, is
                      appended. If they differ: out of sync, start over (known_length 0)
    base > K          a gap: out of sync, send from K (from 0 if the sequence is unknown)
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from drafter.history.history import History, SequenceDelta
from drafter.history.lru import EvictionReason, StoredHistories
from drafter.ngram.text import TOKEN_BYTES, tokens_that_fit
from drafter.refusals import InvalidDeltaError, OutOfSyncError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """How much is stored, and for how long.

    Raises:
        ValueError: nothing would fit into a bound.
    """

    max_sequences: int
    max_sequence_bytes: int
    """Of one sequence, its index included; this limits its tokens."""
    max_history_bytes: int
    """Of all sequences together."""
    idle_ttl_s: float
    """How long a sequence is stored to which nothing is appended."""
    stream_grace_s: float = 30.0
    """How long a sequence is stored after the end of the stream that created it."""

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


@dataclass(slots=True, eq=False)
class StreamLease:
    """The store's record of a stream: which sequences it created."""

    sequence_ids: set[str] = field(default_factory=set)
    """Created on this stream, still known, and not created again elsewhere."""
    expires_at_s: float | None = None
    """When they are forgotten; None while the stream is open."""


class HistoryWatcher(Protocol):
    """Is told which histories are stored."""

    def created(self, history: History, trace_parent: str) -> None:
        """It is stored from now on; it is part of that span, "" of none."""

    def removed(self, history: History) -> None:
        """It is stored no longer."""


class HistoryStore:
    """Owned by the event loop: no method awaits, so streams interleave between calls only.

    Invariant (see `check_integrity`): a known sequence that was created on a stream is in the set
    of that stream's lease, and in no other. `clock` returns seconds, monotonic; `on_eviction` is
    called for every sequence forgotten that no client released.

    Attributes:
        limits: the bounds.
        by_id: the histories by their sequences' ids, the least recently used first.
    """

    def __init__(
        self,
        limits: StoreLimits,
        *,
        clock: Callable[[], float],
        on_eviction: Callable[[EvictionReason], None],
        watcher: HistoryWatcher | None = None,
    ) -> None:
        self.limits = limits
        self._watcher = watcher
        self._clock = clock
        self._stored = StoredHistories(
            max_sequences=limits.max_sequences,
            max_bytes=limits.max_history_bytes,
            on_removal=self._removed,
            on_eviction=on_eviction,
        )
        self.by_id: Mapping[str, History] = self._stored.by_id
        # Of the sequences that came on a stream, by their ids.
        self._leases: dict[str, StreamLease] = {}
        self._ended_leases: deque[StreamLease] = deque()

    @property
    def num_sequences(self) -> int:
        return len(self._stored.by_id)

    @property
    def history_bytes(self) -> int:
        """Memory of all histories."""
        return self._stored.num_bytes

    def start_stream(self) -> StreamLease:
        """Returns the lease to pass to `append` with the deltas of a stream."""
        return StreamLease()

    def end_stream(self, lease: StreamLease) -> None:
        """Schedules the stream's sequences to be forgotten; may be called twice."""
        if lease.expires_at_s is None:
            lease.expires_at_s = self._clock() + self.limits.stream_grace_s
            self._ended_leases.append(lease)

    def append(self, delta: SequenceDelta, lease: StreamLease | None = None) -> History:
        """Applies a delta, and returns the sequence's history.

        Args:
            delta: its position must fit the known tokens, see above.
            lease: of the stream that a sequence which it creates belongs to; None: of none.

        Raises:
            OutOfSyncError: the delta leaves a gap or contradicts the known tokens.
            InvalidDeltaError: the sequence would be longer than one may be.
        """
        if delta.base_length == 0:
            return self._create(delta, lease)
        now_s = self._clock()
        history = self._stored.by_id.get(delta.sequence_id)
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

        self._stored.touch(history, now_s)
        if len(token_ids) > 0:
            self._stored.append(history, token_ids)
        return history

    def grow_table(self, history: History, index: int) -> None:
        """Grows a table of a history's index, evicting others to make room.

        A history that was forgotten, maybe just now, grows uncounted: its last answer needs it.
        """
        self._stored.grow_table(history, index)

    def release(self, sequence_id: str) -> History | None:
        """Forgets a sequence, and returns its history; None: it is unknown."""
        history = self._stored.by_id.get(sequence_id)
        if history is not None:
            self._stored.remove(history)
        return history

    def forget_expired(self, max_sequences: int) -> int:
        """Forgets up to so many expired sequences; returns how many.

        Fewer than `max_sequences`: none are left. Otherwise the others stay counted until a later
        call, but are not used any more.
        """
        now_s = self._clock()
        num_forgotten = 0
        while self._ended_leases and num_forgotten < max_sequences:
            lease = self._ended_leases[0]
            assert lease.expires_at_s is not None
            if lease.expires_at_s > now_s:
                break
            if lease.sequence_ids:
                # `pop` goes on where the last one ended; a walk passes the places of all removed.
                history = self._stored.by_id[lease.sequence_ids.pop()]
                self._stored.evict(history, EvictionReason.STREAM_ENDED)
                num_forgotten += 1
            else:
                self._ended_leases.popleft()
        while self._stored.by_id and num_forgotten < max_sequences:
            oldest = self._stored.oldest()
            if not self._is_idle(oldest, now_s):
                break
            self._stored.evict(oldest, EvictionReason.IDLE)
            num_forgotten += 1
        return num_forgotten

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        self._stored.check_integrity()
        for history in self._stored.by_id.values():
            assert history.allocated_bytes <= self.limits.max_sequence_bytes
        for sequence_id, lease in self._leases.items():
            assert sequence_id in self._stored.by_id
            assert sequence_id in lease.sequence_ids
        for lease in {*self._leases.values(), *self._ended_leases}:
            for sequence_id in lease.sequence_ids:
                assert self._leases[sequence_id] is lease

    def _create(self, delta: SequenceDelta, lease: StreamLease | None) -> History:
        max_tokens = tokens_that_fit(delta.params, self.limits.max_sequence_bytes)
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
                f"{delta.prompt_length} is over the {max_tokens} tokens stored of such a sequence",
            )
        self.release(delta.sequence_id)
        history = History(
            sequence_id=delta.sequence_id,
            params=delta.params,
            prompt_length=delta.prompt_length,
            max_tokens=max_tokens,
        )
        self._stored.add(history, self._clock())
        if self._watcher is not None and history.is_stored:
            self._watcher.created(history, delta.trace_parent)
        if lease is not None:
            self._leases[delta.sequence_id] = lease
            lease.sequence_ids.add(delta.sequence_id)
        if len(delta.token_ids) > 0:
            self._stored.append(history, delta.token_ids)
        return history

    def _removed(self, history: History) -> None:
        """Removes a forgotten sequence from its stream's lease."""
        lease = self._leases.pop(history.sequence_id, None)
        if lease is not None:
            lease.sequence_ids.discard(history.sequence_id)
        if self._watcher is not None:
            self._watcher.removed(history)

    def _is_idle(self, history: History, now_s: float) -> bool:
        return now_s - history.last_used_s >= self.limits.idle_ttl_s

    def _forget_if_expired(self, history: History, now_s: float) -> bool:
        lease = self._leases.get(history.sequence_id)
        if lease is not None and lease.expires_at_s is not None and lease.expires_at_s <= now_s:
            self._stored.evict(history, EvictionReason.STREAM_ENDED)
            return True
        if self._is_idle(history, now_s):
            self._stored.evict(history, EvictionReason.IDLE)
            return True
        return False


def _check_length(num_tokens: int, max_tokens: int) -> None:
    if num_tokens > max_tokens:
        raise InvalidDeltaError(
            "token_ids",
            f"with them the sequence has {num_tokens} tokens, over the {max_tokens} "
            "stored of such a one",
        )
