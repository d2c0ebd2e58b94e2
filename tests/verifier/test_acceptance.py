"""The learned probability that a draft stands, against known ones."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.drafts.acceptance import CORRECTION_VARIANCE, Acceptance, learn, survival


def taught(
    acceptance: Acceptance,
    *,
    num_stood: int,
    is_failed: bool,
    match_length: int = 4,
    place: int = 0,
    source: int = 1,
    correction: tuple[float, float] = (0.0, CORRECTION_VARIANCE),
) -> tuple[float, float]:
    """The sequence's correction and its variance after some tokens of a hint."""
    return learn(acceptance.trials, source, match_length, place, num_stood, is_failed, *correction)


def probability(
    acceptance: Acceptance,
    *,
    match_length: int = 4,
    place: int = 0,
    source: int = 1,
    log_odds: float = 0.0,
) -> float:
    """The probability that a hint's token is right, if those before it were."""
    out = np.empty(1)
    survival(acceptance.trials, source, match_length, place, log_odds, out)
    return float(out[0])


@pytest.mark.parametrize(("match_length", "place"), [(1, 0), (2, 0), (3, 2), (9, 9), (0, 1)])
def test_begins_with_what_so_many_agreeing_tokens_promise(match_length: int, place: int) -> None:
    found = probability(Acceptance(), match_length=match_length, place=place)
    agreed = max(1, match_length) + place
    assert found == pytest.approx(agreed / (agreed + 2), abs=0.03)


@pytest.mark.parametrize("true", [0.05, 0.5, 0.97])
def test_finds_the_share_of_tokens_that_stand(true: float) -> None:
    draw = random.Random(5)
    acceptance = Acceptance()
    for _ in range(3000):
        stands = draw.random() < true
        taught(acceptance, num_stood=int(stands), is_failed=not stands)
    assert probability(acceptance) == pytest.approx(true, abs=0.05)


def test_sources_lengths_and_places_are_learned_apart() -> None:
    acceptance, untaught = Acceptance(), Acceptance()
    for _ in range(300):
        taught(acceptance, num_stood=0, is_failed=True, source=1, match_length=4, place=2)

    assert probability(acceptance, source=1, match_length=4, place=2) < 0.05
    for source, match_length, place in ((2, 4, 2), (1, 5, 2), (1, 4, 3)):
        found, expected = (
            probability(each, source=source, match_length=match_length, place=place)
            for each in (acceptance, untaught)
        )
        assert found == expected


@pytest.mark.parametrize(("stands", "low", "high"), [(True, 0.93, 1.0), (False, 0.0, 0.5)])
def test_a_sequence_is_known_after_few_tokens(stands: bool, low: float, high: float) -> None:
    acceptance = Acceptance()
    correction = (0.0, CORRECTION_VARIANCE)
    for _ in range(20):
        correction = taught(
            acceptance, num_stood=int(stands), is_failed=not stands, correction=correction
        )
    of_it = probability(acceptance, match_length=9, log_odds=correction[0])
    assert low < of_it < high
    # Of the next sequence more is expected than of this one, or less.
    of_next = probability(acceptance, match_length=9)
    assert (of_it > of_next) is stands


@given(
    source=st.integers(0, 2),
    match_length=st.integers(0, 2**62),
    place=st.integers(0, 2**31),
    outcomes=st.lists(st.tuples(st.integers(0, 31), st.booleans()), max_size=60),
)
def test_whatever_is_claimed_probabilities_are_neither_0_nor_1(
    source: int, match_length: int, place: int, outcomes: list[tuple[int, bool]]
) -> None:
    acceptance = Acceptance()
    correction = (0.0, CORRECTION_VARIANCE)
    for num_stood, is_failed in outcomes:
        correction = taught(
            acceptance,
            num_stood=num_stood,
            is_failed=is_failed,
            source=source,
            match_length=match_length,
            place=place,
            correction=correction,
        )
    found = probability(
        acceptance,
        source=source,
        match_length=match_length,
        place=place,
        log_odds=correction[0],
    )
    assert 0.0 < found < 1.0
    assert abs(correction[0]) <= 6.0
    assert 0.0 < correction[1] <= CORRECTION_VARIANCE
