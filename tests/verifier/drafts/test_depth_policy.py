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
from verifier.gpu.graph_pool import BUCKETS

MAX_DEPTH = 31
HINT_TOKENS = 40
NUM_TILE_ROWS = 12

Curve = Callable[[int], float]
# The probability that a hint's token stands, by the tokens that agreed before it.
Truth = Callable[[int], float]

CURVES: dict[str, Curve] = {
    "bound by memory": lambda rows: 5e-3 + 2e-5 * rows,
    "bound by memory, then by arithmetic": lambda rows: max(5e-3, 1e-4 * rows),
    "bound by arithmetic": lambda rows: 1e-3 + 3e-4 * rows,
    "a staircase": lambda rows: 1e-3 * (1 + (rows - 1) // NUM_TILE_ROWS),
    "tiles": lambda rows: 6e-4 + 3e-5 * rows + 3e-4 * ((rows - 1) // NUM_TILE_ROWS),
    # As on a GPU: a padded row is free, another bucket is cheap.
    "buckets": lambda rows: 5e-3 + 8e-6 * min(size for size in BUCKETS if size >= rows),
}
TRUTHS: dict[str, Truth] = {
    "copied": lambda num_agreed: 0.97,
    "like source code": lambda num_agreed: 1 - 1.2 / (num_agreed + 1.5),
    "by chance": lambda num_agreed: 0.05,
}


@dataclass
class Machine:
    """Steps over simulated sequences, each with a fresh hint in each step."""

    curve: Curve
    truth: Truth
    num_sequences: int = 1
    # Of the first sequences, how many have hints that are always wrong.
    num_lying: int = 0
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
        stood = [0 if i < self.num_lying else self._stood(m) for i, m in enumerate(matches)]
        depths = [fixed] * count
        if policy is not None:
            candidates = [
                DraftCandidate(record, 1, match, False, [1] * HINT_TOKENS)
                for record, match in zip(self.records, matches, strict=True)
            ]
            depths = choose(policy, candidates, max_drafts=512 - count)
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
                num_rows=rows,
                num_plain_rows=count,
                duration_s=duration_s,
                candidates=candidates,
                num_draft_tokens=depths,
                entries=list(range(count)),
                num_accepted_tokens=np.array(accepted, dtype=np.int64),
                output_token_ids=output,
            )

    def _stood(self, match: int) -> int:
        place = 0
        while place < HINT_TOKENS and self._draw.random() < self.truth(match + place):
            place += 1
        return place

    def tokens_per_s(self, policy: DepthPolicy | None, num_steps: int, fixed: int = 0) -> float:
        for _ in range(num_steps):
            self.step(policy, fixed)
        return self.num_tokens / self.seconds


def make_policy() -> DepthPolicy:
    return DepthPolicy(max_rows=512, max_depth=MAX_DEPTH)


def choose(
    policy: DepthPolicy, candidates: list[DraftCandidate], *, max_drafts: int = 500
) -> list[int]:
    count = len(candidates)
    return policy.choose(
        candidates, num_sequences=count, num_rows=count, num_chunk_rows=0, max_drafts=max_drafts
    )


def learn_rows(
    policy: DepthPolicy, num_rows: int, duration_s: float, *, num_plain_rows: int = 0
) -> DepthOutcome:
    """A step without candidates; a prompt's, unless `num_plain_rows`."""
    return policy.learn(
        num_rows=num_rows,
        num_plain_rows=num_plain_rows,
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

    policy = make_policy()
    # Every sequence begins with a prompt.
    learn_rows(policy, 200, CURVES[curve](200))
    best = max(machine().tokens_per_s(None, 400, fixed=fixed) for fixed in (0, 1, 3, 7, 15, 31))
    assert machine().tokens_per_s(policy, 3000) >= 0.97 * best


def test_under_load_drafts_end_and_come_back_with_the_room() -> None:
    policy = make_policy()
    one = Machine(CURVES["bound by memory, then by arithmetic"], lambda num_agreed: 0.8)
    one.tokens_per_s(policy, 200)
    assert one.depths[0] > 3
    many = Machine(one.curve, one.truth, num_sequences=100)
    many.tokens_per_s(policy, 100)
    many.num_tokens, many.seconds = 0, 0.0
    plain = Machine(one.curve, one.truth, num_sequences=100).tokens_per_s(None, 100)
    assert many.tokens_per_s(policy, 200) >= 0.98 * plain
    one.tokens_per_s(policy, 50)
    assert one.depths[0] > 3


def test_a_drafter_that_lies_gets_no_rows_until_it_is_right_again() -> None:
    machine = Machine(CURVES["bound by arithmetic"], lambda num_agreed: 0.97, 2, num_lying=1)
    policy = make_policy()
    machine.tokens_per_s(policy, 60)
    of_honest = []
    for _ in range(50):
        machine.step(policy)
        assert machine.depths[0] == 0
        of_honest.append(machine.depths[1])
    assert np.median(of_honest) >= 6, "another sequence need not pay for the lies"
    assert machine.records[0].num_declined >= 50
    machine.num_lying = 0
    num_steps = 0
    while machine.depths[0] == 0:
        machine.step(policy)
        num_steps += 1
        assert num_steps < 100
    assert machine.records[0].num_declined == 0


def test_a_resumed_hint_that_is_not_verified_is_not_declined() -> None:
    policy = make_policy()
    for _ in range(20):
        for rows in (3, 4, 8):
            learn_rows(policy, rows, float(rows), num_plain_rows=3)
    candidates = [
        DraftCandidate(SequenceDepth(), 1, 0, is_resumed, [1]) for is_resumed in (False, True)
    ]
    assert choose(policy, candidates) == [0, 0]
    assert [each.record.num_declined for each in candidates] == [1, 0]


def test_the_limits_stay_limits() -> None:
    policy = make_policy()
    candidates = [
        DraftCandidate(SequenceDepth(), 1, match, False, [1] * limit)
        for match, limit in ((2**40, 5), (0, 1), (7, 100))
    ]
    for max_drafts in (0, 1, 6, 1000):
        depths = choose(policy, candidates, max_drafts=max_drafts)
        assert sum(depths) <= max_drafts
        assert depths[0] <= 5
        assert depths[1] <= 1
        assert depths[2] <= MAX_DEPTH


def test_what_a_prompts_rows_cost_decides_what_a_draft_costs_beside_them() -> None:
    policy = make_policy()
    for _ in range(50):
        for rows in range(1, 34):
            learn_rows(policy, rows, 1e-3, num_plain_rows=1)
        for rows in (220, 300):
            learn_rows(policy, rows, rows * 1e-3)
    candidate = DraftCandidate(SequenceDepth(), 1, 9, False, [1] * 20)
    assert choose(policy, [candidate]) == [20]
    [beside_prompt] = policy.choose(
        [candidate], num_sequences=1, num_rows=1, num_chunk_rows=220, max_drafts=500
    )
    assert beside_prompt == 0, "a row costs as much as a step without the prompt"


def test_a_step_is_compared_with_its_forecast_and_with_plain_decoding() -> None:
    policy = make_policy()
    for _ in range(100):
        learn_rows(policy, 1, 0.004, num_plain_rows=1)
        learn_rows(policy, 4, 0.005, num_plain_rows=1)
    outcome = learn_one(policy, candidate_of(SequenceDepth()), [1, 1, 0])
    assert outcome.duration_s == 0.005
    assert outcome.expected_s == pytest.approx(0.005, rel=0.02)
    assert outcome.plain_s == pytest.approx(3 * 0.004, rel=0.02)
    assert learn_rows(policy, 200, 0.1).plain_s is None


def candidate_of(record: SequenceDepth) -> DraftCandidate:
    return DraftCandidate(record, 1, 4, False, [1, 1, 1])


def learn_one(policy: DepthPolicy, candidate: DraftCandidate, output: list[int]) -> DepthOutcome:
    """Learns from a step that verified three drafts, of which all but the last output token
    stood.
    """
    return policy.learn(
        num_rows=4,
        num_plain_rows=1,
        duration_s=0.005,
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
    for output in outputs:
        candidate = candidate_of(records[0])
        choose(in_turns, [candidate])
        learn_one(in_turns, candidate, output)
    candidates = [candidate_of(records[1]) for _ in outputs]
    for candidate in candidates:
        choose(late, [candidate])
    for candidate, output in zip(candidates, outputs, strict=True):
        learn_one(late, candidate, output)
    assert records[0].log_odds == records[1].log_odds < 0.0
