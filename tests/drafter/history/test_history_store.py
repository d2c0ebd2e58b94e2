"""What `test_history_store_model.py` does not see of the history store: names, reasons, walks."""

from collections import Counter

import numpy as np
import pytest

from drafter.history.history import SequenceDelta
from drafter.history.lru import EvictionReason
from drafter.history.store import HistoryStore, StoreLimits, StreamLease
from drafter.ngram.params import Algorithm, NgramParams, Overlap
from drafter.refusals import InvalidDeltaError, OutOfSyncError
from tests.drafter.running_drafter import FakeClock
from tests.drafter.texts import EMPTY_BYTES, KMP

LIMITS = StoreLimits(
    max_sequences=4,
    max_sequence_bytes=1500 * 4 + EMPTY_BYTES,
    max_history_bytes=8000 + 3 * EMPTY_BYTES,
    idle_ttl_s=60.0,
)
ALL = 1_000_000


class StoreUnderTest:
    """A store, its clock, and its evictions by reason."""

    def __init__(self, limits: StoreLimits = LIMITS) -> None:
        self.clock = FakeClock()
        self.evictions: Counter[EvictionReason] = Counter()
        self.store = HistoryStore(
            limits, clock=self.clock, on_eviction=lambda reason: self.evictions.update([reason])
        )

    def append(
        self,
        sequence_id: str,
        base_length: int,
        token_ids: list[int],
        lease: StreamLease | None = None,
        **fields: object,
    ) -> list[int]:
        """Returns the known tokens after the delta."""
        delta = SequenceDelta(
            sequence_id=sequence_id,
            base_length=base_length,
            token_ids=np.array(token_ids, dtype=np.uint32),
            **{"params": KMP, **fields},  # type: ignore[arg-type]
        )
        known: list[int] = self.store.append(delta, lease).token_ids.tolist()
        self.store.check_integrity()
        return known

    def known_length(self, sequence_id: str) -> int:
        """As the refusal of a delta beyond any history says."""
        with pytest.raises(OutOfSyncError) as refusal:
            self.append(sequence_id, 10**9, [1])
        return refusal.value.known_length


@pytest.fixture
def under_test() -> StoreUnderTest:
    return StoreUnderTest()


def test_a_delta_at_position_zero_replaces_the_sequence_and_its_params(
    under_test: StoreUnderTest,
) -> None:
    under_test.append("a", 0, [1, 2, 3], prompt_length=3)
    anew = NgramParams(overlap=Overlap.ALLOWED, algorithm=Algorithm.KMP)
    assert under_test.append("a", 0, [7], prompt_length=1, params=anew) == [7]
    history = under_test.store.append(
        SequenceDelta(
            sequence_id="a",
            base_length=1,
            token_ids=np.array([8], dtype=np.uint32),
            prompt_length=5,
            params=NgramParams(max_ngram=9),
        )
    )
    assert (history.params, history.prompt_length) == (anew, 1)
    assert not under_test.evictions


def test_a_prompt_may_be_longer_than_its_first_delta_but_not_than_a_sequence(
    under_test: StoreUnderTest,
) -> None:
    under_test.append("a", 0, [1], prompt_length=1500)
    with pytest.raises(InvalidDeltaError) as refusal:
        under_test.append("a", 0, [1], prompt_length=1501)
    assert refusal.value.field == "prompt_length"
    assert under_test.known_length("a") == 1


def test_expired_sequences_are_swept_a_few_at_a_time(under_test: StoreUnderTest) -> None:
    lease = under_test.store.start_stream()
    for sequence_id in "abcd":
        under_test.append(sequence_id, 0, [1], lease if sequence_id in "ab" else None)
    under_test.store.end_stream(lease)
    assert under_test.store.forget_expired(ALL) == 0
    under_test.clock.now_s += 60
    assert under_test.store.forget_expired(3) == 3
    under_test.store.check_integrity()
    assert under_test.store.forget_expired(3) == 1
    assert under_test.store.history_bytes == 0
    assert under_test.evictions == {EvictionReason.STREAM_ENDED: 2, EvictionReason.IDLE: 2}
