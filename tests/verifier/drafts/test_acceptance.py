"""The learned probability that a draft stands, against known ones."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.drafts.acceptance import learn, new_trials, survival


def probability(
    trials: np.ndarray, *, num_agreed: int = 4, source: int = 1, log_odds: float = 0.0
) -> float:
    """The probability that a hint's token is right, if those before it were."""
    out = np.empty(1)
    survival(trials, source, num_agreed, log_odds, out)
    return float(out[0])


@pytest.mark.parametrize("num_agreed", [1, 2, 4, 8, 64])
def test_begins_with_what_so_many_agreeing_tokens_promise(num_agreed: int) -> None:
    found = probability(new_trials(), num_agreed=num_agreed)
    assert found == pytest.approx(num_agreed / (num_agreed + 2), abs=0.01)
    assert probability(new_trials(), num_agreed=0) == pytest.approx(1 / 3)


@pytest.mark.parametrize("true", [0.05, 0.5, 0.97])
def test_finds_the_share_of_tokens_that_stand(true: float) -> None:
    draw = random.Random(5)
    trials = new_trials()
    for _ in range(3000):
        stands = draw.random() < true
        learn(trials, 1, 4, int(stands), not stands, 0.0)
    assert probability(trials) == pytest.approx(true, abs=0.05)


def test_sources_and_lengths_are_learned_apart_and_a_draft_passes_through_the_lengths() -> None:
    trials, untaught = new_trials(), new_trials()
    for _ in range(300):
        learn(trials, 1, 5, 0, True, 0.0)
    assert probability(trials) < 0.05
    for source, num_agreed in ((2, 4), (1, 3), (1, 8)):
        found, expected = (
            probability(each, source=source, num_agreed=num_agreed) for each in (trials, untaught)
        )
        assert found == expected
    together = np.empty(3)
    survival(trials, 1, 2, 0.0, together)
    each = [probability(trials, num_agreed=2 + i) for i in range(3)]
    assert together == pytest.approx(np.cumprod(each))


@pytest.mark.parametrize(("stands", "low", "high"), [(True, 0.93, 1.0), (False, 0.0, 0.2)])
def test_a_sequence_is_known_after_few_tokens(stands: bool, low: float, high: float) -> None:
    trials, log_odds = new_trials(), 0.0
    for _ in range(20):
        log_odds = learn(trials, 1, 9, int(stands), not stands, log_odds)
    of_it = probability(trials, num_agreed=9, log_odds=log_odds)
    assert low < of_it < high
    # Of the next sequence more is expected than of this one, or less.
    assert (of_it > probability(trials, num_agreed=9)) is stands


@given(
    source=st.integers(0, 2),
    num_agreed=st.integers(0, 2**62),
    outcomes=st.lists(st.tuples(st.integers(0, 31), st.booleans()), max_size=60),
)
def test_whatever_is_claimed_probabilities_are_neither_0_nor_1(
    source: int, num_agreed: int, outcomes: list[tuple[int, bool]]
) -> None:
    trials, log_odds = new_trials(), 0.0
    for num_stood, is_failed in outcomes:
        log_odds = learn(trials, source, num_agreed, num_stood, is_failed, log_odds)
    assert abs(log_odds) <= 6.0
    found = probability(trials, source=source, num_agreed=num_agreed, log_odds=log_odds)
    assert 0.0 < found < 1.0
