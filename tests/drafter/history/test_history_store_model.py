"""The history store against a naive model, under any sequence of events."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafter.history.history import SequenceDelta
from drafter.history.store import HistoryStore, StoreLimits, StreamLease
from drafter.ngram.text import MIN_CAPACITY_TOKENS, TOKEN_BYTES
from drafter.refusals import InvalidDeltaError, OutOfSyncError
from tests.drafter.running_drafter import FakeClock
from tests.drafter.texts import EMPTY_BYTES, KMP
from tests.volume import examples

MAX_TOKENS = 1500
LIMITS = StoreLimits(
    max_sequences=4,
    max_sequence_bytes=MAX_TOKENS * TOKEN_BYTES + EMPTY_BYTES,
    max_history_bytes=8000 + 3 * EMPTY_BYTES,
    idle_ttl_s=60.0,
)
ALL = 1_000_000


@dataclass
class ModelStream:
    ended_s: float | None = None


@dataclass
class ModelSequence:
    tokens: list[int]
    last_used_s: float
    stream: ModelStream | None
    capacity_tokens: int = 0

    def grow(self) -> None:
        """Doubles from 256 up to the limit, as much as the tokens need."""
        if self.tokens and self.capacity_tokens < len(self.tokens):
            capacity = MIN_CAPACITY_TOKENS
            while capacity < len(self.tokens):
                capacity *= 2
            self.capacity_tokens = min(capacity, MAX_TOKENS)


@dataclass
class Model:
    """The same rules in a dictionary that is searched from end to end."""

    sequences: dict[str, ModelSequence] = field(default_factory=dict)

    def occupied_bytes(self) -> int:
        return sum(EMPTY_BYTES + s.capacity_tokens * TOKEN_BYTES for s in self.sequences.values())

    def forget_expired(self, now_s: float) -> None:
        for sequence_id, sequence in list(self.sequences.items()):
            stream = sequence.stream
            is_idle = now_s - sequence.last_used_s >= LIMITS.idle_ttl_s
            is_orphan = (
                stream is not None
                and stream.ended_s is not None
                and now_s >= stream.ended_s + LIMITS.stream_grace_s
            )
            if is_idle or is_orphan:
                del self.sequences[sequence_id]

    def append(
        self,
        sequence_id: str,
        base_length: int,
        token_ids: list[int],
        stream: ModelStream | None,
        now_s: float,
    ) -> list[int] | str | int:
        """Returns the known tokens, "invalid", or the known length when out of sync."""
        if base_length == 0:
            if len(token_ids) > MAX_TOKENS:
                return "invalid"
            self.sequences.pop(sequence_id, None)
            sequence = ModelSequence(tokens=[], last_used_s=now_s, stream=stream)
        else:
            known = self.sequences.get(sequence_id)
            if known is None:
                return 0
            if base_length > len(known.tokens):
                return len(known.tokens)
            for i, token in enumerate(token_ids):
                position = base_length + i
                if position < len(known.tokens) and known.tokens[position] != token:
                    return 0
            if max(len(known.tokens), base_length + len(token_ids)) > MAX_TOKENS:
                return "invalid"
            sequence = self.sequences.pop(sequence_id)
        self.sequences[sequence_id] = sequence  # the last is the most recently used
        sequence.last_used_s = now_s
        sequence.tokens[base_length : base_length + len(token_ids)] = token_ids
        sequence.grow()
        while len(self.sequences) > LIMITS.max_sequences:
            del self.sequences[next(iter(self.sequences))]
        while self.occupied_bytes() > LIMITS.max_history_bytes:
            del self.sequences[next(iter(self.sequences))]
        return list(sequence.tokens)


class HistoryStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = HistoryStore(LIMITS, clock=self.clock, on_eviction=lambda reason: None)
        self.model = Model()
        self.streams: list[tuple[StreamLease, ModelStream]] = []

    sequence_ids = st.sampled_from("abcdef")
    # A run of few distinct tokens, so that overlaps agree often, and differ often.
    runs = st.tuples(
        st.integers(0, 1), st.one_of(st.integers(0, 5), st.sampled_from([250, 257, 600, 1400]))
    ).map(lambda run: [run[0]] * run[1])
    stream_indices = st.one_of(st.none(), st.integers(0, 3))

    def append(
        self, sequence_id: str, base_length: int, token_ids: list[int], stream_index: int | None
    ) -> None:
        lease, stream = None, None
        live = [pair for pair in self.streams if pair[1].ended_s is None]
        if stream_index is not None and live:
            lease, stream = live[stream_index % len(live)]
        self.model.forget_expired(self.clock.now_s)
        expected = self.model.append(sequence_id, base_length, token_ids, stream, self.clock.now_s)
        delta = SequenceDelta(
            sequence_id=sequence_id,
            base_length=base_length,
            token_ids=np.array(token_ids, dtype=np.uint32),
            params=KMP,
        )
        found: list[int] | str | int
        try:
            found = self.store.append(delta, lease).token_ids.tolist()
        except OutOfSyncError as refusal:
            found = refusal.known_length
        except InvalidDeltaError:
            found = "invalid"
        assert found == expected

    @rule(sequence_id=sequence_ids, token_ids=runs, stream_index=stream_indices)
    def create(self, sequence_id: str, token_ids: list[int], stream_index: int | None) -> None:
        self.store.forget_expired(ALL)
        self.append(sequence_id, 0, token_ids, stream_index)

    @rule(
        sequence_id=sequence_ids,
        back=st.one_of(st.integers(-3, 3), st.integers(0, 300)),
        token_ids=runs,
        stream_index=stream_indices,
    )
    def continue_near_the_end(
        self, sequence_id: str, back: int, token_ids: list[int], stream_index: int | None
    ) -> None:
        known = self.model.sequences.get(sequence_id)
        base_length = max(1, (len(known.tokens) if known else 3) - back)
        # Expired sequences count until the sweep, but not in the model: so the store is swept
        # before an append that may evict.
        if known is not None and base_length + len(token_ids) > known.capacity_tokens:
            self.store.forget_expired(ALL)
        self.append(sequence_id, base_length, token_ids, stream_index)

    @rule(sequence_id=sequence_ids)
    def send_the_whole_again(self, sequence_id: str) -> None:
        known = self.model.sequences.get(sequence_id)
        if known is not None and len(known.tokens) > 1:
            self.store.forget_expired(ALL)
            self.append(sequence_id, 1, known.tokens[1:], None)

    @rule(sequence_id=sequence_ids)
    def release(self, sequence_id: str) -> None:
        self.store.release(sequence_id)
        self.model.sequences.pop(sequence_id, None)

    @rule()
    def start_stream(self) -> None:
        self.streams.append((self.store.start_stream(), ModelStream()))

    @precondition(lambda self: self.streams)
    @rule(index=st.integers(0, 10))
    def end_stream(self, index: int) -> None:
        lease, stream = self.streams[index % len(self.streams)]
        self.store.end_stream(lease)
        if stream.ended_s is None:
            stream.ended_s = self.clock.now_s

    @rule(sequence_id=sequence_ids)
    def create_on_a_stream_that_ends(self, sequence_id: str) -> None:
        """By chance alone this would be rare."""
        self.start_stream()
        live = [pair for pair in self.streams if pair[1].ended_s is None]
        self.store.forget_expired(ALL)
        self.append(sequence_id, 0, [1, 2], len(live) - 1)
        self.end_stream(len(self.streams) - 1)

    @rule(seconds=st.sampled_from([0.5, 5.0, 14.5, 30.0, 45.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def keeps_its_invariants(self) -> None:
        self.store.check_integrity()

    @precondition(lambda self: self.model.sequences)
    @rule(index=st.integers(0, 3), seconds=st.sampled_from([29.5, 30.0, 59.5, 60.0]))
    def wait_and_continue(self, index: int, seconds: float) -> None:
        """Without a sweep in between: expired sequences must still not be used."""
        self.clock.now_s += seconds
        sequence_id = sorted(self.model.sequences)[index % len(self.model.sequences)]
        base_length = max(1, len(self.model.sequences[sequence_id].tokens))
        self.append(sequence_id, base_length, [], None)

    @rule()
    def sweep(self) -> None:
        self.model.forget_expired(self.clock.now_s)
        self.store.forget_expired(ALL)
        assert self.store.num_sequences == len(self.model.sequences)
        assert self.store.history_bytes == self.model.occupied_bytes()


HistoryStoreMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestHistoryStoreAgainstModel = HistoryStoreMachine.TestCase
