"""Verifies a step's drafts: which are accepted, and which token each sequence gets next.

Rejection sampling with a deterministic draft: the draft is a given token, so its distribution is a
point mass. At every position the target is sampled with noise that depends on seed, position and
token only (`race.py`), and the sample is emitted. While it equals the draft, the next position is
verified too (`accept_rows`). The output's distribution is the target model's, and for a fixed seed
the output is the same with and without drafts.

Shape legend: B sequences, K_i drafts of sequence i, P = sum K_i, R = P + B rows: each sequence's
K_i draft rows, then its bonus row. V vocabulary.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from tandem.values import TokenLogprob
from verifier.sampling.adjustments import AdjustmentArrays, add_draft, adjust
from verifier.sampling.distribution import (
    DistributionParameters,
    first_of,
    keep_allowed,
    largest,
    new_scratch,
    to_probabilities,
)
from verifier.sampling.logits_processing import (
    FloatArray,
    History,
    distribution_parameters,
    reported_logprobs,
)
from verifier.sampling.logprobs import token_logprobs
from verifier.sampling.parameters import Sampling
from verifier.sampling.race import win_race

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Ends the rows of `output_token_ids`; also marks a row without a draft.
PADDING = -1

# All rows may be used.
_ALL = np.ones(0, dtype=np.bool_)


class JudgedSequence(NamedTuple):
    """What a sequence's rows are verified with. One is made per sequence and step."""

    sampling: Sampling
    history: History
    # Absolute position of the token that its first row samples.
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A step's decisions, in batch order."""

    output_token_ids: IntArray  # [B, K_max + 1]: accepted drafts and one more, then -1
    num_accepted_tokens: IntArray  # [B]
    # [B]; False: the row after the accepted drafts is not usable, so no further token is emitted.
    is_finite: BoolArray
    # By index in the batch, of sequences that requested logprobs: one per emitted token.
    logprobs: dict[int, list[TokenLogprob]]
    # By index in the batch, of sequences that could not be verified: ignore all else about them.
    failures: dict[int, Exception]


def verify(
    logits: FloatArray,
    sequences: SequenceOf[JudgedSequence],
    *,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray | None = None,
) -> Verdict:
    """Verifies all drafts of a step and samples one further token per sequence.

    A sequence's rows after its first rejected draft have no effect, whatever they contain. One that
    raises is among the failures, and the others get the tokens that they would get without it.

    Args:
        logits: [R, V].
        sequences: B of them.
        draft_token_ids: [P]; ids outside the vocabulary are never accepted.
        num_draft_tokens: [B].
        is_usable: [R]; False: the row must not be used, whatever its logits. None: all may be.
    """
    # The lowest id of the likeliest ones.
    sampled = logits.argmax(axis=-1)
    is_usable = _finite_rows(logits, sampled, _ALL if is_usable is None else is_usable)
    failures: dict[int, Exception] = {}
    ends: list[int] = (num_draft_tokens + 1).cumsum().tolist()
    starts = [0, *ends][: len(ends)]
    for i, (sequence, start, end) in enumerate(zip(sequences, starts, ends, strict=True)):
        try:
            _sample(logits[start:end], is_usable[start:end], sequence, sampled[start:end])
        except Exception as error:
            failures[i] = error
    output_token_ids, num_accepted_tokens, last_is_usable = accept_rows(
        sampled, draft_token_ids, num_draft_tokens, is_usable
    )
    logprobs = {}
    for i, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        num_emitted = num_accepted_tokens[i] + last_is_usable[i]
        if sequence.sampling.logprobs is None or i in failures or not num_emitted:
            continue
        emitted = output_token_ids[i, :num_emitted]
        try:
            logprobs[i] = emitted_logprobs(logits[start : start + num_emitted], sequence, emitted)
        except Exception as error:
            failures[i] = error
    return Verdict(
        output_token_ids=output_token_ids,
        num_accepted_tokens=num_accepted_tokens,
        is_finite=last_is_usable,
        logprobs=logprobs,
        failures=failures,
    )


def accept_rows(
    sampled_token_ids: IntArray,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray,
) -> tuple[IntArray, IntArray, BoolArray]:
    """Keeps each sequence's samples up to and including the first that differs from its draft.

    Args:
        sampled_token_ids: [R]. draft_token_ids: [P]. num_draft_tokens: [B].
        is_usable: [R]; a sequence's samples end before the first unusable one.

    Returns:
        output_token_ids [B, K_max + 1] padded with -1; num_accepted_tokens [B]; and, [B], whether
        the row after the accepted drafts is usable.

    Raises:
        ValueError: the arrays' lengths contradict each other.

    Example: samples 5 6 7 | 8, drafts 5 9, counts 2 0: outputs 5 6 -1 | 8 -1 -1, accepted 1 0.
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


def _sample(
    logits: FloatArray, is_usable: BoolArray, sequence: JudgedSequence, sampled: IntArray
) -> None:
    """Replaces the likeliest tokens of one sequence's rows by what it samples.

    Args:
        logits: [K + 1, V]. is_usable: [K + 1]. sampled: [K + 1].
    """
    sampling = sequence.sampling
    is_free = sampling.is_greedy and not sampling.adjusts_logits
    if is_free or _are_sampled(sampled, sequence):
        return
    _sample_rows(
        logits,
        is_usable,
        sequence.history.drafts,
        sequence.history.adjustment_arrays,
        distribution_parameters(sampling),
        np.uint64(sampling.seed or 0),
        sequence.first_position,
        sampled,
    )


def _are_sampled(likeliest: IntArray, sequence: JudgedSequence) -> bool:
    """Whether a sequence samples the likeliest tokens of its rows, up to the last row that counts.
    False: the adjusted rows tell.

    Args:
        likeliest: [K + 1].
    """
    adjustments, drafts = sequence.history.adjustments, sequence.history.draft_token_ids
    if adjustments is None or not sequence.sampling.is_greedy:
        return False
    token_ids: list[int] = likeliest.tolist()
    num_accepted = 0
    while num_accepted < len(drafts) and token_ids[num_accepted] == drafts[num_accepted]:
        num_accepted += 1
    return adjustments.keep(token_ids[: num_accepted + 1])


@kernel
def _finite_rows(logits: FloatArray, likeliest: IntArray, is_usable: BoolArray) -> BoolArray:
    """Which rows can be used: finite ones, which have no NaN, and whose largest logit is finite.

    Args:
        logits: [R, V]. likeliest: [R]; of a row with a NaN, that.
        is_usable: [R], which can be used if they are finite; or []: all.
    """
    is_finite = np.empty(len(likeliest), dtype=np.bool_)
    for row in range(len(likeliest)):
        is_finite[row] = np.isfinite(logits[row, likeliest[row]])
        if len(is_usable):
            is_finite[row] &= is_usable[row]
    return is_finite


@kernel
def _sample_rows(
    logits: FloatArray,
    is_usable: BoolArray,
    drafts: IntArray,
    adjusting: AdjustmentArrays,
    parameters: DistributionParameters,
    seed: np.uint64,
    first_position: int,
    sampled: IntArray,
) -> None:
    """Writes one token per row of one sequence, up to the row that is the last one to count.

    Args:
        logits: [K + 1, V]. is_usable: [K + 1]. drafts: [K]. sampled: [K + 1].
    """
    num_rows, vocab_size = logits.shape
    scratch, num_seen = new_scratch(vocab_size), adjusting.num_seen
    row = scratch.row
    for index in range(num_rows):
        if not is_usable[index]:
            break
        adjust(logits, index, adjusting, num_seen, row)
        top = largest(row, vocab_size)
        draft = drafts[index] if index < len(drafts) else PADDING
        # Where every token is masked, there is no distribution.
        if parameters.temperature == 0.0 or not np.isfinite(top):
            sampled[index] = first_of(row, vocab_size, top)
        else:
            count, sum_of_weights = keep_allowed(parameters, scratch)
            probs, token_ids = scratch.weights, scratch.token_ids
            to_probabilities(probs, count, sum_of_weights)
            sampled[index] = win_race(probs, token_ids, count, seed, first_position + index)
        if sampled[index] != draft:
            break
        num_seen = add_draft(adjusting, num_seen, draft)


def emitted_logprobs(
    logits: FloatArray, sequence: JudgedSequence, emitted: IntArray
) -> list[TokenLogprob]:
    """The logprobs of the emitted tokens, each by its row of `logits`."""
    sampling = sequence.sampling
    return token_logprobs(
        reported_logprobs(logits, sampling, sequence.history, emitted, sampling.logprobs or 0)
    )
