"""Each rule of the history store by example; `test_history_store_model.py` combines them."""

from collections import Counter
from collections.abc import Iterator

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


def test_a_sequence_grows_by_deltas_that_continue_it(under_test: StoreUnderTest) -> None:
    assert under_test.append("a", 0, [1, 2]) == [1, 2]
    assert under_test.append("a", 2, [3]) == [1, 2, 3]
    assert under_test.append("a", 3, []) == [1, 2, 3]
    assert under_test.append("b", 0, []) == []
    assert under_test.store.num_sequences == 2


def test_a_delta_sent_again_changes_nothing(under_test: StoreUnderTest) -> None:
    under_test.append("a", 0, [1, 2])
    under_test.append("a", 2, [3, 4])
    assert under_test.append("a", 2, [3, 4]) == [1, 2, 3, 4]
    assert under_test.append("a", 1, [2]) == [1, 2, 3, 4]


def test_only_the_new_part_of_an_overlapping_delta_is_appended(
    under_test: StoreUnderTest,
) -> None:
    under_test.append("a", 0, [1, 2, 3])
    assert under_test.append("a", 1, [2, 3, 4, 5]) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("base_length", "token_ids"), [(1, [9]), (1, [2, 9, 4]), (2, [9, 4]), (1, [9, 3, 4])]
)
def test_an_overlap_that_differs_is_out_of_sync_from_the_beginning(
    under_test: StoreUnderTest, base_length: int, token_ids: list[int]
) -> None:
    under_test.append("a", 0, [1, 2, 3])
    with pytest.raises(OutOfSyncError) as refusal:
        under_test.append("a", base_length, token_ids)
    assert refusal.value.known_length == 0
    assert under_test.append("a", 3, []) == [1, 2, 3]


def test_a_gap_is_out_of_sync_from_what_is_known(under_test: StoreUnderTest) -> None:
    under_test.append("a", 0, [1, 2, 3])
    for token_ids in ([], [5]):
        with pytest.raises(OutOfSyncError) as refusal:
            under_test.append("a", 4, token_ids)
        assert refusal.value.known_length == 3
    assert under_test.append("a", 3, [4]) == [1, 2, 3, 4]


def test_an_unknown_sequence_is_out_of_sync_from_the_beginning(
    under_test: StoreUnderTest,
) -> None:
    with pytest.raises(OutOfSyncError) as refusal:
        under_test.append("a", 4, [5])
    assert refusal.value.known_length == 0
    assert under_test.store.num_sequences == 0


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


def test_the_whole_range_of_token_ids_is_kept(under_test: StoreUnderTest) -> None:
    tokens = [0, 2**31, 2**32 - 1]
    under_test.append("a", 0, tokens)
    assert under_test.append("a", 2, [2**32 - 1, 5]) == [*tokens, 5]


def test_a_released_sequence_is_unknown(under_test: StoreUnderTest) -> None:
    under_test.append("a", 0, [1])
    under_test.store.release("a")
    under_test.store.release("never seen")
    under_test.store.check_integrity()
    assert under_test.store.num_sequences == 0
    assert under_test.store.history_bytes == 0
    assert under_test.known_length("a") == 0
    assert not under_test.evictions


def test_the_least_recently_used_goes_when_there_are_too_many(
    under_test: StoreUnderTest,
) -> None:
    for sequence_id in "abcd":
        under_test.append(sequence_id, 0, [1])
    under_test.append("a", 1, [2])
    under_test.append("e", 0, [1])
    assert under_test.evictions == {EvictionReason.SEQUENCES: 1}
    assert under_test.known_length("b") == 0
    assert under_test.known_length("a") == 2


def test_creating_a_known_sequence_anew_evicts_nobody(under_test: StoreUnderTest) -> None:
    for sequence_id in "abcd":
        under_test.append(sequence_id, 0, [1])
    under_test.append("a", 0, [1])
    assert not under_test.evictions
    assert under_test.store.num_sequences == 4


def test_a_refused_delta_does_not_count_as_a_use(under_test: StoreUnderTest) -> None:
    for sequence_id in "abcd":
        under_test.append(sequence_id, 0, [1])
    with pytest.raises(OutOfSyncError):
        under_test.append("a", 9, [1])
    under_test.append("e", 0, [1])
    assert under_test.known_length("a") == 0


def test_the_least_recently_used_go_when_the_bytes_run_out(under_test: StoreUnderTest) -> None:
    under_test.append("a", 0, [1] * 256)
    under_test.append("b", 0, [1] * 256)
    under_test.append("c", 0, [1] * 1024)  # 1,024 + 1,024 + 4,096 bytes of 8,000
    under_test.append("b", 256, [1])  # doubles: 2,048
    assert under_test.store.history_bytes == 7168 + 3 * EMPTY_BYTES
    assert not under_test.evictions
    under_test.append("b", 257, [1] * 900)  # doubles, up to its limit: 6,000
    assert under_test.evictions == {EvictionReason.BYTES: 2}
    assert under_test.known_length("a") == under_test.known_length("c") == 0
    assert under_test.known_length("b") == 1157


def test_a_sequence_that_fills_all_the_bytes_evicts_the_others_but_stays() -> None:
    limits = StoreLimits(
        max_sequences=9,
        max_sequence_bytes=4000 + EMPTY_BYTES,
        max_history_bytes=4000 + EMPTY_BYTES,
        idle_ttl_s=1,
    )
    under_test = StoreUnderTest(limits)
    under_test.append("a", 0, [1])
    under_test.append("b", 0, [2] * 500)
    assert under_test.append("b", 500, [3] * 500) == [2] * 500 + [3] * 500
    assert under_test.evictions == {EvictionReason.BYTES: 1}
    assert under_test.store.history_bytes == 4000 + EMPTY_BYTES


def test_a_sequence_that_would_be_too_long_is_refused_and_keeps_what_it_had(
    under_test: StoreUnderTest,
) -> None:
    under_test.append("a", 0, [1] * 1499)
    with pytest.raises(InvalidDeltaError) as refusal:
        under_test.append("a", 1499, [2, 2])
    assert refusal.value.field == "token_ids"
    assert "1501" in str(refusal.value)
    assert under_test.append("a", 1498, [1, 2]) == [1] * 1499 + [2]
    with pytest.raises(InvalidDeltaError):
        under_test.append("b", 0, [1] * 1501)
    assert under_test.known_length("b") == 0


def test_a_prompt_may_be_longer_than_its_first_delta_but_not_than_a_sequence(
    under_test: StoreUnderTest,
) -> None:
    under_test.append("a", 0, [1], prompt_length=1500)
    with pytest.raises(InvalidDeltaError) as refusal:
        under_test.append("a", 0, [1], prompt_length=1501)
    assert refusal.value.field == "prompt_length"
    assert under_test.known_length("a") == 1


def test_an_idle_sequence_is_forgotten(under_test: StoreUnderTest) -> None:
    under_test.append("a", 0, [1])
    under_test.append("b", 0, [1])
    under_test.clock.now_s += 59
    under_test.append("b", 1, [2])
    under_test.clock.now_s += 1
    assert under_test.known_length("a") == 0
    assert under_test.known_length("b") == 2
    assert under_test.evictions == {EvictionReason.IDLE: 1}


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


class CountedWalks(set[str]):
    """Counts the walks over it. To find one member, a walk passes the places of all removed."""

    num_walks = 0

    def __iter__(self) -> Iterator[str]:
        self.num_walks += 1
        return super().__iter__()


def test_a_sweep_of_an_ended_stream_does_not_walk_over_its_sequences(
    under_test: StoreUnderTest,
) -> None:
    lease = under_test.store.start_stream()
    for sequence_id in "abcd":
        under_test.append(sequence_id, 0, [1], lease)
    lease.sequence_ids = CountedWalks(lease.sequence_ids)
    under_test.store.end_stream(lease)
    under_test.clock.now_s += 30
    assert under_test.store.forget_expired(3) == 3
    assert under_test.store.forget_expired(3) == 1
    assert lease.sequence_ids.num_walks == 0
    under_test.store.check_integrity()


def test_a_stream_s_sequences_are_freed_thirty_seconds_after_its_end(
    under_test: StoreUnderTest,
) -> None:
    first, second = under_test.store.start_stream(), under_test.store.start_stream()
    under_test.append("a", 0, [1], first)
    under_test.append("b", 0, [1], second)
    under_test.append("c", 0, [1])
    under_test.append("b", 1, [1], first)  # appended to on the first, not created
    under_test.store.end_stream(first)
    under_test.store.end_stream(first)
    under_test.clock.now_s += 29.9
    assert under_test.store.forget_expired(ALL) == 0
    assert under_test.known_length("a") == 1
    under_test.clock.now_s += 0.1
    assert under_test.known_length("a") == 0
    assert under_test.store.forget_expired(ALL) == 0
    assert under_test.known_length("b") == 2
    assert under_test.known_length("c") == 1
    assert under_test.evictions == {EvictionReason.STREAM_ENDED: 1}


def test_a_sequence_created_again_elsewhere_outlives_its_first_stream(
    under_test: StoreUnderTest,
) -> None:
    first, second = under_test.store.start_stream(), under_test.store.start_stream()
    for sequence_id in "abc":
        under_test.append(sequence_id, 0, [1], first)
    under_test.store.end_stream(first)
    under_test.append("a", 0, [1], second)
    under_test.append("b", 0, [1])
    under_test.append("c", 1, [1], second)  # continuing it is not creating it
    under_test.clock.now_s += 30
    under_test.store.forget_expired(ALL)
    assert [under_test.known_length(sequence_id) for sequence_id in "abc"] == [1, 1, 0]


def test_a_limit_that_nothing_fits_into_is_refused() -> None:
    for limits in (
        {"max_sequences": 0},
        {"max_sequence_bytes": 3},
        {"max_history_bytes": 1500 * 4 - 1},
    ):
        with pytest.raises(ValueError, match=next(iter(limits))):
            StoreLimits(
                **{  # type: ignore[arg-type]
                    "max_sequences": 4,
                    "max_sequence_bytes": 1500 * 4,
                    "max_history_bytes": 8000,
                    "idle_ttl_s": 60.0,
                    **limits,
                }
            )
