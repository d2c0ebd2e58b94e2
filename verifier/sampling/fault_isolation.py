"""Isolates faults in verification: if verifying a batch raises, its sequences are verified singly.

The sequence that causes the exception (by unforeseen parameters, say) is found, and the others get
the tokens that they would have got. The second pass is slow, and not expected to happen.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from verifier.sampling.acceptance_rules import PADDING, BoolArray
from verifier.sampling.rejection_sampler import AcceptanceRule, JudgedSequence, Verdict, verify

IntArray = npt.NDArray[np.int64]


def verify_isolating_faults(
    logits: torch.Tensor,
    sequences: SequenceOf[JudgedSequence],
    *,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray | None,
    rule: AcceptanceRule,
    fail: Callable[[int, Exception], None],
) -> Verdict:
    """As `verify`.

    Args:
        fail: called with the index of each sequence that cannot be verified; its part of the
            verdict has no meaning.
    """
    try:
        return verify(
            logits,
            sequences,
            draft_token_ids=draft_token_ids,
            num_draft_tokens=num_draft_tokens,
            is_usable=is_usable,
            rule=rule,
        )
    except Exception:
        return _verify_singly(
            logits, sequences, draft_token_ids, num_draft_tokens, is_usable, rule, fail
        )


def _verify_singly(
    logits: torch.Tensor,
    sequences: SequenceOf[JudgedSequence],
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray | None,
    rule: AcceptanceRule,
    fail: Callable[[int, Exception], None],
) -> Verdict:
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
