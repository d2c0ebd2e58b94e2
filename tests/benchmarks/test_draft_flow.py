"""The simulation of draft flow, where its result can be computed by hand."""

import random

import pytest

from benchmarks.serving.draft_flow import MAX_DRAFTS, Costs, Text, simulate
from benchmarks.serving.simulation import cost_curve

STEP_S = 0.001
PERIOD = list(range(100, 140))


def constant(_: int) -> float:
    return STEP_S


def periodic(num_tokens: int) -> Text:
    """Every token can be foreseen from the prompt."""
    output = (PERIOD * (1 + num_tokens // len(PERIOD)))[:num_tokens]
    return Text(prompt=PERIOD * 3, output=output)


def strange(num_tokens: int) -> Text:
    """No n-gram occurs twice."""
    tokens = random.Random(1).sample(range(1 << 20), num_tokens + 20)
    return Text(prompt=tokens[:20], output=tokens[20:])


def test_without_drafts_each_step_gives_one_token() -> None:
    flow = simulate([periodic(100)], Costs(step_s=constant, hop_s=0), streams=1, speculate=False)
    assert flow.num_tokens == flow.num_steps == flow.num_turns == 100
    assert flow.duration_s == pytest.approx(100 * STEP_S)


def test_foreseen_text_gives_full_drafts_when_hints_come_at_once() -> None:
    num_tokens = 10 * (MAX_DRAFTS + 1) + 1
    flow = simulate(
        [periodic(num_tokens)], Costs(step_s=constant, hop_s=0), streams=1, speculate=True
    )
    assert flow.num_tokens == num_tokens
    # The prompt's step, and ten with full drafts.
    assert (flow.num_turns, flow.num_turns_without_draft) == (11, 1)


def test_hints_that_never_come_leave_plain_decoding() -> None:
    costs = Costs(step_s=constant, hop_s=1000.0)
    on, off = (
        simulate([periodic(100)], costs, streams=1, speculate=speculate)
        for speculate in (True, False)
    )
    assert on.duration_s == pytest.approx(off.duration_s)
    assert on.waited_s == 0


def test_a_late_hint_serves_from_its_arrival_on() -> None:
    # Requested after the prompt's step, at 1 ms; there at 3.5 ms, during the fourth step.
    flow = simulate(
        [periodic(36)], Costs(step_s=constant, hop_s=2.5 * STEP_S), streams=1, speculate=True
    )
    # Four tokens singly, then 32 by one hint that has 28 tokens left of 31 trusted: 64 tokens.
    assert flow.num_turns == 5
    assert flow.num_turns_without_draft == 4


def test_text_that_never_repeats_is_never_waited_for() -> None:
    costs = Costs(step_s=constant, hop_s=STEP_S / 2)
    flow = simulate([strange(50)], costs, streams=1, speculate=True)
    assert flow.waited_s == 0
    assert flow.num_turns_without_draft == flow.num_turns == 50


def test_steps_wait_for_hints_that_were_right() -> None:
    costs = Costs(step_s=constant, hop_s=STEP_S / 2)
    # After a rejection the buffer is empty, and the next hint is worth the wait.
    surprises = list(periodic(400).output)
    for i in range(0, 400, 40):
        surprises[i] = 7 + i
    text = Text(prompt=PERIOD * 3, output=surprises)
    flow = simulate([text], costs, streams=1, speculate=True)
    # A whole number of hops, each half a step long.
    assert flow.waited_s == pytest.approx(round(flow.waited_s / costs.hop_s) * costs.hop_s)
    assert flow.waited_s > 0
    assert flow.duration_s < 400 * STEP_S / 4


def test_streams_share_steps_and_all_texts_are_decoded() -> None:
    texts = [periodic(50) for _ in range(6)]
    alone, together = (
        simulate(texts, Costs(step_s=constant, hop_s=0), streams=streams, speculate=False)
        for streams in (1, 3)
    )
    assert alone.num_tokens == together.num_tokens == 300
    assert alone.num_steps == 300
    assert together.num_steps == 100


def test_a_prompt_takes_as_many_rows_as_it_has_tokens() -> None:
    rows: list[int] = []

    def step_s(num_rows: int) -> float:
        rows.append(num_rows)
        return STEP_S

    text = Text(prompt=list(range(1000)), output=[1, 2])
    simulate([text], Costs(step_s=step_s, hop_s=0), streams=1, speculate=False)
    assert rows == [512, 488, 1]


def test_the_next_text_starts_after_the_turnaround() -> None:
    costs = Costs(step_s=constant, hop_s=0, turnaround_s=0.5)
    flow = simulate([periodic(10), periodic(10)], costs, streams=1, speculate=False)
    assert flow.duration_s == pytest.approx(0.5 + 20 * STEP_S)


def test_the_cost_curve_goes_through_means_and_grows_beyond_them() -> None:
    steps = [(1, 0.5), (1, 1.5)] * 15 + [(11, 3.0)] * 25
    step_s = cost_curve(steps)
    assert step_s(1) == pytest.approx(1.0)
    assert step_s(6) == pytest.approx(2.0)
    assert step_s(11) == 3.0
    assert step_s(22) == pytest.approx(6.0)
