"""Scoring drafts without multi-query attention: one single-query row per draft and one more.

A sequence with K drafts becomes K + 1 rows of a larger batch. Row i holds the sequence and its
first i drafts, all but its last token computed, and asks one question: what follows? The rows
share one block table: row i finds the K/V of drafts[:i] there because, in every layer, the rows
before it have written theirs before any row attends. Afterwards the answers are contracted back
to the sequences they belong to. (Batch expansion, as vLLM's first scorer did it.)

Example: "a" is 7 8 9 with drafts 4 5, "b" is 3 with none.

    row  row_id  token_ids   num_computed_tokens  query
    0    b       3           0                    3      without drafts: first
    1    a/0     7 8 9       2                    9
    2    a/1     7 8 9 4     3                    4
    3    a/2     7 8 9 4 5   4                    5

    places              [[1, 2, 3], [0]]     rows of "a", rows of "b"
    contracted          [[answers[1], answers[2], answers[3]], [answers[0], padding, padding]]

Pure: knows no model and no scheduler.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from verifier.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedSequence:
    """A sequence whose tokens but the last are computed, and drafts that may follow it."""

    sequence_id: str
    token_ids: list[int]
    draft_token_ids: list[int]
    sampling: Sampling
    # Has room for the drafts.
    block_table: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedRow:
    """One row of the expanded batch: its last token is the query."""

    row_id: str
    token_ids: list[int]
    num_computed_tokens: int
    sampling: Sampling
    block_table: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedBatch:
    """The rows, and for each sequence, in its batch's order, which K_i + 1 of them are its own."""

    rows: list[ExpandedRow]
    places: list[range]


def expand(sequences: SequenceOf[DraftedSequence]) -> ExpandedBatch:
    """One row for each sequence and each of its drafts; sequences without drafts come first."""
    rows: list[ExpandedRow] = []
    places = [range(0)] * len(sequences)
    for with_drafts in (False, True):
        for index, sequence in enumerate(sequences):
            if bool(sequence.draft_token_ids) is with_drafts:
                first = len(rows)
                rows += _rows_of(sequence)
                places[index] = range(first, len(rows))
    return ExpandedBatch(rows=rows, places=places)


def contract(values: torch.Tensor, places: SequenceOf[range], *, padding: float) -> torch.Tensor:
    """What each row answered, back in order of the sequences.

    Args:
        values: [number of rows, ...], any dtype.
        places: of each sequence, which rows are its own: K_i + 1 of them.

    Returns:
        [B, K_max + 1, ...]; entry (b, j) is of the row that holds j drafts of sequence b, and
        `padding` past K_b.
    """
    width = max((len(place) for place in places), default=0)
    shape = (len(places), width, *values.shape[1:])
    contracted = torch.full(shape, padding, dtype=values.dtype, device=values.device)
    for index, place in enumerate(places):
        contracted[index, : len(place)] = values[place.start : place.stop]
    return contracted


def _rows_of(sequence: DraftedSequence) -> list[ExpandedRow]:
    num_drafts = len(sequence.draft_token_ids)
    return [
        ExpandedRow(
            row_id=f"{sequence.sequence_id}/{i}" if num_drafts else sequence.sequence_id,
            token_ids=sequence.token_ids + sequence.draft_token_ids[:i],
            num_computed_tokens=len(sequence.token_ids) + i - 1,
            sampling=sequence.sampling,
            block_table=sequence.block_table,
        )
        for i in range(num_drafts + 1)
    ]
