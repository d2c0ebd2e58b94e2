"""The trace of one step of one sequence: its values, and their places in the step's arrays.

`docs/data_flow.md` walks through an example; `sampling.proto` documents the fields.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from verifier.batch.batch_layout import BatchLayout
from verifier.drafts.draft_buffer import Hint


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    step_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    input_token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    logits_indices: list[int]
    draft_token_ids: list[int]
    num_accepted_tokens: int
    output_token_ids: list[int]
    context_length_after: int
    proposals: list[Hint]


def trace_of(
    entry: int,
    layout: BatchLayout,
    *,
    step_id: int,
    known_token_ids: SequenceOf[int],
    num_accepted_tokens: int,
    proposals: list[Hint],
) -> StepTrace:
    """The trace of a sequence that a step has moved forward.

    Args:
        entry: the sequence's index in the batch.
        known_token_ids: its tokens after the step.
        num_accepted_tokens: of the verdict; capped at the output, which a stop token may cut.
        proposals: those since its last step.
    """
    start, end = layout.cu_seqlens_q[entry : entry + 2].tolist()
    num_draft_tokens = int(layout.num_draft_tokens[entry])
    is_sampled = bool(layout.num_sampled_tokens[entry])
    length_before = int(layout.seq_lens[entry]) - num_draft_tokens
    output_token_ids = list(known_token_ids[length_before:]) if is_sampled else []
    rows = layout.logits_indices
    rows = np.sort(rows[(rows >= start) & (rows < end)])
    input_token_ids = layout.input_token_ids[start:end].tolist()
    positions = layout.positions[start:end].tolist()
    return StepTrace(
        step_id=step_id,
        num_computed_tokens=positions[0],
        num_scheduled_tokens=end - start,
        input_token_ids=input_token_ids,
        positions=positions,
        slot_mapping=layout.slot_mapping[start:end].tolist(),
        logits_indices=(rows - start).tolist(),
        draft_token_ids=input_token_ids[end - start - num_draft_tokens :],
        num_accepted_tokens=min(num_accepted_tokens, len(output_token_ids)),
        output_token_ids=output_token_ids,
        context_length_after=len(known_token_ids),
        proposals=proposals,
    )
