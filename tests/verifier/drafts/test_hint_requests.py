"""Which steps request hints, and how long ones."""

import pytest

from verifier.drafts.hint_requests import (
    DECLINED_STEPS_BEFORE_PROBING,
    PROBE_PERIOD_PER_SEQUENCE_S,
    PROBE_PERIOD_S,
    USELESS_HINTS_BEFORE_PROBING,
    ProbePace,
    is_gain_unlikely,
    num_wanted_draft_tokens,
)


@pytest.mark.parametrize(
    ("limit", "remaining", "expected"),
    [(7, 100, 28), (7, 28, 27), (7, 1, 0), (7, 0, 0), (2, 100, 8), (0, 100, 0)],
)
def test_a_hint_for_several_steps_is_requested_within_the_room_left(
    limit: int, remaining: int, expected: int
) -> None:
    wanted = num_wanted_draft_tokens(num_speculative_tokens=limit, remaining=remaining)
    assert wanted == expected


@pytest.mark.parametrize(
    ("num_useless_hints", "num_declined", "expected"),
    [
        (0, 0, False),
        (USELESS_HINTS_BEFORE_PROBING - 1, DECLINED_STEPS_BEFORE_PROBING - 1, False),
        (USELESS_HINTS_BEFORE_PROBING, 0, True),
        (0, DECLINED_STEPS_BEFORE_PROBING, True),
    ],
)
def test_a_gain_is_unlikely_after_useless_hints_or_declined_drafts(
    num_useless_hints: int, num_declined: int, expected: bool
) -> None:
    assert (
        is_gain_unlikely(num_useless_hints=num_useless_hints, num_declined=num_declined) is expected
    )


class TestProbePace:
    @pytest.mark.parametrize("num_sequences", [1, 3, 64])
    def test_short_steps_probe_once_in_a_period_that_grows_with_the_sequences(
        self, num_sequences: int
    ) -> None:
        period_s = PROBE_PERIOD_S + num_sequences * PROBE_PERIOD_PER_SEQUENCE_S
        probing = probing_steps(step_s=period_s / 7.5, num_steps=20, num_sequences=num_sequences)
        assert probing == [0, 8, 16]

    def test_long_steps_always_probe(self) -> None:
        assert probing_steps(step_s=2 * PROBE_PERIOD_S, num_steps=4) == [0, 1, 2, 3]

    def test_a_step_probes_for_every_sequence(self) -> None:
        pace = ProbePace()
        pace.begin_step(1.0)
        assert [pace.count_probe() for _ in range(3)] == [True] * 3

    def test_a_period_begins_when_a_sequence_has_used_the_last(self) -> None:
        pace = ProbePace()
        pace.begin_step(1.0)
        pace.begin_step(2.0)
        assert pace.count_probe()
        pace.begin_step(2.0 + PROBE_PERIOD_S)
        assert not pace.count_probe()


def probing_steps(*, step_s: float, num_steps: int, num_sequences: int = 1) -> list[int]:
    """Steps that probe, with so many sequences that would in each."""
    pace = ProbePace()
    probing = []
    for step in range(num_steps):
        pace.begin_step(100.0 + step * step_s)
        if all(pace.count_probe() for _ in range(num_sequences)):
            probing.append(step)
    return probing
