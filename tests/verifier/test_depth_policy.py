"""The learned depth on simulated machines, against fixed depths."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from verifier.drafts.depth_policy import (
    DepthOutcome,
    DepthPolicy,
    DraftCandidate,
    SequenceDepth,
)
from verifier.drafts.step_cost import NO_STEP, StepShape
from verifier.gpu.graph_pool import BUCKETS
from verifier.gpu.graph_pool import ROW_TILE as GRAPH_ROW_TILE

MAX_DEPTH, ROW_TILE, CONTEXT = 31, 12, 400
HINT_TOKENS = 40

Curve = Callable[[int], float]
# The probability that a hint's token stands, by its match length and place.
Truth = Callable[[int, int], float]

CURVES: dict[str, Curve] = {
    "bound by memory": lambda rows: 5e-3 + 2e-5 * rows,
    "bound by memory, then by arithmetic": lambda rows: max(5e-3, 1e-4 * rows),
    "bound by arithmetic": lambda rows: 1e-3 + 3e-4 * rows,
    "a staircase": lambda rows: 1e-3 * (1 + (rows - 1) // ROW_TILE),
    "tiles": lambda rows: 6e-4 + 3e-5 * rows + 3e-4 * ((rows - 1) // ROW_TILE),
}
TRUTHS: dict[str, Truth] = {
    "copied": lambda match_length, place: 0.97,
    "like source code": lambda match_length, place: 1 - 1.2 / (match_length + place + 1.5),
    "by chance": lambda match_length, place: 0.05,
}


@dataclass
class Machine:
    """Steps over simulated sequences, each with a fresh hint in each step."""

    curve: Curve
    truth: Truth
    num_sequences: int = 1
    noise: float = 0.05
    num_tokens: int = 0
    seconds: float = 0.0
    records: list[SequenceDepth] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = [SequenceDepth() for _ in range(self.num_sequences)]
        self._draw = random.Random(11)

    def step(self, policy: DepthPolicy | None, fixed: int = 0) -> None:
        draw, count = self._draw, self.num_sequences
        matches = [draw.choice([2, 3, 5, 9, 20]) for _ in range(count)]
        stood = [self._stood(match) for match in matches]
        depths = [fixed] * count
        if policy is not None:
            candidates = [
                DraftCandidate(
                    record=record,
                    source=1,
                    match_length=match,
                    place=0,
                    token_ids=[1] * HINT_TOKENS,
                )
                for record, match in zip(self.records, matches, strict=True)
            ]
            depths = policy.choose(
                candidates,
                decode_shape=shape_of(count, count),
                shape=shape_of(count, count),
                max_drafts=512 - count,
                draft_context=CONTEXT,
            )
            depths = [min(depth, MAX_DEPTH) for depth in depths]
        accepted = [min(pair) for pair in zip(stood, depths, strict=True)]
        rows = count + sum(depths)
        duration_s = self.curve(rows) * np.exp(draw.gauss(0, self.noise))
        self.depths = depths
        self.num_tokens += count + sum(accepted)
        self.seconds += duration_s
        if policy is not None:
            # Drafts are 1, and other tokens 0.
            output = np.full((count, MAX_DEPTH + 1), -1, dtype=np.int64)
            for i, number in enumerate(accepted):
                output[i, :number] = 1
                output[i, number] = stood[i] > number
            policy.learn(
                shape_of(count, rows),
                plain_shape=shape_of(count, count),
                duration_s=duration_s,
                candidates=candidates,
                num_draft_tokens=depths,
                entries=list(range(count)),
                num_accepted_tokens=np.array(accepted, dtype=np.int64),
                output_token_ids=output,
            )

    def _stood(self, match: int) -> int:
        place = 0
        while place < HINT_TOKENS and self._draw.random() < self.truth(match, place):
            place += 1
        return place

    def plain_step(self, policy: DepthPolicy) -> None:
        """A step of text that nobody drafts for."""
        duration_s = self.curve(self.num_sequences) * np.exp(self._draw.gauss(0, self.noise))
        policy.choose((), decode_shape=NO_STEP, shape=NO_STEP, max_drafts=0, draft_context=0)
        if policy.learn_plain(duration_s) is None:
            shape = shape_of(self.num_sequences, self.num_sequences)
            learn_without_candidates(policy, shape, plain_shape=shape, duration_s=duration_s)

    def tokens_per_s(self, policy: DepthPolicy | None, num_steps: int, fixed: int = 0) -> float:
        for _ in range(num_steps):
            self.step(policy, fixed)
        return self.num_tokens / self.seconds


def shape_of(sequences: int, rows: int) -> StepShape:
    return StepShape(
        num_sequences=sequences,
        num_logits_rows=rows,
        num_attended=rows * CONTEXT,
        num_rows=rows,
    )


def make_policy() -> DepthPolicy:
    return DepthPolicy(max_rows=512, max_depth=MAX_DEPTH, row_tile=ROW_TILE)


def prefilled(curve: Curve, policy: DepthPolicy, num_tokens: int = 200) -> DepthPolicy:
    """A policy that has seen a prompt: every sequence begins with one."""
    prompt = StepShape(
        num_sequences=1,
        num_logits_rows=1,
        num_attended=num_tokens**2 // 2,
        num_rows=num_tokens,
    )
    policy.choose((), decode_shape=prompt, shape=prompt, max_drafts=0, draft_context=0)
    learn_without_candidates(policy, prompt, plain_shape=None, duration_s=curve(num_tokens))
    return policy


def learn_without_candidates(
    policy: DepthPolicy, shape: StepShape, *, plain_shape: StepShape | None, duration_s: float
) -> None:
    policy.learn(
        shape,
        plain_shape=plain_shape,
        duration_s=duration_s,
        candidates=[],
        num_draft_tokens=[],
        entries=[],
        num_accepted_tokens=np.zeros(0, dtype=np.int64),
        output_token_ids=np.zeros((0, 1), dtype=np.int64),
    )


@pytest.mark.parametrize("num_sequences", [1, 16])
@pytest.mark.parametrize("text", TRUTHS)
@pytest.mark.parametrize("curve", CURVES)
def test_comes_within_3_percent_of_the_best_fixed_depth(
    curve: str, text: str, num_sequences: int
) -> None:
    """From the first step on, what it takes to learn included."""

    def machine() -> Machine:
        return Machine(CURVES[curve], TRUTHS[text], num_sequences)

    best = max(machine().tokens_per_s(None, 400, fixed=fixed) for fixed in (0, 1, 3, 7, 15, 31))
    assert machine().tokens_per_s(prefilled(CURVES[curve], make_policy()), 1500) >= 0.97 * best


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("text", TRUTHS)
def test_comes_within_3_percent_where_steps_are_padded_to_buckets(
    text: str, num_sequences: int
) -> None:
    """Bound by memory, as on a GPU: a padded row is free, another bucket is cheap."""

    def curve(rows: int) -> float:
        bucket = min(size for size in BUCKETS if size >= rows)
        return 5e-3 + 8e-6 * bucket

    def machine() -> Machine:
        return Machine(curve, TRUTHS[text], num_sequences)

    policy = prefilled(
        curve, DepthPolicy(max_rows=512, max_depth=MAX_DEPTH, row_tile=GRAPH_ROW_TILE)
    )
    best = max(machine().tokens_per_s(None, 400, fixed=fixed) for fixed in (0, 1, 3, 7, 15, 31))
    assert machine().tokens_per_s(policy, 1500) >= 0.97 * best


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_where_no_draft_pays_one_step_of_64_tries_one_each(num_sequences: int) -> None:
    """Steps without any hint count."""
    policy = make_policy()
    machine = Machine(lambda rows: 1e-3 * rows, lambda m, h: 0.3, num_sequences)
    for _ in range(200):
        machine.step(policy)
    tried = []
    for step in range(640):
        if step % 4:
            machine.plain_step(policy)
        else:
            machine.step(policy)
            tried += [sum(machine.depths)] if sum(machine.depths) else []
    assert 9 <= len(tried) <= 10
    assert set(tried) == {num_sequences}


def test_a_drafter_that_lies_gets_no_rows_until_it_is_right_again() -> None:
    lies = [True]
    machine = Machine(CURVES["bound by arithmetic"], lambda m, h: 0.0 if lies[0] else 0.97, 2)
    policy = make_policy()
    for _ in range(60):
        machine.step(policy)
    tried = []
    for _ in range(50):
        machine.step(policy)
        tried += [machine.depths] if machine.depths != [0, 0] else []
    # One step of 64 verifies one each whatever is believed; it requests no hint.
    assert tried in ([], [[1, 1]])
    assert machine.records[0].num_declined >= 49
    lies[0] = False
    num_steps = 0
    while 0 in machine.depths:
        machine.step(policy)
        num_steps += 1
        assert num_steps < 100
    # Another sequence need not pay for the lies.
    assert machine.records[0].num_declined == 0


def test_the_limits_stay_limits() -> None:
    policy = make_policy()
    candidates = [
        DraftCandidate(
            record=SequenceDepth(), source=1, match_length=match, place=0, token_ids=[1] * limit
        )
        for match, limit in ((2**40, 5), (0, 1), (7, 100))
    ]
    for max_drafts in (0, 1, 6, 1000):
        depths = policy.choose(
            candidates,
            decode_shape=shape_of(3, 3),
            shape=shape_of(3, 3),
            max_drafts=max_drafts,
            draft_context=CONTEXT,
        )
        assert sum(depths) <= max_drafts
        assert depths[0] <= 5
        assert depths[1] <= 1
        assert depths[2] <= MAX_DEPTH


def test_of_steps_without_drafts_one_of_eight_is_learned_from_and_all_are_reported() -> None:
    policy = make_policy()
    outcomes = [policy.learn_plain(0.004) for _ in range(16)]
    assert [i for i, outcome in enumerate(outcomes) if outcome is None] == [0, 8]
    assert outcomes[1] is not None
    assert (outcomes[1].duration_s, outcomes[1].plain_s) == (0.004, 0.004)
    assert outcomes[1].expected_s is None


def candidate_of(record: SequenceDepth) -> DraftCandidate:
    return DraftCandidate(record=record, source=1, match_length=4, place=0, token_ids=[1, 1, 1])


def learn_one(policy: DepthPolicy, candidate: DraftCandidate, output: list[int]) -> DepthOutcome:
    """Learns from a step that verified three drafts, of which all but the last output token
    stood.
    """
    return policy.learn(
        shape_of(1, 4),
        plain_shape=None,
        duration_s=0.004,
        candidates=[candidate],
        num_draft_tokens=[3],
        entries=[0],
        num_accepted_tokens=np.array([max(0, len(output) - 1)]),
        output_token_ids=np.array([output + [-1] * (4 - len(output))]),
    )


def test_a_step_may_be_learned_from_after_the_next_choice() -> None:
    outputs = [[1, 1, 0], [0]]
    records = SequenceDepth(), SequenceDepth()
    in_turns, late = make_policy(), make_policy()
    variances = [records[0].variance]
    for output in outputs:
        candidate = candidate_of(records[0])
        choose_one(in_turns, candidate)
        learn_one(in_turns, candidate, output)
        variances.append(records[0].variance)
    assert variances == sorted(variances, reverse=True), "each builds on the one before"
    candidates = [candidate_of(records[1]) for _ in outputs]
    for candidate in candidates:
        choose_one(late, candidate)
    for candidate, output in zip(candidates, outputs, strict=True):
        learn_one(late, candidate, output)
    assert records[0].log_odds < 0.0
    assert (records[0].log_odds, records[0].variance) == (records[1].log_odds, records[1].variance)


def choose_one(policy: DepthPolicy, candidate: DraftCandidate) -> None:
    policy.choose(
        [candidate],
        decode_shape=shape_of(1, 1),
        shape=shape_of(1, 1),
        max_drafts=9,
        draft_context=CONTEXT,
    )
