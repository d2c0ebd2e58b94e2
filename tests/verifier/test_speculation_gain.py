"""What speculation gains: the estimate against step costs that are known."""

import random

import pytest

from verifier.speculation_gain import DecodeTime, StepCost, decode_time


def steps(
    *,
    fixed_s: float,
    slope_s: float,
    num_sequences: int,
    acceptance: float,
    depths: tuple[int, ...] = (0, 7),
    noise: float = 0.0,
) -> DecodeTime:
    """What 400 steps took in all, and the estimate of plain decoding, both without the first 50."""
    generator = random.Random(7)
    cost = StepCost()
    took_s = plain_s = 0.0
    for index in range(400):
        drafts = [generator.choice(depths) for _ in range(num_sequences)]
        accepted = [sum(generator.random() < acceptance for _ in range(k)) for k in drafts]
        num_tokens = num_sequences + sum(drafts)
        duration_s = (fixed_s + slope_s * num_tokens) * generator.uniform(1 - noise, 1 + noise)
        time = decode_time(
            cost,
            num_sequences=num_sequences,
            num_scheduled_tokens=num_tokens,
            num_output_tokens=num_sequences + sum(accepted),
            duration_s=duration_s,
            draft_wait_s=0.0,
        )
        if index >= 50:
            assert time is not None
            took_s += time.took_s
            plain_s += time.plain_s
    return DecodeTime(took_s=took_s, plain_s=plain_s)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_steps_that_cost_the_same_gain_what_they_emit(noise: float) -> None:
    time = steps(fixed_s=0.005, slope_s=0.0, num_sequences=4, acceptance=0.5, noise=noise)
    assert time.plain_s / time.took_s == pytest.approx(1 + 3.5 * 0.5, rel=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_drafts_that_are_never_accepted_are_a_loss(noise: float) -> None:
    time = steps(fixed_s=0.001, slope_s=0.001, num_sequences=4, acceptance=0.0, noise=noise)
    # A plain step costs 5 ms, the mean one 1 + 4 + 14 = 19 ms.
    assert time.plain_s / time.took_s == pytest.approx(5 / 19, rel=0.1)


def test_without_any_plain_step_the_cost_follows_from_the_others() -> None:
    time = steps(fixed_s=0.004, slope_s=0.0005, num_sequences=2, acceptance=1.0, depths=(3, 5, 7))
    # A plain step costs 5 ms; the mean one, of 2 sequences with 5 drafts each, 10 ms for 6 tokens.
    assert time.plain_s / time.took_s == pytest.approx(6 * 5 / 10, rel=0.05)


def test_waits_for_hints_count_as_time_taken() -> None:
    cost = StepCost()
    cost.observe(1, 0.005)
    time = decode_time(
        cost,
        num_sequences=1,
        num_scheduled_tokens=8,
        num_output_tokens=8,
        duration_s=0.005,
        draft_wait_s=0.003,
    )
    assert time is not None
    assert time.took_s == pytest.approx(0.008)
    assert time.plain_s == pytest.approx(0.040)


def test_nothing_is_claimed_before_steps_of_different_sizes_were_seen() -> None:
    cost = StepCost()
    assert cost.estimate_s(1) is None
    for _ in range(100):
        cost.observe(8, 0.005)
    assert cost.estimate_s(1) is None


def test_larger_steps_that_were_faster_make_a_plain_step_no_slower_than_the_mean() -> None:
    cost = StepCost()
    for _ in range(2000):
        cost.observe(1, 0.005)
        cost.observe(15, 0.001)
    assert cost.estimate_s(1) == pytest.approx(0.003, rel=0.01)


def test_larger_steps_out_of_proportion_make_a_plain_step_no_cheaper_than_in_proportion() -> None:
    cost = StepCost()
    for _ in range(2000):
        cost.observe(1, 0.0001)
        cost.observe(15, 0.0159)
    assert cost.estimate_s(1) == pytest.approx(0.008 / 8, rel=0.02)
