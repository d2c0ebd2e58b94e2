"""The trace of one step of one sequence: its values, and their places in the step's arrays.

`docs/data_flow.md` walks through an example; `sampling.proto` documents the fields.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from tandem.values import ProposalTrace, StepTrace
from verifier.batch.batch_layout import BatchLayout


def trace_of(
    entry: int,
    layout: BatchLayout,
    *,
    step_id: int,
    known_token_ids: SequenceOf[int],
    num_accepted_tokens: int,
    proposals: tuple[ProposalTrace, ...],
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
        input_token_ids=tuple(input_token_ids),
        positions=tuple(positions),
        slot_mapping=tuple(layout.slot_mapping[start:end].tolist()),
        logits_indices=tuple((rows - start).tolist()),
        draft_token_ids=tuple(input_token_ids[end - start - num_draft_tokens :]),
        num_accepted_tokens=min(num_accepted_tokens, len(output_token_ids)),
        output_token_ids=tuple(output_token_ids),
        context_length_after=len(known_token_ids),
        proposals=proposals,
    )
