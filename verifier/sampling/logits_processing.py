"""From logits to the distribution that is sampled, and to the logprobs that are reported.

In this order: repetition penalty over prompt and output; frequency and presence penalties over
the output; logit bias; stop tokens masked before `min_new_tokens`; tokens that a grammar forbids;
temperature; min-p; top-k; top-p; softmax. A sequence's row j is processed with the history
`output + drafts[:j]`, which is the sequence's history if the row is reached.

Everything is computed in float64, row after row in the memory of one, so a row's result has the
same bits alone and in a batch, with and without drafts, and memory doesn't grow with the rows.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.sampling.adjustments import (
    NO_ADJUSTMENTS,
    AdjustmentArrays,
    Adjustments,
    DoubleArray,
    IntArray,
    LogitsArray,
    add_draft,
    adjust,
)
from verifier.sampling.distribution import (
    DistributionParameters,
    first_of,
    keep_allowed,
    largest,
    new_scratch,
    to_probabilities,
)
from verifier.sampling.parameters import Sampling, sampling_of

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float32]

_AS_IT_IS = DistributionParameters(temperature=1.0, log_min_p=-math.inf, top_k=0, top_p=1.0)


class History(NamedTuple):
    """The tokens that a sequence's rows depend on beside their logits. K drafts: K + 1 rows. One is
    made per sequence and step.
    """

    # None: the sequence has none.
    adjustments: Adjustments | None = None
    draft_token_ids: SequenceOf[int] = ()

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        *,
        prompt_token_ids: SequenceOf[int],
        output_token_ids: SequenceOf[int],
        draft_token_ids: SequenceOf[int] = (),
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> "History":
        """Counts all tokens; for a sequence that is not continued."""
        adjustments = None
        if sampling.adjusts_logits:
            adjustments = Adjustments(
                sampling, prompt_length=len(prompt_token_ids), stop_token_ids=stop_token_ids
            )
            adjustments.count([*prompt_token_ids, *output_token_ids])
        return cls(adjustments=adjustments, draft_token_ids=draft_token_ids)

    @property
    def adjustment_arrays(self) -> AdjustmentArrays:
        """What adjusts the K + 1 rows: the first, and one after each draft."""
        if self.adjustments is None:
            return NO_ADJUSTMENTS
        return self.adjustments.for_drafts(self.draft_token_ids)

    @property
    def drafts(self) -> IntArray:
        """The drafts, [K] int64."""
        return np.array(self.draft_token_ids, dtype=np.int64)


def target_probs(
    logits: "torch.Tensor",
    sampling: object,
    prompt_token_ids: SequenceOf[int],
    output_token_ids: SequenceOf[int],
    draft_token_ids: SequenceOf[int],
) -> "torch.Tensor":
    """The distribution that each row of one sequence is sampled from.

    Args:
        logits: [K + 1, V], any float dtype.
        sampling: a `Sampling`, or any object with its fields (a SamplingParams message, say).
        draft_token_ids: K of them; ids outside the vocabulary do not count in the history.

    Returns:
        [K + 1, V] float32; a point mass where the temperature is 0.
    """
    import torch

    parameters = sampling_of(sampling)
    history = History.of(
        parameters,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=output_token_ids,
        draft_token_ids=draft_token_ids,
    )
    rows = logits.detach().cpu()
    rows = rows if rows.dtype == torch.float64 else rows.float()
    probs = sampling_probs(rows.contiguous().numpy(), parameters, history)
    return torch.from_numpy(probs).to(logits.device)


def sampling_probs(logits: LogitsArray, sampling: Sampling, history: History) -> FloatArray:
    """The distributions that `target_probs` gives, from validated parameters.

    Args:
        logits: [K + 1, V].

    Returns:
        [K + 1, V] float32; a point mass where the temperature is 0.
    """
    probs = np.zeros(logits.shape, dtype=np.float32)
    _fill_probs(
        logits, history.drafts, history.adjustment_arrays, distribution_parameters(sampling), probs
    )
    return probs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRows:
    """The logprobs that responses contain, of n rows."""

    # [n], of one token a row: its id, logprob and rank; 1: the likeliest.
    token_ids: IntArray
    logprobs: DoubleArray
    ranks: IntArray
    # [n, num_top], of the likeliest tokens; lower ids first among equals.
    top_token_ids: IntArray
    top_logprobs: DoubleArray
    # [n, V] if requested, else [0, V].
    all_logprobs: FloatArray


def reported_logprobs(
    logits: LogitsArray,
    sampling: Sampling,
    history: History,
    token_ids: IntArray,
    num_top: int,
    *,
    keeps_all: bool = False,
) -> ReportedRows:
    """Logprobs of the sampled distribution, or of the model's own if `sampling` asks for raw ones.
    At temperature 0: of the softmax of the adjusted logits.

    Args:
        logits: [n, V] of the first n <= K + 1 rows.
        token_ids: [n]; -1: the likeliest one.

    Raises:
        IndexError: a token has no logit.
    """
    num_rows, vocab_size = logits.shape
    assert len(token_ids) == num_rows
    if (largest_id := token_ids.max(initial=-1)) >= vocab_size:
        raise IndexError(f"token {largest_id} is outside the vocabulary of {vocab_size}")
    is_raw = sampling.logprobs_mode == "raw"
    is_of_sampled = not is_raw and not sampling.is_greedy
    num_top = min(num_top, vocab_size)
    rows = ReportedRows(
        token_ids=token_ids.copy(),
        logprobs=np.empty(num_rows),
        ranks=np.empty(num_rows, dtype=np.int64),
        top_token_ids=np.empty((num_rows, num_top), dtype=np.int64),
        top_logprobs=np.empty((num_rows, num_top)),
        all_logprobs=np.empty((num_rows if keeps_all else 0, vocab_size), dtype=np.float32),
    )
    _fill_logprobs(
        logits,
        history.drafts,
        NO_ADJUSTMENTS if is_raw else history.adjustment_arrays,
        distribution_parameters(sampling) if is_of_sampled else _AS_IT_IS,
        rows.token_ids,
        rows.logprobs,
        rows.ranks,
        rows.top_token_ids,
        rows.top_logprobs,
        rows.all_logprobs,
    )
    return rows


def distribution_parameters(sampling: Sampling) -> DistributionParameters:
    return DistributionParameters(
        temperature=float(sampling.temperature),
        log_min_p=math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        top_k=sampling.top_k,
        top_p=float(sampling.top_p),
    )


@kernel
def _fill_probs(
    logits: LogitsArray,
    drafts: IntArray,
    adjusting: AdjustmentArrays,
    parameters: DistributionParameters,
    probs: FloatArray,
) -> None:
    num_rows, vocab_size = logits.shape
    scratch, num_seen = new_scratch(vocab_size), adjusting.num_seen
    for index in range(num_rows):
        row = scratch.row
        adjust(logits, index, adjusting, num_seen, row)
        if parameters.temperature == 0.0:
            probs[index, first_of(row, vocab_size, largest(row, vocab_size))] = 1.0
        else:
            count, sum_of_weights = keep_allowed(parameters, scratch)
            to_probabilities(scratch.weights, count, sum_of_weights)
            for i in range(count):
                probs[index, scratch.token_ids[i]] = scratch.weights[i]
        if index < len(drafts):
            num_seen = add_draft(adjusting, num_seen, drafts[index])


@kernel
def _fill_logprobs(
    logits: LogitsArray,
    drafts: IntArray,
    adjusting: AdjustmentArrays,
    parameters: DistributionParameters,
    token_ids: IntArray,
    logprobs: DoubleArray,
    ranks: IntArray,
    top_token_ids: IntArray,
    top_logprobs: DoubleArray,
    all_logprobs: FloatArray,
) -> None:
    num_rows, vocab_size = logits.shape
    scratch, num_seen = new_scratch(vocab_size), adjusting.num_seen
    for index in range(num_rows):
        row = scratch.row
        adjust(logits, index, adjusting, num_seen, row)
        count, sum_of_weights = keep_allowed(parameters, scratch)
        log_of_sum = math.log(sum_of_weights)
        for i in range(vocab_size):
            row[i] = -np.inf
        for i in range(count):
            row[scratch.token_ids[i]] = scratch.scaled[i] - log_of_sum
        if token_ids[index] < 0:
            token_ids[index] = first_of(row, vocab_size, largest(row, vocab_size))
        logprobs[index] = row[token_ids[index]]
        ranks[index] = 1
        for token_id in range(vocab_size):
            ranks[index] += row[token_id] > logprobs[index]
        fill_likeliest(row, top_token_ids[index], top_logprobs[index])
        if len(all_logprobs) > 0:
            for i in range(vocab_size):
                all_logprobs[index, i] = row[i]
        if index < len(drafts):
            num_seen = add_draft(adjusting, num_seen, drafts[index])


@kernel
def fill_likeliest(row: DoubleArray, token_ids: IntArray, values: DoubleArray) -> None:
    """The largest of a row and their places, as many as the results have room for, at most as the
    row is long; the first of equals first.
    """
    num_found, room = 0, len(token_ids)
    for token_id in range(len(row)):
        value = row[token_id]
        if num_found < room or (room > 0 and value > values[room - 1]):
            place = min(num_found, room - 1)
            while place > 0 and values[place - 1] < value:
                token_ids[place], values[place] = token_ids[place - 1], values[place - 1]
                place -= 1
            token_ids[place], values[place] = token_id, value
            num_found = min(num_found + 1, room)
