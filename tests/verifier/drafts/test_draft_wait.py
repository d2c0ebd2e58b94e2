"""When a step waits for hints: the rule's arithmetic, how p1 is learned, and a simulation."""

import random

import pytest

from verifier.drafts.draft_wait import (
    HOPS_KEPT,
    DraftWaitEstimates,
    HintRecord,
)


def estimates(step_s: float = 0.004, hop_s: float = 0.001) -> DraftWaitEstimates:
    made = DraftWaitEstimates()
    made.step_s.observe(step_s)
    made.hop_s.observe(hop_s)
    return made


@pytest.mark.parametrize(
    ("probabilities", "num_sequences", "elapsed_s", "longest_s"),
    [
        pytest.param([1.0], 1, 0.0, 0.004, id="one that repeats waits, at most what it gains"),
        pytest.param([0.0], 1, 0.0, 0.0, id="one that never repeats does not"),
        pytest.param([0.24], 1, 0.0, 0.0, id="gain just below the hop"),
        pytest.param([0.26], 1, 0.0, 0.00104, id="gain just above the hop"),
        pytest.param([0.24], 1, 0.0005, 0.00096, id="part of the hop has passed"),
        pytest.param([0.1], 1, 0.010, 0.0004, id="overdue: no longer than the gain"),
        pytest.param([0.0], 1, 0.010, 0.0, id="overdue and never right"),
        pytest.param([1.0], 5, 0.0, 0.0, id="one gains too little for five"),
        pytest.param([1.0, 0.5], 5, 0.0, 0.0012, id="two gain enough for five"),
        pytest.param([], 5, 0.0, 0.0, id="every sequence has a draft"),
    ],
)
def test_waits_while_the_gain_exceeds_the_delay(
    probabilities: list[float], num_sequences: int, elapsed_s: float, longest_s: float
) -> None:
    waited_s = estimates().longest_wait_s(
        first_token_probabilities=probabilities, num_sequences=num_sequences, elapsed_s=elapsed_s
    )
    assert waited_s == pytest.approx(longest_s)


@pytest.mark.parametrize("known", ["step_s", "hop_s"])
def test_never_waits_before_both_durations_are_known(known: str) -> None:
    unknown = DraftWaitEstimates()
    getattr(unknown, known).observe(1.0)
    assert (
        unknown.longest_wait_s(first_token_probabilities=[1.0], num_sequences=1, elapsed_s=0.0) == 0
    )


class TestHops:
    def test_one_under_a_step_counts_only_if_it_is_the_first_or_shorter(self) -> None:
        observed = DraftWaitEstimates()
        means = []
        for hop_s, was_under_step in (
            (0.010, True),  # the first
            (0.020, True),  # the step delayed it
            (0.010, True),  # as long as the mean
            (0.005, True),
            (0.020, False),
        ):
            observed.observe_hop(hop_s, was_under_step=was_under_step)
            means.append(observed.hop_s.value)
        assert means == [
            0.010,
            0.010,
            0.010,
            pytest.approx(0.0095),
            pytest.approx(0.9 * 0.0095 + 0.1 * 0.020),
        ]

    def test_quantiles_are_of_the_last_hops_that_no_step_delayed(self) -> None:
        observed = DraftWaitEstimates()
        assert observed.hop_quantile_s(0.5) == 0.0
        observed.observe_hop(9.0, was_under_step=True)
        assert observed.hop_quantile_s(0.5) == 0.0
        hops_s = list(range(1, 101))
        random.Random(1).shuffle(hops_s)
        for hop_s in hops_s:
            observed.observe_hop(float(hop_s), was_under_step=False)
        quantiles = [observed.hop_quantile_s(q) for q in (0.0, 0.5, 0.99, 1.0)]
        assert quantiles == [1.0, 51.0, 100.0, 100.0]
        for _ in range(HOPS_KEPT):
            observed.observe_hop(7.0, was_under_step=False)
        assert observed.hop_quantile_s(0.0) == observed.hop_quantile_s(1.0) == 7.0


class TestHintRecord:
    def test_decays_by_0_8(self) -> None:
        record = HintRecord()
        known = [0]
        expected = 0.0
        for right in (True, True, False, True):
            record.record_hint(len(known), [5], known)
            known.append(5 if right else 6)
            record.settle(known)
            expected = 0.8 * expected + 0.2 * right
            assert record.first_token_probability == pytest.approx(expected)

    @pytest.mark.parametrize(("token_id", "expected"), [(7, 0.2), (8, 0.0)])
    def test_learns_from_a_late_hint_at_once(self, token_id: int, expected: float) -> None:
        record = HintRecord()
        record.record_hint(2, [token_id], [0, 1, 7, 9])
        assert record.first_token_probability == pytest.approx(expected)

    def test_useless_hints_of_others_count_from_the_first_request_on(self) -> None:
        record = HintRecord(num_useless_before=5)
        assert record.num_useless_hints == 0, "no request yet"
        record.record_request()
        assert record.num_useless_hints == 5
        record.record_hint(1, [], [0])
        record.record_request()
        assert record.num_useless_hints == 6
        record.record_hint(1, [1, 9], [0, 1])
        record.record_request()
        record.record_hint(2, [], [0, 1])
        assert record.num_useless_hints == 1, "a useful one ends it"
        assert (record.num_hints, record.num_useful_hints) == (3, 1)

    @pytest.mark.parametrize(("length", "num_useless"), [(3, 0), (4, 1), (9, 1)])
    def test_a_right_hint_is_useless_once_the_sequence_has_passed_its_end(
        self, length: int, num_useless: int
    ) -> None:
        record = HintRecord()
        record.record_hint(1, [1, 2, 3], list(range(length)))
        assert record.num_useless_hints == num_useless
        assert record.first_token_probability == pytest.approx(0.2), "its first token was right"
