"""Verdicts sequence by sequence, for a step whose batch could not be judged as a whole.

So one sequence's fault (parameters that the sampler stumbles over, say) is found, and the others
get what they would have got. Slow, and not meant to happen.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from verifier.sampling.rejection_sampler import (
    PADDING,
    AcceptanceRule,
    BoolArray,
    JudgedSequence,
    Verdict,
    verify,
)

IntArray = npt.NDArray[np.int64]


def verify_separately(
    logits: torch.Tensor,
    sequences: SequenceOf[JudgedSequence],
    *,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray | None,
    rule: AcceptanceRule,
    fail: Callable[[int, Exception], None],
) -> Verdict:
    """What `verify` says; `fail` is told of each sequence, by its index, for which it fails. Their
    part of the verdict says nothing.
    """
    num_sequences = len(sequences)
    width = int(num_draft_tokens.max(initial=0)) + 1
    output_token_ids = np.full((num_sequences, width), PADDING, dtype=np.int64)
    num_accepted_tokens = np.zeros(num_sequences, dtype=np.int64)
    is_finite = np.zeros(num_sequences, dtype=np.bool_)
    logprobs = {}
    first_row = first_draft = 0
    for i, sequence in enumerate(sequences):
        num_drafts = int(num_draft_tokens[i])
        end_row, end_draft = first_row + num_drafts + 1, first_draft + num_drafts
        try:
            verdict = verify(
                logits[first_row:end_row],
                [sequence],
                draft_token_ids=draft_token_ids[first_draft:end_draft],
                num_draft_tokens=num_draft_tokens[i : i + 1],
                is_usable=None if is_usable is None else is_usable[first_row:end_row],
                rule=rule,
            )
        except Exception as error:
            fail(i, error)
        else:
            [token_ids] = verdict.output_token_ids
            output_token_ids[i, : len(token_ids)] = token_ids
            num_accepted_tokens[i] = verdict.num_accepted_tokens[0]
            is_finite[i] = verdict.is_finite[0]
            if 0 in verdict.logprobs:
                logprobs[i] = verdict.logprobs[0]
        first_row, first_draft = end_row, end_draft
    return Verdict(
        output_token_ids=output_token_ids,
        num_accepted_tokens=num_accepted_tokens,
        is_finite=is_finite,
        logprobs=logprobs,
    )
