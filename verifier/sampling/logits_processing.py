"""From logits to the law that is sampled.

In this order: repetition penalty over prompt and output; frequency and presence penalties over
the output; logit bias; stop tokens masked before `min_new_tokens`; temperature; min-p; top-k;
top-p; softmax. A sequence's row j is judged with the history `output + drafts[:j]`, which is what
the history will be if the row counts.

Everything is computed in float64, row by row independent of the others, so a row's result has the
same bits alone and in a batch, with and without drafts. So it can be done slice by slice, too:
hundreds of rows of a large vocabulary, whole and in several copies, would take gigabytes.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from verifier.sampling.parameters import Sampling

# Of one float64 tensor of a slice, or of one row where that is more. What is done to a slice holds
# at most ten of them at a time, whatever the parameters: 160 MiB.
SLICE_BYTES = 16 << 20
# Penalties cost the square of it.
_MAX_SLICE_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a sequence's law depends on beside its logits. K drafts: K + 1 rows."""

    prompt_token_ids: SequenceOf[int]
    output_token_ids: SequenceOf[int]
    draft_token_ids: SequenceOf[int]
    stop_token_ids: frozenset[int] = frozenset()


def target_probs(
    logits: torch.Tensor,
    sampling: object,
    prompt_token_ids: SequenceOf[int],
    output_token_ids: SequenceOf[int],
    draft_token_ids: SequenceOf[int],
) -> torch.Tensor:
    """The target's law at each row of one sequence.

    Args:
        logits: [K + 1, V], any float dtype.
        sampling: a `Sampling`, or any object with its fields (a SamplingParams message, say).
        draft_token_ids: K of them; ids outside the vocabulary leave no trace in the history.

    Returns:
        [K + 1, V] float32; a point mass where the temperature is 0.
    """
    parameters = Sampling.of(sampling)
    history = History(
        prompt_token_ids=prompt_token_ids,
        output_token_ids=output_token_ids,
        draft_token_ids=draft_token_ids,
    )
    return sampling_probs(logits, parameters, history)


def row_slices(num_rows: int, vocab_size: int) -> list[slice]:
    """Runs of rows, all of them, that are worked on one after another."""
    size = max(1, min(_MAX_SLICE_ROWS, SLICE_BYTES // (8 * vocab_size)))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def sampling_probs(logits: torch.Tensor, sampling: Sampling, history: History) -> torch.Tensor:
    """The law that one sequence's rows are sampled from.

    Args:
        logits: [K + 1, V], any float dtype.

    Returns:
        [K + 1, V] float32; a point mass where the temperature is 0.
    """
    rows = adjusted_logits(logits, sampling, history)
    if sampling.is_greedy:
        probs = torch.zeros_like(rows, dtype=torch.float32)
        return probs.scatter_(-1, rows.argmax(dim=-1, keepdim=True), 1.0)
    return row_probs(rows, [sampling] * len(rows))


def reported_logprobs(
    logits: torch.Tensor, sampling: Sampling, history: History, *, first_row: int = 0
) -> torch.Tensor:
    """What is told of one sequence's rows: the law's logprobs, or the model's own if `sampling`
    wants them raw. At temperature 0, of the law that the likeliest token is taken from.

    Args:
        logits: [n, V], any float dtype, of the rows from `first_row` on; of all K + 1 or fewer.

    Returns:
        [n, V] float64.
    """
    rows = logits.double()
    if not sampling.raw_logprobs:
        rows = adjusted_logits(logits, sampling, history, first_row=first_row)
        if not sampling.is_greedy:
            rows = scaled_logits(rows, [sampling] * len(rows))
    return torch.log_softmax(rows, dim=-1)


def adjusted_logits(
    logits: torch.Tensor, sampling: Sampling, history: History, *, first_row: int = 0
) -> torch.Tensor:
    """All that happens before the temperature, for one sequence.

    Args:
        logits: [n, V], any float dtype, of the rows from `first_row` on; of all K + 1 or fewer.

    Returns:
        [n, V] float64.
    """
    rows = logits.double()
    if not sampling.adjusts_logits:
        return rows
    num_rows, vocab_size = rows.shape
    # Entry (row, token): one per draft that stands before the row.
    drafts = torch.tensor(list(history.draft_token_ids), dtype=torch.int64, device=rows.device)
    before, place = torch.tril_indices(
        num_rows, len(drafts), offset=first_row - 1, device=rows.device
    )
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
        rows = rows - sampling.presence_penalty * (counts > 0)
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        ids = torch.tensor(token_ids, dtype=torch.int64, device=rows.device)
        bias = torch.tensor(biases, dtype=torch.float64, device=rows.device)
        rows = rows.index_add(1, ids, bias.expand(num_rows, -1))
    num_output = len(history.output_token_ids) + first_row
    num_masked = min(num_rows, sampling.min_new_tokens - num_output)
    # A model may name end tokens that it has no logit for.
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
        [R, V] float32; what was cut off is exactly 0. Among equal logits the lower id is kept
        first.
    """
    return torch.softmax(scaled_logits(logits, sampling), dim=-1).float()


def scaled_logits(logits: torch.Tensor, sampling: SequenceOf[Sampling]) -> torch.Tensor:
    """The logits [R, V] float64 whose softmax is the law; -inf where it is cut off."""
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
    """Sets what top-k, then top-p, cut off to -inf."""
    vocab_size = scaled.shape[-1]
    in_order, token_ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    top_k = _column([float(s.top_k or vocab_size) for s in sampling], scaled)
    ranks = torch.arange(vocab_size, device=scaled.device, dtype=scaled.dtype)
    in_order = in_order.masked_fill(ranks >= top_k, -torch.inf)
    mass = torch.softmax(in_order, dim=-1)
    mass_before = torch.cumsum(mass, dim=-1) - mass
    top_p = _column([s.top_p for s in sampling], scaled)
    # The likeliest token stays, whatever rounding says; and 1 means off, whatever it says.
    is_cut = (mass_before >= top_p) & (ranks > 0) & (top_p < 1.0)
    in_order = in_order.masked_fill(is_cut, -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, token_ids, in_order)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
