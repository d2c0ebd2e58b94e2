"""The scheduler alone: budget, order, room for drafts, and that every sequence finishes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.values import DraftWait
from tests.verifier.sequences import make_sequence
from tests.volume import examples
from verifier.drafts.draft_buffer import HintOutcome
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.scheduler import ScheduledSequence, Scheduler
from verifier.scheduling.sequence import Sequence


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
) -> Scheduler:
    return Scheduler(
        block_pool=BlockPool(num_blocks),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def commit(scheduler: Scheduler, item: ScheduledSequence, num_accepted: int = 0) -> None:
    """As if the model had accepted that many drafts and sampled one more token."""
    sequence = item.sequence
    sequence.num_computed_tokens += item.num_new_tokens
    if not item.is_sampled:
        return
    sequence.num_computed_tokens += num_accepted
    sequence.token_ids += [*item.draft_token_ids[:num_accepted], 99]
    sequence.draft_buffer.advance(sequence.token_ids)
    if sequence.remaining == 0:
        scheduler.finish(sequence)


def give_hint(sequence: Sequence, num_tokens: int) -> None:
    known = sequence.token_ids
    sequence.draft_buffer.offer(len(known), [50] * num_tokens, 2, known)


def decoding(scheduler: Scheduler, num_sequences: int, **fields: Any) -> list[Sequence]:
    """Sequences whose prompts are computed except for the last token."""
    sequences = []
    for _ in range(num_sequences):
        sequence = make_sequence(4, **fields)
        scheduler.add(sequence)
        sequences.append(sequence)
    scheduler.admit()
    for sequence in sequences:
        scheduler.block_pool.extend(sequence.block_table, scheduler.num_blocks_for(4))
        sequence.num_computed_tokens = 3
    return sequences


def test_prompts_are_cut_into_chunks_that_fit_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    sequence = make_sequence(23)
    scheduler.add(sequence)
    scheduler.admit()
    chunks = []
    for _ in range(3):
        [item] = scheduler.schedule()
        chunks.append((item.num_new_tokens, item.is_sampled))
        commit(scheduler, item)
    assert chunks == [(10, False), (10, False), (3, True)]
    assert len(sequence.token_ids) == 24


def test_decodes_come_before_prompts_and_prompts_get_the_rest() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    prompt = make_sequence(30)
    scheduler.add(prompt)
    decodes = decoding(scheduler, 3)
    scheduled = scheduler.schedule()
    assert [item.sequence for item in scheduled] == [*decodes, prompt]
    assert [item.num_new_tokens for item in scheduled] == [1, 1, 1, 7]
    assert [item.is_sampled for item in scheduled] == [True, True, True, False]


def prompts(scheduler: Scheduler, *lengths: int, **fields: Any) -> list[Sequence]:
    """Admitted prompts of so many tokens, which have no beginning in common."""
    first = len(scheduler.running)
    sequences = [
        make_sequence(token_ids=[first + i] * length, **fields) for i, length in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit()
    return sequences


def chunks(scheduled: list[ScheduledSequence], sequences: list[Sequence]) -> list[int]:
    """The tokens of each sequence in this step."""
    by_id = {item.sequence.sequence_id: item.num_new_tokens for item in scheduled}
    return [by_id.get(sequence.sequence_id, 0) for sequence in sequences]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # One that ends in this step overtakes; several do, those of the fewest tokens first.
        ([100, 100, 5], [15, 0, 5]),
        ([100, 100, 5, 4, 3], [13, 0, 0, 4, 3]),
        ([100, 7, 6, 100, 2], [12, 0, 6, 0, 2]),
        # They get half of the budget at most; equal ones keep their order.
        ([100, 100, 10, 10], [10, 0, 10, 0]),
        ([100, 6, 6, 6], [14, 6, 0, 0]),
        # Others are computed one after the other, and no budget is left over.
        ([100, 11, 100], [20, 0, 0]),
        ([5, 100, 100, 3], [5, 12, 0, 3]),
        ([5, 12, 100], [5, 12, 3]),
        ([3, 8, 7, 4], [3, 8, 5, 4]),
    ],
)
def test_prompts_that_end_in_this_step_overtake_longer_ones(
    lengths: list[int], expected: list[int]
) -> None:
    scheduler = make_scheduler(num_blocks=400, max_num_batched_tokens=20)
    sequences = prompts(scheduler, *lengths)
    assert chunks(scheduler.schedule(), sequences) == expected


@pytest.mark.parametrize(("num_taken", "expected"), [(58, [8, 16, 0]), (57, [8, 12, 8])])
def test_prompts_overtake_by_the_blocks_that_a_higher_priority_leaves(
    num_taken: int, expected: list[int]
) -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=32)
    low = prompts(scheduler, 64, 8)
    high = prompts(scheduler, 8, priority=1)
    # They need 2 blocks, 3 for one half of 24 tokens, and 2.
    scheduler.block_pool.extend([], num_taken)
    assert chunks(scheduler.schedule(), [*high, *low]) == expected


@pytest.mark.parametrize(("num_rows", "expected"), [(2, [4, 16, 0]), (1, [4, 11, 5])])
def test_prompts_overtake_by_the_rows_that_a_higher_priority_leaves(
    num_rows: int, expected: list[int]
) -> None:
    scheduler = make_scheduler(num_blocks=400, max_num_batched_tokens=20)
    scheduler._max_scored_rows = 4
    low = [*prompts(scheduler, 100), *prompts(scheduler, 5, rows_to_score=range(num_rows))]
    high = prompts(scheduler, 4, rows_to_score=range(3), priority=1)
    assert chunks(scheduler.schedule(), [*high, *low]) == expected


def test_a_short_prompt_waits_for_the_first_one_until_that_has_computed_its_beginning() -> None:
    scheduler = make_scheduler(num_blocks=400, max_num_batched_tokens=16)
    text = list(range(100, 190))
    # It has 20 tokens in common with the first, more than that computes in a step.
    long, short = make_sequence(token_ids=text), make_sequence(token_ids=[*text[:20], 1, 2])
    scheduler.add(long)
    assert scheduler.admit() == [long]
    scheduler.schedule()
    long.num_computed_tokens = 16
    scheduler.add(short)
    assert scheduler.admit() == [], "one more block is to come"
    scheduler.schedule()
    assert scheduler.admit() == []
    long.num_computed_tokens = 32
    assert scheduler.admit() == [short]
    assert short.num_computed_tokens == 20


def test_those_behind_one_that_waits_for_a_common_beginning_are_admitted() -> None:
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=6, max_num_batched_tokens=16)
    text = list(range(100, 190))
    first, *copies = (make_sequence(token_ids=[*text, i]) for i in range(4))
    for sequence in (first, *copies[:2]):
        scheduler.add(sequence)
    assert scheduler.admit() == [first]
    others = [make_sequence(token_ids=[i] * length) for i, length in enumerate((4, 60, 4))]
    for sequence in (*others[:2], copies[2], others[2]):
        scheduler.add(sequence)
    assert scheduler.admit() == others[:2]
    # Six places: one for each copy, too.
    assert scheduler.waiting == [*copies, others[2]]
    assert chunks(scheduler.schedule(), [first, *others]) == [12, 4, 0, 0]
    scheduler.finish(others[0])
    assert scheduler.admit() == [others[2]]
    scheduler.block_pool.extend(first.block_table, scheduler.num_blocks_for(91))
    first.num_computed_tokens = 90
    assert scheduler.admit() == copies
    assert [copy.num_computed_tokens for copy in copies] == [88] * 3
    assert scheduler.running == [first, *copies[:2], others[1], copies[2], others[2]]


@pytest.mark.parametrize(("num_blocks", "passes"), [(36, True), (35, False)])
def test_one_that_waits_for_a_common_beginning_keeps_its_blocks(
    num_blocks: int, passes: bool
) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_batched_tokens=32)
    text = list(range(100, 188))
    first, copy = (make_sequence(token_ids=text) for _ in range(2))
    behind = make_sequence(19)
    for sequence in (first, copy, behind):
        scheduler.add(sequence)
    # 23 blocks, 8 for the next chunk of the copy, 5.
    assert scheduler.admit() == [first, *([behind] if passes else [])]


@settings(max_examples=examples(200))
@given(
    lengths=st.lists(st.tuples(st.integers(2, 40), st.integers(0, 1)), min_size=1, max_size=8),
    num_decodes=st.integers(0, 4),
    budget=st.integers(12, 40),
)
def test_one_half_of_the_budget_goes_in_order_and_the_other_to_prompts_that_end(
    lengths: list[tuple[int, int]], num_decodes: int, budget: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=400, max_num_seqs=12, max_num_batched_tokens=num_decodes + budget
    )
    decoding(scheduler, num_decodes)
    for length, priority in lengths:
        prompts(scheduler, length, priority=priority)
    waiting = [sequence for sequence in scheduler.running if sequence.is_prefilling]
    step = scheduler.schedule()
    got = chunks(step, waiting)
    missing = [len(sequence.token_ids) for sequence in waiting]
    assert sum(got) == min(budget, sum(missing))
    assert got[0] >= min(missing[0], -(-budget // 2))
    overtaking = [
        i for i in range(len(got)) if got[i] and any(got[j] < missing[j] for j in range(i))
    ]
    assert sum(got[i] for i in overtaking) <= budget // 2
    for i in overtaking:
        assert got[i] == missing[i]
        equals = [j for j in range(len(got)) if waiting[j].priority == waiting[i].priority]
        assert all(got[j] == missing[j] for j in range(equals[0])), "it overtook a higher one"
        for j in equals[1:]:
            if (missing[j], j) < (missing[i], i):
                assert got[j] == missing[j], "one with fewer tokens was left behind"


def test_long_prompts_are_looked_up_in_several_steps_as_they_take_long() -> None:
    scheduler = make_scheduler(num_blocks=4000, max_num_seqs=16)
    text = list(range(8000))
    first, *copies = (make_sequence(token_ids=text) for _ in range(9))
    scheduler.add(first)
    scheduler.admit()
    scheduler.block_pool.extend(first.block_table, 2000)
    first.num_computed_tokens = 7999
    for sequence in copies:
        scheduler.add(sequence)
    # They have 2,000 blocks each.
    assert scheduler.admit() == copies[:5]
    assert scheduler.admit() == copies[5:]
    assert [copy.num_computed_tokens for copy in copies] == [7996] * 8


def test_ids_of_block_tables_stay_int32_and_are_never_zero() -> None:
    """As which they travel; 0 is that of a table of which nothing is known."""
    scheduler = make_scheduler()
    scheduler._running._last_table_id = 2**31 - 2
    for sequence in [make_sequence(4) for _ in range(2)]:
        scheduler.add(sequence)
    assert [sequence.table_id for sequence in scheduler.admit()] == [2**31 - 1, 1]


@pytest.mark.parametrize(
    ("budget", "num_hinted", "expected"),
    [
        (10, [31], [10]),
        (6, [4, 4, 4, 4], [2, 2, 1, 1]),
        (12, [1, 31, 31], [1, 6, 5]),
        (0, [31, 31], [0, 0]),
    ],
)
def test_sequences_share_the_budget_that_decodes_leave(
    budget: int, num_hinted: list[int], expected: list[int]
) -> None:
    count = len(num_hinted)
    scheduler = make_scheduler(max_num_batched_tokens=count + budget, max_num_seqs=count)
    sequences = decoding(scheduler, count, num_output_tokens=60, num_speculative_tokens=31)
    for sequence, num_tokens in zip(sequences, num_hinted, strict=True):
        give_hint(sequence, num_tokens)
    scheduled = scheduler.schedule()
    assert [len(item.draft_token_ids) for item in scheduled] == expected


def test_drafts_leave_prompts_at_least_half() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    sequences = decoding(scheduler, 2, num_output_tokens=30)
    prompt = make_sequence(30)
    scheduler.add(prompt)
    scheduler.admit()
    for sequence in sequences:
        give_hint(sequence, 7)
    scheduled = scheduler.schedule()
    assert [len(item.draft_token_ids) for item in scheduled] == [2, 2, 0]
    assert scheduled[-1].sequence is prompt
    assert scheduled[-1].num_new_tokens == 4


def test_drafts_leave_prompts_at_least_half_of_the_free_blocks() -> None:
    # The decodes hold 3 and the prompt gets 1; all drafts would take 6 of the other 9.
    scheduler = make_scheduler(num_blocks=13, max_num_batched_tokens=64)
    sequences = decoding(scheduler, 3, num_output_tokens=30)
    prompt = make_sequence(25)
    scheduler.add(prompt)
    scheduler.admit()
    for sequence in sequences:
        give_hint(sequence, 7)
    scheduled = scheduler.schedule()
    assert scheduled[-1].sequence is prompt
    assert scheduled[-1].num_new_tokens == 4 * (1 + 5)


def test_a_draft_is_counted_when_it_is_scheduled_and_not_before() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2, max_num_seqs=2)
    first, second = decoding(scheduler, 2, num_output_tokens=30)
    give_hint(first, 4)
    assert [len(item.draft_token_ids) for item in scheduler.schedule()] == [0, 0]
    assert scheduler.counts.hints[HintOutcome.USED] == 0, "there was no budget for it"
    scheduler.finish(second)
    assert [len(item.draft_token_ids) for item in scheduler.schedule()] == [1]
    assert scheduler.counts.hints[HintOutcome.USED] == 1


def test_a_sequence_that_must_await_a_draft_is_left_out_of_steps() -> None:
    scheduler = make_scheduler()
    awaiting, other = decoding(scheduler, 2)
    awaiting.draft_wait = DraftWait.ALWAYS
    give_hint(awaiting, 4)
    awaiting.token_ids.append(50)
    awaiting.num_computed_tokens += 1
    awaiting.draft_buffer.advance(awaiting.token_ids)
    awaiting.num_wanted_draft_tokens = 28
    assert awaiting.draft_buffer, "there is a draft, but for the length before"
    assert [item.sequence for item in scheduler.schedule()] == [other]
    awaiting.draft_buffer.offer(len(awaiting.token_ids), [], 0, awaiting.token_ids)
    assert [item.sequence for item in scheduler.schedule()] == [awaiting, other]
