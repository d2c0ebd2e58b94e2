"""The oracle of the sampler: the same law over whole tensors in torch, with sorted vocabularies.

Penalties are computed from the history, noise for every token.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from verifier.sampling import Sampling, philox


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens that a sequence's rows depend on beside their logits. K drafts: K + 1 rows."""

    prompt_token_ids: SequenceOf[int]
    output_token_ids: SequenceOf[int]
    draft_token_ids: SequenceOf[int]
    stop_token_ids: frozenset[int] = frozenset()


def adjusted_logits(logits: torch.Tensor, sampling: Sampling, history: Tokens) -> torch.Tensor:
    """All steps before the temperature, for one sequence.

    Args:
        logits: [n, V], any float dtype, of the first n <= K + 1 rows.

    Returns:
        [n, V] float64.
    """
    rows = logits.double()
    if not sampling.adjusts_logits:
        return rows
    num_rows, vocab_size = rows.shape
    # One (row, draft) pair for each draft before a row.
    drafts = torch.tensor(list(history.draft_token_ids), dtype=torch.int64, device=rows.device)
    before, place = torch.tril_indices(num_rows, len(drafts), offset=-1, device=rows.device)
    drafted = drafts[place]
    is_known = (drafted >= 0) & (drafted < vocab_size)
    before, drafted = before[is_known], drafted[is_known]
    output = torch.tensor(list(history.output_token_ids), dtype=torch.int64, device=rows.device)
    if sampling.repetition_penalty != 1.0:
        is_seen = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)
        prompt = torch.tensor(list(history.prompt_token_ids), dtype=torch.int64, device=rows.device)
        is_seen[:, torch.cat((prompt, output))] = True
        is_seen[before, drafted] = True
        penalty = sampling.repetition_penalty
        rows = torch.where(is_seen, torch.where(rows > 0, rows / penalty, rows * penalty), rows)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = torch.bincount(output, minlength=vocab_size).double().repeat(num_rows, 1)
        ones = torch.ones(len(drafted), dtype=torch.float64, device=rows.device)
        counts.index_put_((before, drafted), ones, accumulate=True)
        rows = rows - sampling.frequency_penalty * counts
        rows = rows - sampling.presence_penalty * (counts > 0).double()
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias.items(), strict=True)
        ids = torch.tensor(token_ids, dtype=torch.int64, device=rows.device)
        bias = torch.tensor(biases, dtype=torch.float64, device=rows.device)
        rows = rows.index_add(1, ids, bias.expand(num_rows, -1))
    num_masked = min(num_rows, sampling.min_new_tokens - len(history.output_token_ids))
    # A model may name end tokens without a logit.
    stops = sorted(t for t in history.stop_token_ids if t < vocab_size)
    if num_masked > 0 and stops:
        rows = rows.clone()
        rows[:num_masked, stops] = -torch.inf
    return rows


def row_probs(logits: torch.Tensor, sampling: SequenceOf[Sampling]) -> torch.Tensor:
    """Temperature, min-p, top-k, top-p and softmax.

    Args:
        logits: [R, V], adjusted.
        sampling: the parameters of each row's sequence, temperature > 0, R of them.

    Returns:
        [R, V] float32; tokens that are cut off have exactly 0. Of equal logits, lower ids are kept
        first.
    """
    return torch.softmax(scaled_logits(logits, sampling), dim=-1).float()


def scaled_logits(logits: torch.Tensor, sampling: SequenceOf[Sampling]) -> torch.Tensor:
    """The logits [R, V] float64 whose softmax is sampled; -inf for tokens that are cut off."""
    temperatures = _column([s.temperature for s in sampling], logits)
    # Subtracting the largest first keeps a tiny temperature from overflowing.
    scaled = logits.double()
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperatures
    if any(s.min_p > 0 for s in sampling):
        floors = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in sampling]
        scaled = scaled.masked_fill(scaled < _column(floors, scaled), -torch.inf)
    vocab_size = logits.shape[-1]
    cuts = [i for i, s in enumerate(sampling) if 0 < s.top_k < vocab_size or s.top_p < 1.0]
    if cuts:
        scaled[cuts] = _truncated(scaled[cuts], [sampling[i] for i in cuts])
    return scaled


def _truncated(scaled: torch.Tensor, sampling: SequenceOf[Sampling]) -> torch.Tensor:
    """Applies top-k, then top-p: tokens that are cut off get -inf."""
    vocab_size = scaled.shape[-1]
    in_order, token_ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    top_k = _column([float(s.top_k or vocab_size) for s in sampling], scaled)
    ranks = torch.arange(vocab_size, device=scaled.device, dtype=scaled.dtype)
    in_order = in_order.masked_fill(ranks >= top_k, -torch.inf)
    mass = torch.softmax(in_order, dim=-1)
    mass_before = torch.cumsum(mass, dim=-1) - mass
    top_p = _column([s.top_p for s in sampling], scaled)
    # Whatever rounding does: the likeliest token stays, and 1 cuts nothing.
    is_cut = (mass_before >= top_p) & (ranks > 0) & (top_p < 1.0)
    in_order = in_order.masked_fill(is_cut, -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, token_ids, in_order)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def race(probs: torch.Tensor, exponential_noise: torch.Tensor) -> torch.Tensor:
    """The winner of an exponential race, distributed as `probs`: argmax of probability / noise.

    Args:
        probs, exponential_noise: [R, V]. Tokens of probability 0 never win; the lowest id wins
            a tie.
    """
    scores = torch.where(probs > 0, probs.double() / exponential_noise.double(), -1.0)
    return scores.argmax(dim=-1)


def noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """[V] float64."""
    uniforms = philox.uniforms(
        np.full(vocab_size, seed, dtype=np.uint64),
        np.full(vocab_size, position),
        np.arange(vocab_size),
    )
    return -torch.from_numpy(uniforms).log()


def sampled(
    logits: torch.Tensor, sampling: Sampling, history: Tokens, first_position: int
) -> list[int]:
    """One token for each row [K + 1, V] of a sequence."""
    rows = adjusted_logits(logits, sampling, history)
    if sampling.is_greedy:
        return rows.argmax(dim=-1).tolist()
    probs = row_probs(rows, [sampling] * len(rows))
    positions = range(first_position, first_position + len(rows))
    each = [noise(sampling.seed or 0, position, rows.shape[-1]) for position in positions]
    return race(probs, torch.stack(each)).tolist()
