"""Expansion of a step's layout against brute force."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifier.sequences import num_scheduled_tokens
from tests.verifier.test_batch_layout import steps
from verifier.batch.batch_expansion import expand
from verifier.batch.batch_layout import BatchLayout, BlockTable, ScheduledTokens, lay_out

Step = tuple[list[ScheduledTokens], int]


def laid_out(scheduled: list[ScheduledTokens], block_size: int = 16) -> BatchLayout:
    return lay_out(scheduled, block_size=block_size)


def test_worked_example() -> None:
    a, b = [3, 1], [2]
    layout = laid_out(
        [
            ScheduledTokens(
                token_ids=[9],
                draft_token_ids=[4, 5],
                num_computed_tokens=2,
                block_table=a,
                num_expanded_tokens=2,
            ),
            ScheduledTokens(
                token_ids=[3], draft_token_ids=[], num_computed_tokens=0, block_table=b
            ),
        ]
    )
    assert (layout.cu_seqlens_q.tolist(), layout.seq_lens.tolist()) == ([0, 3, 4], [5, 1])
    expanded = expand(layout)
    assert expanded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert expanded.seq_lens.tolist() == [3, 4, 5, 1]
    assert expanded.block_tables == [a, a, a, b]


@st.composite
def expanded_steps(draw: st.DrawFn) -> Step:
    scheduled, block_size = draw(steps())
    return [
        each._replace(num_expanded_tokens=draw(st.integers(0, num_scheduled_tokens(each))))
        for each in scheduled
    ], block_size


def visible_tokens(layout: BatchLayout) -> list[tuple[int, BlockTable]]:
    """For each token: how many tokens it attends to, and through which block table."""
    seen = []
    for i, table in enumerate(layout.block_tables):
        num_queries = int(layout.cu_seqlens_q[i + 1] - layout.cu_seqlens_q[i])
        # The causal mask is aligned to the end.
        seen += [(int(layout.seq_lens[i]) - num_queries + j + 1, table) for j in range(num_queries)]
    return seen


@given(step=expanded_steps())
def test_every_token_attends_as_before_and_expanded_ones_are_single_queries(step: Step) -> None:
    scheduled, block_size = step
    layout = laid_out(scheduled, block_size)
    expanded = expand(layout)
    assert visible_tokens(expanded) == visible_tokens(layout)
    counts: list[int] = []
    for each in scheduled:
        num_together = num_scheduled_tokens(each) - each.num_expanded_tokens
        counts += [num_together] * (num_together > 0) + [1] * each.num_expanded_tokens
    assert np.diff(expanded.cu_seqlens_q).tolist() == counts


@given(step=expanded_steps())
def test_all_other_arrays_are_unchanged(step: Step) -> None:
    layout = laid_out(*step)
    expanded = expand(layout)
    for field in dataclasses.fields(layout):
        if field.name not in ("cu_seqlens_q", "seq_lens", "block_tables", "table_ids"):
            assert getattr(expanded, field.name) is getattr(layout, field.name)
    for name in ("cu_seqlens_q", "seq_lens", "table_ids"):
        assert getattr(expanded, name).dtype == np.int64


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_step_with_nothing_to_expand_is_unchanged(num_drafts: int) -> None:
    layout = laid_out(
        [
            ScheduledTokens(
                token_ids=[1],
                draft_token_ids=[2] * num_drafts,
                num_computed_tokens=4,
                block_table=[0],
            )
        ]
    )
    assert expand(layout) is layout
