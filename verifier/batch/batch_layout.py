"""The layout of one step's flattened batch. Pure index arithmetic.

Shape legend
    B  sequences in the step            T  scheduled tokens of all of them, flattened
    K  drafts of one sequence           P  drafts of all of them, flattened
    S  rows that are scored
    R  rows that need logits: K + 1 of each sequence that is sampled, then those of the S that are
       not among them

A sequence that verifies K drafts schedules its last token and the drafts, K + 1 tokens, and needs
logits at all of them. A prefill chunk that ends the prompt needs logits at its last token only; one
that does not end it is not sampled and needs none. Rows whose logprobs are reported, for prompt
logprobs or `Score`, are scored; a row that needs logits anyway is not computed twice.

Worked example: drafts 3, 0, 2, 0, 1; scheduled tokens 4, 100, 3, 100, 2 (two prompts end):
    cu_seqlens_q            0 4 104 107 207 209
    logits_indices          0 1 2 3  103  104 105 106  206  207 208
    target_logits_indices   0 1 2  5 6  9        those of these rows that verify a draft
    bonus_logits_indices    3 4 7 8 10           those of these rows that follow the last draft
If the second sequence's last two rows are scored (offsets 98 and 99):
    logits_indices          ... 208  102         102 is appended; offset 99, 103, is there already
    scored_logits_indices   11 4                 those of these rows that are scored
If it does not end its prompt instead, 103 is missing:
    logits_indices          0 1 2 3  104 105 106  206  207 208
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTokens:
    """One sequence's share of a step: its tokens from `num_computed_tokens` on, then drafts."""

    token_ids: list[int]
    draft_token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]
    # As in `BatchLayout`.
    table_id: int = 0
    # False: a prefill chunk that does not end the prompt.
    is_sampled: bool = True
    # Offsets, among its scheduled tokens, of rows that are scored.
    scored_offsets: range = range(0)
    # How many of its last tokens attend one by one; see `batch_expansion.py`.
    num_expanded_tokens: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids) + len(self.draft_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Index arrays of one step, all int64."""

    input_token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    slot_mapping: IntArray  # [T], where each token's K/V is written
    cu_seqlens_q: IntArray  # [B + 1], query offsets
    seq_lens: IntArray  # [B], tokens attended to after this step
    block_tables: list[list[int]]  # [B], logical block -> physical block
    # [B]: while a table has the same id, it only grows. 0: nothing is known of it.
    table_ids: IntArray
    logits_indices: IntArray  # [R], hidden rows that need logits
    num_sampled_tokens: IntArray  # [B], K + 1, or 0
    target_logits_indices: IntArray  # [P]
    bonus_logits_indices: IntArray  # one for each sequence that is sampled
    draft_token_ids: IntArray  # [P]
    num_draft_tokens: IntArray  # [B]
    num_expanded_tokens: IntArray  # [B]
    scored_logits_indices: IntArray  # [S], sequence after sequence
    scored_only_indices: IntArray  # hidden rows, the last of logits_indices, that are only scored
    hidden_state_indices: IntArray  # [S] if hidden states are requested; else []

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_token_ids)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.logits_indices)


def lay_out(
    scheduled: SequenceOf[ScheduledTokens],
    *,
    block_size: int,
    wants_hidden_states: bool = False,
) -> BatchLayout:
    """Flattens the step's sequences.

    Args:
        wants_hidden_states: whether the last layer's output of the scored rows is requested.
    """
    num_scheduled = np.array([s.num_scheduled_tokens for s in scheduled], dtype=np.int64)
    num_computed = np.array([s.num_computed_tokens for s in scheduled], dtype=np.int64)
    num_drafts = np.array([len(s.draft_token_ids) for s in scheduled], dtype=np.int64)
    cu_seqlens_q = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(num_scheduled, out=cu_seqlens_q[1:])
    num_tokens = int(cu_seqlens_q[-1])

    token_ids: list[int] = []
    draft_token_ids: list[int] = []
    for sequence in scheduled:
        token_ids += sequence.token_ids
        token_ids += sequence.draft_token_ids
        draft_token_ids += sequence.draft_token_ids

    positions = np.arange(num_tokens) + np.repeat(num_computed - cu_seqlens_q[:-1], num_scheduled)

    is_sampled = np.array([s.is_sampled for s in scheduled], dtype=np.bool_)
    num_sampled = np.where(is_sampled, num_drafts + 1, 0)
    logits = _last_of_each(cu_seqlens_q[1:], num_sampled)
    bonus = np.cumsum(num_sampled)[is_sampled] - 1
    is_target = np.ones(len(logits), dtype=np.bool_)
    is_target[bonus] = False
    scored = scored_only = np.zeros(0, dtype=np.int64)
    if any(s.scored_offsets for s in scheduled):
        scored, scored_only = _scored(logits, scheduled, cu_seqlens_q)
        logits = np.concatenate((logits, scored_only))
    return BatchLayout(
        input_token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=slots_of(
            [s.block_table for s in scheduled], positions, num_scheduled, block_size
        ),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=num_computed + num_scheduled,
        block_tables=[s.block_table for s in scheduled],
        table_ids=np.array([s.table_id for s in scheduled], dtype=np.int64),
        logits_indices=logits,
        num_sampled_tokens=num_sampled,
        target_logits_indices=np.flatnonzero(is_target),
        bonus_logits_indices=bonus,
        draft_token_ids=np.array(draft_token_ids, dtype=np.int64),
        num_draft_tokens=num_drafts,
        num_expanded_tokens=np.array([s.num_expanded_tokens for s in scheduled], dtype=np.int64),
        scored_logits_indices=scored,
        scored_only_indices=scored_only,
        hidden_state_indices=scored if wants_hidden_states else scored[:0],
    )


def slots_of(
    block_tables: SequenceOf[SequenceOf[int]],
    positions: IntArray,
    num_scheduled: IntArray,
    block_size: int,
) -> IntArray:
    """KV slots of `positions` [T]: block_table[position // block_size] * block_size plus
    position % block_size.

    Each sequence's positions must be consecutive; its blocks need not be.
    """
    ends = np.cumsum(num_scheduled)
    logical = positions // block_size
    firsts, lasts = logical[ends - num_scheduled], logical[ends - 1]
    # Only the part of each table that is written to: tables may be long.
    used: list[int] = []
    for table, first, last in zip(block_tables, firsts.tolist(), lasts.tolist(), strict=True):
        used += table[first : last + 1]
    num_used = lasts - firsts + 1
    offsets = np.cumsum(num_used) - num_used - firsts
    blocks: IntArray = np.array(used, dtype=np.int64)[logical + np.repeat(offsets, num_scheduled)]
    slots: IntArray = blocks * block_size + positions % block_size
    return slots


def _scored(
    logits: IntArray, scheduled: SequenceOf[ScheduledTokens], cu_seqlens_q: IntArray
) -> tuple[IntArray, IntArray]:
    """Indices of the scored rows among the rows that need logits, after the hidden rows missing in
    `logits` are appended to it; and these hidden rows.
    """
    hidden_rows = np.concatenate(
        [
            np.arange(s.scored_offsets.start, s.scored_offsets.stop) + start
            for s, start in zip(scheduled, cu_seqlens_q[:-1], strict=True)
        ]
    )
    appended = np.setdiff1d(hidden_rows, logits)
    both = np.concatenate((logits, appended))
    place = np.zeros(int(cu_seqlens_q[-1]), dtype=np.int64)
    place[both] = np.arange(len(both))
    return place[hidden_rows], appended


def _last_of_each(ends: IntArray, counts: IntArray) -> IntArray:
    """The last counts[i] indices before ends[i], for each i, concatenated."""
    starts_in_output = np.cumsum(counts) - counts
    offsets: IntArray = np.repeat(ends - counts - starts_in_output, counts)
    return np.arange(int(counts.sum())) + offsets
