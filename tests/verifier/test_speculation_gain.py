"""The gain of speculation: the estimate against known step costs."""

import random
from collections.abc import Callable

import pytest

from verifier.drafts.speculation_gain import DecodeCosts, StepCost


def gain(
    cost_s: Callable[[int, int], float],
    *,
    num_sequences: tuple[int, ...],
    acceptance: float,
    depths: tuple[int, ...] = (0, 7),
    noise: float = 0.0,
    speed: Callable[[int], float] = lambda step: 1.0,
) -> float:
    """The gain over the last 600 of 800 steps that cost `cost_s(sequences, tokens)`."""
    generator = random.Random(7)
    costs = DecodeCosts()
    took_s = plain_s = 0.0
    for index in range(800):
        n = num_sequences[index * len(num_sequences) // 800]
        drafts = [generator.choice(depths) for _ in range(n)]
        accepted = [sum(generator.random() < acceptance for _ in range(k)) for k in drafts]
        num_tokens = n + sum(drafts)
        time = costs.weigh(
            num_sequences=n,
            num_scheduled_tokens=num_tokens,
            num_output_tokens=n + sum(accepted),
            duration_s=cost_s(n, num_tokens)
            * generator.uniform(1 - noise, 1 + noise)
            / speed(index),
            draft_wait_s=0.0,
        )
        if index >= 200 and time is not None:
            took_s += time.took_s
            plain_s += time.plain_s
    return plain_s / took_s


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_steps_of_constant_cost_gain_the_tokens_they_emit(noise: float) -> None:
    found = gain(lambda n, m: 0.005, num_sequences=(4,), acceptance=0.5, noise=noise)
    assert found == pytest.approx(1 + 3.5 * 0.5, rel=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_that_are_never_accepted_are_a_loss(noise: float) -> None:
    found = gain(lambda n, m: 0.001 + 0.001 * m, num_sequences=(4,), acceptance=0.0, noise=noise)
    # A plain step costs 5 ms, the mean one 1 + 4 + 14 = 19 ms.
    assert found == pytest.approx(5 / 19, rel=0.1)


def test_without_any_plain_step_the_cost_follows_from_the_others() -> None:
    found = gain(
        lambda n, m: 0.004 + 0.0005 * m, num_sequences=(2,), acceptance=1.0, depths=(3, 5, 7)
    )
    # A plain step costs 5 ms; the mean one, of 2 sequences with 5 drafts each, 10 ms for 6 tokens.
    assert found == pytest.approx(6 * 5 / 10, rel=0.05)


def test_a_cost_per_sequence_gains_the_tokens_emitted_whatever_came_before() -> None:
    # One line through steps of 1 and of 8 sequences would mistake the sequences' cost for drafts'.
    found = gain(lambda n, m: 0.005 * n, num_sequences=(1, 8, 1, 8), acceptance=0.5)
    assert found == pytest.approx(1 + 3.5 * 0.5, rel=0.1)


def test_a_machine_that_is_slower_for_a_while_changes_nothing() -> None:
    found = gain(
        lambda n, m: 0.005,
        num_sequences=(4,),
        acceptance=0.5,
        speed=lambda step: 0.3 if step % 200 < 100 else 1.0,
    )
    assert found == pytest.approx(1 + 3.5 * 0.5, rel=0.15)


def test_waits_for_hints_count_as_time() -> None:
    costs = DecodeCosts()
    for num_tokens in (1, 8):
        time = costs.weigh(
            num_sequences=1,
            num_scheduled_tokens=num_tokens,
            num_output_tokens=num_tokens,
            duration_s=0.005,
            draft_wait_s=0.003,
        )
    assert time is not None
    assert time.took_s == pytest.approx(0.008)
    assert time.plain_s == pytest.approx(0.040)


def test_no_gain_is_reported_before_steps_of_different_sizes() -> None:
    cost = StepCost()
    assert cost.ratio(1, 8) is None
    for _ in range(100):
        cost.observe(8, 0.005)
    assert cost.ratio(1, 8) is None


@pytest.mark.parametrize(
    ("small_s", "large_s", "expected"),
    [(0.005, 0.001, 1.0), (0.0001, 0.0159, 1 / 15)],
    ids=["larger-was-faster", "larger-was-out-of-proportion"],
)
def test_noise_in_durations_cannot_make_the_ratio_absurd(
    small_s: float, large_s: float, expected: float
) -> None:
    cost = StepCost()
    for _ in range(1000):
        cost.observe(1, small_s)
        cost.observe(15, large_s)
    assert cost.ratio(1, 15) == pytest.approx(expected)
