"""Samplers of torch tensors with the noise given, for code outside this repository and for tests.

`sample_ratio` is the textbook rejection sampler (Leviathan et al., "Fast inference from
transformers via speculative decoding", ICML 2023), with a point mass as the draft's distribution.
The verifier itself samples as `sample_match` does.

Shape legend as in `rejection_sampler.py`.
"""

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np

from verifier.sampling.distribution import DoubleArray
from verifier.sampling.rejection_sampler import PADDING, IntArray, accept_rows

if TYPE_CHECKING:
    import torch


def sample_greedy(
    target_logits: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    num_draft_tokens: "torch.Tensor | SequenceOf[int]",
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Accepts the drafts that are the likeliest token; the lowest id wins a tie.

    Args:
        target_logits: [R, V]. draft_token_ids: [P]. num_draft_tokens: B counts.

    Returns:
        output_token_ids [B, K_max + 1] padded with -1, num_accepted_tokens [B]; int64.
    """
    likeliest = _doubles(target_logits).argmax(axis=-1)
    return _accepted(likeliest, draft_token_ids, num_draft_tokens)


def sample_match(
    target_probs: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    num_draft_tokens: "torch.Tensor | SequenceOf[int]",
    exponential_noise: "torch.Tensor",
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Samples by argmax of probability / noise, and accepts the drafts that are sampled. Tokens of
    probability 0 are never sampled; the lowest id wins a tie.

    Args:
        target_probs, exponential_noise: [R, V]. draft_token_ids: [P]. num_draft_tokens: B counts.

    Returns:
        As `sample_greedy`.
    """
    probs = _doubles(target_probs)
    sampled = np.where(probs > 0, probs / _doubles(exponential_noise), -1.0).argmax(axis=-1)
    return _accepted(sampled, draft_token_ids, num_draft_tokens)


def sample_ratio(
    target_probs: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    num_draft_tokens: "torch.Tensor | SequenceOf[int]",
    accept_uniforms: "torch.Tensor",
    emit_uniforms: "torch.Tensor",
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Accepts a draft with its probability; on rejection samples the target without the draft.

    Args:
        target_probs: [R, V]. draft_token_ids: [P]. num_draft_tokens: B counts.
        accept_uniforms: [P]; a draft is accepted if its uniform is below its probability.
        emit_uniforms: [R], one per row, for the inverse CDF: the smallest id whose cumulative
            mass exceeds uniform * total.

    Returns:
        As `sample_greedy`.
    """
    counts, probs = _ids(num_draft_tokens), _doubles(target_probs)
    num_rows, vocab_size = probs.shape
    is_target = np.ones(num_rows, dtype=np.bool_)
    is_target[np.cumsum(counts + 1) - 1] = False
    drafts, uniforms = np.full(num_rows, PADDING, dtype=np.int64), np.ones(num_rows)
    drafts[is_target], uniforms[is_target] = _ids(draft_token_ids), _doubles(accept_uniforms)
    [known] = np.nonzero((drafts >= 0) & (drafts < vocab_size))
    is_accepted = np.zeros(num_rows, dtype=np.bool_)
    is_accepted[known] = uniforms[known] < probs[known, drafts[known]]
    others = probs.copy()
    others[known, drafts[known]] = 0.0
    cumulative = others.cumsum(axis=-1)
    exceeds = cumulative > (_doubles(emit_uniforms) * cumulative[:, -1])[:, None]
    # Rounding may put the threshold at the total itself.
    last = np.where(others > 0, np.arange(vocab_size), 0).max(axis=-1)
    emitted = np.where(exceeds.any(axis=-1), exceeds.argmax(axis=-1), last)
    sampled = np.where(is_accepted, drafts, emitted)
    return _accepted(sampled, draft_token_ids, counts)


def _accepted(
    sampled: IntArray,
    draft_token_ids: "torch.Tensor",
    num_draft_tokens: "torch.Tensor | SequenceOf[int] | IntArray",
) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    drafts, counts = _ids(draft_token_ids), _ids(num_draft_tokens)
    is_usable = np.ones(len(sampled), dtype=np.bool_)
    output, num_accepted, _ = accept_rows(sampled, drafts, counts, is_usable)
    return torch.from_numpy(output), torch.from_numpy(num_accepted)


def _doubles(tensor: "torch.Tensor") -> DoubleArray:
    doubles: DoubleArray = np.ascontiguousarray(tensor.detach().cpu().double().numpy())
    return doubles


def _ids(values: "torch.Tensor | SequenceOf[int] | IntArray") -> IntArray:
    import torch

    ids: IntArray = torch.as_tensor(values, dtype=torch.int64).cpu().numpy()
    return ids
