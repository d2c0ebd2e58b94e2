"""The depth policy in the scheduler and in the engine."""

from typing import Any

import numpy as np
import pytest

from tandem.values import DraftWait
from tests.scripted_model import continue_by, hashed
from tests.verifier.running_engine import start_engine_with
from tests.verifier.sequences import make_sequence
from verifier.drafts.depth_policy import DepthPolicy
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.scheduler import ScheduledSequence, Scheduler
from verifier.scheduling.sequence import Sequence

BLOCK_SIZE = 4
NUM_DRAFTS = 7


def policy_where_a_row_costs(seconds: float) -> DepthPolicy:
    """A step costs 1 ms and this much per row."""
    policy = DepthPolicy(max_rows=64, max_depth=NUM_DRAFTS)
    for rows in [*range(1, 40)] * 10:
        policy.learn(
            num_rows=rows,
            num_plain_rows=0,
            duration_s=1e-3 + seconds * rows,
            candidates=[],
            num_draft_tokens=[],
            entries=[],
            num_accepted_tokens=np.zeros(0, dtype=np.int64),
            output_token_ids=np.zeros((0, 1), dtype=np.int64),
        )
    return policy


def scheduled(
    policy: DepthPolicy | None,
    sequences: list[Sequence],
    *,
    num_blocks: int = 64,
    num_hinted: int = NUM_DRAFTS,
) -> list[ScheduledSequence]:
    """A step of decoding sequences, each with a hint after 2 matching tokens."""
    scheduler = Scheduler(
        block_pool=BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        depth_policy=policy,
    )
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    scheduler.schedule()
    for sequence in sequences:
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        length = len(sequence.token_ids)
        sequence.draft_buffer.offer(length, [1] * num_hinted, 2, sequence.token_ids)
    return scheduler.schedule()


def depths(items: list[ScheduledSequence]) -> list[int]:
    return [len(item.draft_token_ids) for item in items]


def test_under_always_all_drafts_are_verified_whatever_they_cost() -> None:
    policy = policy_where_a_row_costs(1e-2)
    sequences = [make_sequence(), make_sequence(draft_wait=DraftWait.ALWAYS), make_sequence()]
    for sequence in sequences:
        sequence.depth_record.log_odds = -6.0
    items = scheduled(policy, sequences)
    assert depths(items) == [0, NUM_DRAFTS, 0]
    assert [item.candidate is None for item in items] == [False, True, False]


def test_without_a_policy_as_many_are_verified_as_the_limits_allow() -> None:
    assert depths(scheduled(None, [make_sequence(), make_sequence()])) == [NUM_DRAFTS] * 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_speculative_tokens": 3}, 3),
        ({"tokens_per_match": 1}, 2),
        ({"num_output_tokens": 5}, 4),
        ({"stop_token_ids": frozenset({1})}, 0),
    ],
    ids=["of the request", "of the match", "of the output", "of a stop token"],
)
def test_the_limits_of_a_sequence_stay_limits(fields: dict[str, Any], expected: int) -> None:
    policy = policy_where_a_row_costs(1e-7)
    assert depths(scheduled(policy, [make_sequence(**fields)])) == [expected]


def test_blocks_that_are_not_there_cut_what_the_policy_chose() -> None:
    policy = policy_where_a_row_costs(1e-7)
    # Each prompt fills a block; the first sequence's drafts fill the other two.
    sequences = [make_sequence(), make_sequence()]
    assert depths(scheduled(policy, sequences, num_blocks=4)) == [NUM_DRAFTS, 0]


def test_a_step_reports_its_forecast_and_outputs_do_not_depend_on_depths() -> None:
    policy = DepthPolicy(max_rows=64, max_depth=NUM_DRAFTS)
    running = start_engine_with(depth_policy=policy)
    try:
        session = running.attach()
        prompt = [1, 2, 3]
        right = continue_by(hashed, prompt, 40)
        sequence_id = session.open(prompt, max_new_tokens=40)
        for count in range(1, 41):
            decided = session.wait_decided(sequence_id, count)
            if decided.finish_reason is not None:
                break
            length = decided.base_length + len(decided.token_ids)
            # Half of the hints are wrong from their second token on.
            hint = right[length - 3 : length + 4]
            if count % 2:
                hint = [hint[0], *(token + 1 for token in hint[1:])] if hint else []
            session.hint(sequence_id, length, hint)
        session.wait_end(sequence_id)
        assert session.output(sequence_id) == right
    finally:
        running.stop()
    steps = running.observer.steps
    assert all(step.speculation is not None for step in steps)
