"""Index arithmetic against the reference's worked example and a per-token oracle."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifier.sequences import num_scheduled_tokens
from verifier.batch.batch_layout import ScheduledTokens, lay_out


def test_worked_example_of_five_sequences() -> None:
    drafts, scheduled_counts = [3, 0, 2, 0, 1], [4, 100, 3, 100, 2]
    scheduled, first_block = [], 0
    for num_drafts, num_scheduled in zip(drafts, scheduled_counts, strict=True):
        num_blocks = -(-num_scheduled // 16)
        scheduled.append(
            ScheduledTokens(
                token_ids=list(range(num_scheduled - num_drafts)),
                draft_token_ids=[7] * num_drafts,
                num_computed_tokens=0,
                block_table=list(range(first_block, first_block + num_blocks)),
            )
        )
        first_block += num_blocks
    layout = lay_out(scheduled, block_size=16)
    assert layout.cu_seqlens_q.tolist() == [0, 4, 104, 107, 207, 209]
    assert layout.logits_indices.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert layout.target_logits_indices.tolist() == [0, 1, 2, 5, 6, 9]
    assert layout.bonus_logits_indices.tolist() == [3, 4, 7, 8, 10]
    assert layout.num_sampled_tokens.tolist() == [4, 1, 3, 1, 2]
    assert layout.num_tokens == 209
    assert layout.num_rows == 11


@dataclass
class _Token:
    """One token of a step, computed naively."""

    token_id: int
    position: int
    slot: int


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScheduledTokens], int]:
    """Any mix of decodes with drafts and prefill chunks, over scattered, unshared blocks."""
    block_size = draw(st.integers(1, 7))
    shapes = draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 7)),
            min_size=1,
            max_size=6,
        )
    )
    free_blocks = list(range(sum(-(-sum(shape) // block_size) for shape in shapes) + 3))
    draw(st.randoms(use_true_random=False)).shuffle(free_blocks)
    scheduled = []
    for num_computed, num_new, num_drafts in shapes:
        num_blocks = -(-(num_computed + num_new + num_drafts) // block_size)
        tokens = draw(
            st.lists(
                st.integers(0, 2**32 - 1),
                min_size=num_new + num_drafts,
                max_size=num_new + num_drafts,
            )
        )
        scheduled.append(
            ScheduledTokens(
                token_ids=tokens[:num_new],
                draft_token_ids=tokens[num_new:],
                num_computed_tokens=num_computed,
                block_table=[free_blocks.pop() for _ in range(num_blocks)],
                is_sampled=bool(num_drafts) or draw(st.booleans()),
            )
        )
    return scheduled, block_size


def tokens_one_by_one(scheduled: list[ScheduledTokens], block_size: int) -> list[_Token]:
    tokens = []
    for sequence in scheduled:
        for i, token_id in enumerate(sequence.token_ids + sequence.draft_token_ids):
            position = sequence.num_computed_tokens + i
            block = sequence.block_table[position // block_size]
            slot = block * block_size + position % block_size
            tokens.append(_Token(token_id=token_id, position=position, slot=slot))
    return tokens


def rows_one_by_one(scheduled: list[ScheduledTokens]) -> tuple[list[int], list[int], list[int]]:
    """`logits_indices`, `target_logits_indices`, `bonus_logits_indices`."""
    logits: list[int] = []
    target: list[int] = []
    bonus: list[int] = []
    start = 0
    for sequence in scheduled:
        end = start + num_scheduled_tokens(sequence)
        num_drafts = len(sequence.draft_token_ids) if sequence.is_sampled else -1
        for i, hidden_row in enumerate(range(end - num_drafts - 1, end)):
            (bonus if i == num_drafts else target).append(len(logits))
            logits.append(hidden_row)
        start = end
    return logits, target, bonus


@given(step=steps())
def test_equals_the_oracle_token_by_token(step: tuple[list[ScheduledTokens], int]) -> None:
    scheduled, block_size = step
    layout = lay_out(scheduled, block_size=block_size)
    tokens = tokens_one_by_one(scheduled, block_size)
    assert layout.num_tokens == len(tokens)
    assert layout.input_token_ids.tolist() == [t.token_id for t in tokens]
    assert layout.positions.tolist() == [t.position for t in tokens]
    assert layout.slot_mapping.tolist() == [t.slot for t in tokens]
    assert layout.seq_lens.tolist() == [
        s.num_computed_tokens + num_scheduled_tokens(s) for s in scheduled
    ]
    assert layout.block_tables == [s.block_table for s in scheduled]

    logits, target, bonus = rows_one_by_one(scheduled)
    assert layout.num_rows == len(logits)
    assert layout.logits_indices.tolist() == logits
    assert layout.target_logits_indices.tolist() == target
    assert layout.bonus_logits_indices.tolist() == bonus
    assert layout.draft_token_ids.tolist() == [d for s in scheduled for d in s.draft_token_ids]
    assert layout.num_draft_tokens.tolist() == [len(s.draft_token_ids) for s in scheduled]
    assert layout.num_sampled_tokens.tolist() == [
        len(s.draft_token_ids) + 1 if s.is_sampled else 0 for s in scheduled
    ]


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_table_that_ends_before_its_tokens_is_refused(num_blocks: int) -> None:
    """Its slots would be another sequence's."""
    short = ScheduledTokens(
        token_ids=[1, 2],
        draft_token_ids=[3],
        num_computed_tokens=14,
        block_table=[0, 1][:num_blocks],
    )
    with pytest.raises(ValueError, match="shorter than its sequence"):
        lay_out([short, short._replace(block_table=[2, 3])], block_size=16)


@given(step=steps(), draws=st.data())
def test_scored_rows_are_appended_once_and_change_no_other_index(
    step: tuple[list[ScheduledTokens], int], draws: st.DataObject
) -> None:
    scheduled, block_size = step
    plain = lay_out(scheduled, block_size=block_size)
    scored = []
    for each in scheduled:
        start = draws.draw(st.integers(0, num_scheduled_tokens(each)))
        stop = draws.draw(st.integers(start, num_scheduled_tokens(each)))
        scored.append(each._replace(scored_offsets=range(start, stop)))
    layout = lay_out(scored, block_size=block_size)
    first_tokens = layout.cu_seqlens_q.tolist()
    expected = [
        first_tokens[i] + offset for i, each in enumerate(scored) for offset in each.scored_offsets
    ]
    rows = layout.logits_indices.tolist()
    assert [rows[index] for index in layout.scored_logits_indices] == expected
    assert rows[: plain.num_rows] == plain.logits_indices.tolist()
    assert sorted(rows[plain.num_rows :]) == sorted(set(expected) - set(rows[: plain.num_rows]))
    assert layout.bonus_logits_indices.tolist() == plain.bonus_logits_indices.tolist()
    assert layout.target_logits_indices.tolist() == plain.target_logits_indices.tolist()
