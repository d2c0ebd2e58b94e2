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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel

IntArray = npt.NDArray[np.int64]

# Physical blocks, in the order of a sequence's tokens. The engine's are of type array("i"): numpy
# copies such a table at once, but a list number by number, and tables may be long.
BlockTable = SequenceOf[int]

# How many numbers of each sequence `_fill` reads.
_NUM_NUMBERS = 7


class StateUse(NamedTuple):
    """A sequence's place among recurrent states, if the model has them: states after its last
    certain token, and the last step's drafts. Which of those were accepted follows from the
    positions.

    Attributes:
        slot: its own.
        source: the slot from which its states are taken first, after exactly the tokens computed
            before; -1: its own, or at its beginning none.
        saves: numbers of its first tokens after which the states are copied, rising, each with the
            slot that they are copied to.
    """

    slot: int
    source: int = -1
    saves: tuple[tuple[int, int], ...] = ()


class ScheduledTokens(NamedTuple):
    """One sequence's share of a step: its tokens from `num_computed_tokens` on, then drafts. One is
    made per sequence and step.
    """

    token_ids: list[int]
    draft_token_ids: list[int]
    num_computed_tokens: int
    block_table: BlockTable
    # As in `BatchLayout`.
    table_id: int = 0
    # False: a prefill chunk that does not end the prompt, or a sequence that is only scored.
    is_sampled: bool = True
    # Offsets, among its scheduled tokens, of rows that are scored.
    scored_offsets: range = range(0)
    # Whether its rotary embedding is that of long sequences, if the model has one.
    uses_long_rope: bool = False
    # None: the model has no recurrent states.
    state: StateUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """One step as index arrays, all int64."""

    input_token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    uses_long_rope: IntArray  # [T], 1 or 0, as in `ScheduledTokens`
    slot_mapping: IntArray  # [T], where each token's K/V is written
    cu_seqlens_q: IntArray  # [B + 1], query offsets
    seq_lens: IntArray  # [B], tokens attended to after this step
    block_tables: SequenceOf[BlockTable]  # [B]
    # [B]: while a table has the same id, it only grows. 0: nothing is known of it.
    table_ids: IntArray
    logits_indices: IntArray  # [R], hidden rows that need logits
    num_sampled_tokens: IntArray  # [B], K + 1, or 0
    target_logits_indices: IntArray  # [P]
    bonus_logits_indices: IntArray  # one for each sequence that is sampled
    draft_token_ids: IntArray  # [P]
    num_draft_tokens: IntArray  # [B]
    scored_logits_indices: IntArray  # [S], sequence after sequence
    scored_only_indices: IntArray  # hidden rows, the last of logits_indices, that are only scored
    wants_hidden_states: bool  # whether hidden states of the scored rows are requested
    states: SequenceOf[StateUse | None] = ()  # [B]; empty: the model has no recurrent states

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

    Raises:
        ValueError: a block table is shorter than its sequence.
    """
    numbers: list[int] = []
    token_ids: list[int] = []
    written_blocks: list[int] = []
    num_drafts = num_rows = num_sampled = num_written_blocks = 0
    for own, drafts, num_computed, block_table, table_id, is_sampled, _, is_long, _ in scheduled:
        count = len(own) + len(drafts)
        # Only the part of the table that is written to: tables may be long.
        first = num_computed // block_size
        end = (num_computed + count - 1) // block_size + 1
        numbers += (count, len(drafts), num_computed, is_sampled, table_id, end - first, is_long)
        token_ids += own
        token_ids += drafts
        written_blocks += block_table[first:end]
        num_written_blocks += end - first
        num_drafts += len(drafts)
        if is_sampled:
            num_sampled += 1
            num_rows += len(drafts) + 1
    if len(written_blocks) != num_written_blocks:
        raise ValueError("a block table is shorter than its sequence")
    num_sequences, num_tokens = len(scheduled), len(token_ids)
    # All in one conversion, and all arrays in one piece of memory.
    values = np.array(numbers + token_ids + written_blocks, dtype=np.int64)
    each, tokens = values[: len(numbers)], values[len(numbers) : len(numbers) + num_tokens]
    sizes = (
        num_tokens, num_tokens, num_tokens, num_sequences + 1, num_sequences, num_sequences,
        num_rows, num_sequences, num_rows - num_sampled, num_sampled, num_drafts, num_sequences,
    )  # fmt: skip
    (
        positions, uses_long_rope, slots, cu_seqlens_q, seq_lens, table_ids, logits,
        num_sampled_tokens, targets, bonus, draft_token_ids, num_draft_tokens,
    ) = arrays = _parts(np.empty(sum(sizes), dtype=np.int64), sizes)  # fmt: skip
    _fill(
        each.reshape(num_sequences, _NUM_NUMBERS), tokens, values[len(numbers) + num_tokens :],
        block_size, *arrays,
    )  # fmt: skip
    scored = scored_only = np.zeros(0, dtype=np.int64)
    if any(s.scored_offsets for s in scheduled):
        scored, scored_only = _scored(logits, scheduled, cu_seqlens_q)
        logits = np.concatenate((logits, scored_only))
    return BatchLayout(
        input_token_ids=tokens,
        positions=positions,
        uses_long_rope=uses_long_rope,
        slot_mapping=slots,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_tables=[s.block_table for s in scheduled],
        table_ids=table_ids,
        logits_indices=logits,
        num_sampled_tokens=num_sampled_tokens,
        target_logits_indices=targets,
        bonus_logits_indices=bonus,
        draft_token_ids=draft_token_ids,
        num_draft_tokens=num_draft_tokens,
        scored_logits_indices=scored,
        scored_only_indices=scored_only,
        wants_hidden_states=wants_hidden_states,
        states=[s.state for s in scheduled] if scheduled and scheduled[0].state else (),
    )


def _parts(whole: IntArray, sizes: SequenceOf[int]) -> list[IntArray]:
    """Arrays of these sizes, one behind the other."""
    parts, start = [], 0
    for size in sizes:
        parts.append(whole[start : start + size])
        start += size
    return parts


@kernel
def _fill(
    numbers: IntArray,
    token_ids: IntArray,
    written_blocks: IntArray,
    block_size: int,
    positions: IntArray,
    uses_long_rope: IntArray,
    slots: IntArray,
    cu_seqlens_q: IntArray,
    seq_lens: IntArray,
    table_ids: IntArray,
    logits_indices: IntArray,
    num_sampled_tokens: IntArray,
    target_logits_indices: IntArray,
    bonus_logits_indices: IntArray,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
) -> None:
    """Fills the arrays of `BatchLayout`, but for rows that are only scored.

    Args:
        numbers: [B, 7]: tokens and drafts, drafts, tokens computed before, whether it is sampled,
            table id, blocks written to, whether its rotary embedding is the long one.
        token_ids: [T].
        written_blocks: sequence after sequence.
    """
    token = block = row = target = bonus = draft = 0
    cu_seqlens_q[0] = 0
    for i in range(len(numbers)):
        count, num_drafts, num_computed = numbers[i, 0], numbers[i, 1], numbers[i, 2]
        end, first_block = token + count, num_computed // block_size
        for position in range(num_computed, num_computed + count):
            positions[token] = position
            uses_long_rope[token] = numbers[i, 6]
            place = written_blocks[block + position // block_size - first_block]
            slots[token] = place * block_size + position % block_size
            token += 1
        block += numbers[i, 5]
        cu_seqlens_q[i + 1] = end
        seq_lens[i] = num_computed + count
        num_sampled_tokens[i] = 0
        if numbers[i, 3]:
            num_sampled_tokens[i] = num_drafts + 1
            for j in range(num_drafts + 1):
                logits_indices[row] = end - num_drafts - 1 + j
                if j < num_drafts:
                    target_logits_indices[target] = row
                    target += 1
                row += 1
            bonus_logits_indices[bonus] = row - 1
            bonus += 1
        for j in range(num_drafts):
            draft_token_ids[draft] = token_ids[end - num_drafts + j]
            draft += 1
        num_draft_tokens[i] = num_drafts
        table_ids[i] = numbers[i, 4]


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
