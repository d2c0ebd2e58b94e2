"""The rules of acceptance as functions of given noise, and `accept`, which both rules share.

`sample_greedy`, `sample_match` and `sample_ratio` verify one batch; the sampler itself uses the
functions of rows below them.

Shape legend as in `rejection_sampler.py`.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Ends the rows of `output_token_ids`; also marks a row without a draft.
PADDING = -1


def sample_greedy(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor | SequenceOf[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts the drafts that are the likeliest token; the lowest id wins a tie.

    Args:
        target_logits: [R, V]. draft_token_ids: [P]. num_draft_tokens: B counts.

    Returns:
        output_token_ids [B, K_max + 1] padded with -1, num_accepted_tokens [B]; int64.
    """
    return _accepted(target_logits.argmax(dim=-1), draft_token_ids, num_draft_tokens)


def sample_match(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor | SequenceOf[int],
    exponential_noise: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rule `match` with the noise given.

    Args:
        target_probs, exponential_noise: [R, V]. draft_token_ids: [P]. num_draft_tokens: B counts.

    Returns:
        As `sample_greedy`.
    """
    sampled = race(target_probs, exponential_noise)
    return _accepted(sampled, draft_token_ids, num_draft_tokens)


def sample_ratio(
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor | SequenceOf[int],
    accept_uniforms: torch.Tensor,
    emit_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rule `ratio` with the uniforms given.

    Args:
        target_probs: [R, V]. draft_token_ids: [P]. num_draft_tokens: B counts.
        accept_uniforms: [P]; a draft is accepted if its uniform is below its probability.
        emit_uniforms: [R], one per row, for the inverse CDF: the smallest id whose cumulative
            mass exceeds uniform * total.

    Returns:
        As `sample_greedy`.
    """
    counts = _counts(num_draft_tokens)
    is_target = np.ones(len(target_probs), dtype=np.bool_)
    is_target[np.cumsum(counts + 1) - 1] = False
    targets = torch.from_numpy(np.flatnonzero(is_target))
    row_drafts = torch.full((len(target_probs),), PADDING)
    row_drafts[targets] = torch.as_tensor(draft_token_ids, dtype=torch.int64).cpu()
    row_uniforms = torch.ones(len(target_probs), dtype=torch.float64)
    row_uniforms[targets] = accept_uniforms.cpu().double()
    sampled = ratio_rows(target_probs, row_drafts, row_uniforms, emit_uniforms)
    return _accepted(sampled, draft_token_ids, counts)


def race(probs: torch.Tensor, exponential_noise: torch.Tensor) -> torch.Tensor:
    """The winner of an exponential race, distributed as `probs`: argmax of probability / noise.

    Args:
        probs, exponential_noise: [R, V]. Tokens of probability 0 never win; the lowest id wins
            a tie.
    """
    scores = torch.where(probs > 0, probs.double() / exponential_noise.double(), -1.0)
    return scores.argmax(dim=-1)


def ratio_rows(
    probs: torch.Tensor,
    row_drafts: torch.Tensor,
    accept_uniforms: torch.Tensor,
    emit_uniforms: torch.Tensor,
) -> torch.Tensor:
    """One token per row [R] under rule `ratio`: the draft if it is accepted, else another.

    Args:
        probs: [R, V].
        row_drafts: [R] int64, each row's draft; -1, or any id outside the vocabulary: no draft.
        accept_uniforms, emit_uniforms: [R], as in `sample_ratio`.
    """
    mass = probs.double()
    drafts = row_drafts.to(mass.device)
    is_known = (drafts >= 0) & (drafts < mass.shape[-1])
    safe = torch.where(is_known, drafts, 0)
    of_draft = torch.where(is_known, mass.gather(-1, safe[:, None])[:, 0], 0.0)
    stands = accept_uniforms.to(mass) < of_draft
    residual = mass.clone()
    places = is_known.nonzero()[:, 0]
    residual[places, safe[places]] = 0.0
    return torch.where(stands, drafts, inverse_cdf(residual, emit_uniforms.to(mass)))


def inverse_cdf(mass: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Per row, the smallest id whose cumulative mass exceeds uniform * total.

    Args:
        mass: [R, V] float64, not negative. uniforms: [R] in [0, 1).
    """
    cumulative = mass.cumsum(dim=-1)
    threshold = uniforms.double()[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # Rounding may put the threshold at the total itself.
    ids = torch.arange(mass.shape[-1], device=mass.device)
    last = torch.where(mass > 0, ids, 0).amax(dim=-1)
    return torch.minimum(found, last)


def accept(
    sampled_token_ids: IntArray,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Keeps each sequence's samples up to and including the first that differs from its draft.

    Args:
        sampled_token_ids: [R]. draft_token_ids: [P]. num_draft_tokens: [B].
        is_usable: [R]; a sequence's samples end before the first unusable one. None: all usable.

    Returns:
        output_token_ids [B, K_max + 1] padded with -1, and num_accepted_tokens [B].

    Example: samples 5 6 7 | 8, drafts 5 9, counts 2 0: outputs 5 6 -1 | 8 -1 -1, accepted 1 0.
    """
    num_sequences = len(num_draft_tokens)
    width = int(num_draft_tokens.max(initial=0)) + 1
    columns = np.arange(width)
    is_draft_row = columns < num_draft_tokens[:, None]
    is_row = columns <= num_draft_tokens[:, None]
    sampled = np.full((num_sequences, width), PADDING, dtype=np.int64)
    sampled[is_row] = sampled_token_ids
    drafts = np.full((num_sequences, width), PADDING, dtype=np.int64)
    drafts[is_draft_row] = draft_token_ids
    is_match = is_draft_row & (sampled == drafts)
    if is_usable is not None and not is_usable.all():
        is_match[is_row] &= is_usable
        sampled[is_row] = np.where(is_usable, sampled_token_ids, PADDING)
    num_accepted = np.logical_and.accumulate(is_match, axis=1).sum(axis=1)
    return np.where(columns <= num_accepted[:, None], sampled, PADDING), num_accepted


def _accepted(
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor | SequenceOf[int] | IntArray,
) -> tuple[torch.Tensor, torch.Tensor]:
    drafts = torch.as_tensor(draft_token_ids, dtype=torch.int64).cpu().numpy()
    output, num_accepted = accept(sampled.cpu().numpy(), drafts, _counts(num_draft_tokens))
    return torch.from_numpy(output), torch.from_numpy(num_accepted)


def _counts(num_draft_tokens: torch.Tensor | SequenceOf[int] | IntArray) -> IntArray:
    return torch.as_tensor(num_draft_tokens, dtype=torch.int64).cpu().numpy()
