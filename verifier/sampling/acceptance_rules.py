"""The rules of acceptance for one row each, and `accept_rows`, which both rules share.

`sample_greedy`, `sample_match` and `sample_ratio` verify one batch of torch tensors with the noise
given, by `race` and `accept`, for code outside this repository. The sampler uses the kernels, and
`accept_rows`.

Shape legend as in `rejection_sampler.py`.
"""

import math
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.sampling import philox
from verifier.sampling.distribution import DoubleArray, PlaceArray, first_of, largest

if TYPE_CHECKING:
    import torch

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Ends the rows of `output_token_ids`; also marks a row without a draft.
PADDING = -1

_NUM_LANES = 256
_ALMOST_1 = 1.0 - 2.0**-40
_LEAST_GAP = 2.0**-53
_MATCH, _ACCEPT, _EMIT = (np.uint64(purpose) for purpose in philox.Purpose)


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
    """Rule `match` with the noise given.

    Args:
        target_probs, exponential_noise: [R, V]. draft_token_ids: [P]. num_draft_tokens: B counts.

    Returns:
        As `sample_greedy`.
    """
    sampled = race(_doubles(target_probs), _doubles(exponential_noise))
    return _accepted(sampled, draft_token_ids, num_draft_tokens)


def sample_ratio(
    target_probs: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    num_draft_tokens: "torch.Tensor | SequenceOf[int]",
    accept_uniforms: "torch.Tensor",
    emit_uniforms: "torch.Tensor",
) -> "tuple[torch.Tensor, torch.Tensor]":
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
    probs, emit = _doubles(target_probs), _doubles(emit_uniforms)
    is_target = np.ones(len(probs), dtype=np.bool_)
    is_target[np.cumsum(counts + 1) - 1] = False
    drafts = np.full(len(probs), PADDING, dtype=np.int64)
    drafts[is_target] = _ids(draft_token_ids)
    uniforms = np.ones(len(probs))
    uniforms[is_target] = _doubles(accept_uniforms)
    token_ids = np.arange(probs.shape[-1], dtype=np.int32)
    sampled = np.array(
        [
            accept_or_emit(row, token_ids, len(row), draft, uniform, emit_uniform)
            for row, draft, uniform, emit_uniform in zip(
                probs, drafts.tolist(), uniforms.tolist(), emit.tolist(), strict=True
            )
        ],
        dtype=np.int64,
    )
    return _accepted(sampled, draft_token_ids, counts)


def race(probs: DoubleArray, exponential_noise: DoubleArray) -> IntArray:
    """The winners [R] of exponential races, distributed as `probs`: argmax of probability / noise.

    Args:
        probs, exponential_noise: [R, V]. Tokens of probability 0 never win; the lowest id wins
            a tie.
    """
    winners: IntArray = np.where(probs > 0, probs / exponential_noise, -1.0).argmax(axis=-1)
    return winners


@kernel
def win_race(
    probs: DoubleArray, token_ids: PlaceArray, count: int, seed: np.uint64, position: int
) -> int:
    """The winner of `race` of one row, with the noise of rule `match`.

    Most tokens need no logarithm, many no noise. Let g = 1 - u be a token's gap, of its uniform u;
    u has 53 bits, so g is exact, and 2^-53 or more. Its noise is -ln(u) >= g, so its score is
    probability / g at most. The logarithm and the division each err by 2^-52 at most, and so do
    the two products below. So where probability < best * g * (1 - 2^-40), the score as computed
    is less than the best one, and the token can neither win nor tie.

    Args:
        probs: of the tokens `token_ids`, ascending; the first `count` are valid, one is positive.
    """
    # The likeliest one sets a bar that few others pass.
    likeliest = first_of(probs, count, largest(probs, count))
    winner = int(token_ids[likeliest])
    best = probs[likeliest] / -math.log(philox.uniform(winner, position, _MATCH, seed))
    lanes, words = np.empty(_NUM_LANES), np.empty((4, _NUM_LANES), dtype=np.uint64)
    for start in range(0, count, _NUM_LANES):
        end = min(start + _NUM_LANES, count)
        part, ids = probs[start:end], token_ids[start:end]
        bar = best * _ALMOST_1
        num_possible = 0
        for i in range(len(part)):
            num_possible += part[i] >= bar * _LEAST_GAP
        if num_possible == 0:
            continue
        uniforms = lanes[: len(part)]
        philox.fill_uniforms(ids, position, _MATCH, seed, words, uniforms)
        num_possible = 0
        for i in range(len(part)):
            num_possible += part[i] >= bar * (1.0 - uniforms[i])
        if num_possible == 0:
            continue
        for i in range(len(part)):
            if part[i] >= bar * (1.0 - uniforms[i]) and part[i] > 0.0:
                score = part[i] / -math.log(uniforms[i])
                if score > best or (score == best and ids[i] < winner):
                    best, winner = score, int(ids[i])
    return winner


@kernel
def sample_by_ratio(
    probs: DoubleArray,
    token_ids: PlaceArray,
    count: int,
    seed: np.uint64,
    position: int,
    draft: int,
) -> int:
    """One token under rule `ratio`: the draft if it is accepted, else another one.

    Args:
        draft: -1, or any id outside the vocabulary: no draft.
    """
    uniform = philox.uniform(draft, position, _ACCEPT, seed)
    emit_uniform = philox.uniform(0, position, _EMIT, seed)
    return accept_or_emit(probs, token_ids, count, draft, uniform, emit_uniform)


@kernel
def accept_or_emit(
    probs: DoubleArray,
    token_ids: PlaceArray,
    count: int,
    draft: int,
    accept_uniform: float,
    emit_uniform: float,
) -> int:
    """The draft, if `accept_uniform` is below its probability. Else, by inverse CDF, of the other
    tokens the one with the smallest id whose cumulative mass exceeds `emit_uniform` * total.
    """
    total = 0.0
    last = 0
    for i in range(count):
        if token_ids[i] == draft:
            if accept_uniform < probs[i]:
                return draft
        elif probs[i] > 0.0:
            total += probs[i]
            last = int(token_ids[i])
    threshold = emit_uniform * total
    cumulative = 0.0
    for i in range(count):
        if token_ids[i] != draft:
            cumulative += probs[i]
            if cumulative > threshold:
                return int(token_ids[i])
    # Rounding may put the threshold at the total itself.
    return last


def accept(
    sampled_token_ids: IntArray,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
) -> tuple[IntArray, IntArray]:
    """Keeps each sequence's samples up to and including the first that differs from its draft.

    Args:
        sampled_token_ids: [R]. draft_token_ids: [P]. num_draft_tokens: [B].

    Returns:
        output_token_ids [B, K_max + 1] padded with -1, and num_accepted_tokens [B].

    Example: samples 5 6 7 | 8, drafts 5 9, counts 2 0: outputs 5 6 -1 | 8 -1 -1, accepted 1 0.
    """
    is_usable = np.ones(len(sampled_token_ids), np.bool_)
    return accept_rows(sampled_token_ids, draft_token_ids, num_draft_tokens, is_usable)[:2]


def accept_rows(
    sampled_token_ids: IntArray,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray,
) -> tuple[IntArray, IntArray, BoolArray]:
    """What `accept` returns; and, [B], whether the row after the accepted drafts is usable.

    Args:
        is_usable: [R]; a sequence's samples end before the first unusable one.

    Raises:
        ValueError: the arrays' lengths contradict each other.
    """
    num_sequences = len(num_draft_tokens)
    width = int(num_draft_tokens.max(initial=0)) + 1
    output_token_ids = np.empty((num_sequences, width), dtype=np.int64)
    num_accepted = np.empty(num_sequences, dtype=np.int64)
    last_is_usable = np.empty(num_sequences, dtype=np.bool_)
    if not _accept_rows(
        sampled_token_ids, draft_token_ids, num_draft_tokens, is_usable, output_token_ids,
        num_accepted, last_is_usable,
    ):  # fmt: skip
        raise ValueError("sampled tokens, drafts and their numbers have different lengths")
    return output_token_ids, num_accepted, last_is_usable


@kernel
def _accept_rows(
    sampled_token_ids: IntArray,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray,
    output_token_ids: IntArray,
    num_accepted: IntArray,
    last_is_usable: BoolArray,
) -> bool:
    """Fills the last three; False: the lengths contradict each other."""
    num_drafts, num_sequences = 0, len(num_draft_tokens)
    for count in num_draft_tokens:
        if count < 0:
            return False
        num_drafts += count
    num_rows = num_drafts + num_sequences
    if not len(sampled_token_ids) == len(is_usable) == num_rows:
        return False
    if len(draft_token_ids) != num_drafts:
        return False
    row = draft = 0
    for i in range(num_sequences):
        count = num_draft_tokens[i]
        output = output_token_ids[i]
        output[:] = PADDING
        stood = 0
        while stood < count and is_usable[row + stood]:
            if sampled_token_ids[row + stood] != draft_token_ids[draft + stood]:
                break
            output[stood] = sampled_token_ids[row + stood]
            stood += 1
        last_is_usable[i] = is_usable[row + stood]
        if last_is_usable[i]:
            output[stood] = sampled_token_ids[row + stood]
        num_accepted[i] = stood
        row += count + 1
        draft += count
    return True


def _accepted(
    sampled: IntArray,
    draft_token_ids: "torch.Tensor",
    num_draft_tokens: "torch.Tensor | SequenceOf[int] | IntArray",
) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    drafts, counts = _ids(draft_token_ids), _counts(num_draft_tokens)
    output, num_accepted = accept(sampled, drafts, counts)
    return torch.from_numpy(output), torch.from_numpy(num_accepted)


def _doubles(tensor: "torch.Tensor") -> DoubleArray:
    doubles: DoubleArray = np.ascontiguousarray(tensor.detach().cpu().double().numpy())
    return doubles


def _ids(token_ids: "torch.Tensor") -> IntArray:
    import torch

    ids: IntArray = torch.as_tensor(token_ids, dtype=torch.int64).cpu().numpy()
    return ids


def _counts(num_draft_tokens: "torch.Tensor | SequenceOf[int] | IntArray") -> IntArray:
    import torch

    counts: IntArray = torch.as_tensor(num_draft_tokens, dtype=torch.int64).cpu().numpy()
    return counts
