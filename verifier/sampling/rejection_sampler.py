"""Verifies a step's drafts: which are accepted, and which token each sequence gets next.

Rejection sampling with a deterministic draft: the draft is a given token, so its distribution is a
point mass, and two rules keep the output's distribution the target model's:

- `match` (default): at every position the target is sampled with noise that depends on seed,
  position and token only, and the sample is emitted. While it equals the draft, the next position
  is verified too. For a fixed seed the output is then the same with and without drafts.
- `ratio`: a draft is accepted with the target's probability of it; on rejection the target is
  sampled without the draft. (Leviathan et al., "Fast inference from transformers via speculative
  decoding", ICML 2023, with a point mass as the draft's distribution.)

Both sample one token per row (`acceptance_rules.py`), and keep each sequence's tokens up to and
including the first that differs from its draft (`accept_rows`).

Shape legend: B sequences, K_i drafts of sequence i, P = sum K_i, R = P + B rows: each sequence's
K_i draft rows, then its bonus row. V vocabulary.
"""

import enum
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from servicekit.kernels.jit import kernel
from servicekit.logs import get_logger
from verifier.sampling.acceptance_rules import (
    PADDING,
    BoolArray,
    IntArray,
    accept_rows,
    sample_by_ratio,
    win_race,
)
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
from verifier.sampling.logprobs import TokenLogprob, token_logprobs
from verifier.sampling.parameters import Sampling

logger = get_logger(__name__)

# All rows may be used.
_ALL = np.ones(0, dtype=np.bool_)


class AcceptanceRule(enum.Enum):
    MATCH = "match"
    RATIO = "ratio"


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


def verify(
    logits: FloatArray,
    sequences: SequenceOf[JudgedSequence],
    *,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray | None = None,
    rule: AcceptanceRule = AcceptanceRule.MATCH,
) -> Verdict:
    """Verifies all drafts of a step and samples one further token per sequence.

    A sequence's rows after its first rejected draft have no effect, whatever they contain.

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
    start = 0
    # Sequences whose tokens' logprobs are reported, and their first rows.
    reported: list[tuple[int, int]] = []
    for i, (sequence, num_drafts) in enumerate(
        zip(sequences, num_draft_tokens.tolist(), strict=True)
    ):
        sampling, end = sequence.sampling, start + num_drafts + 1
        is_free = sampling.is_greedy and not sampling.adjusts_logits
        if not is_free and not _are_sampled(sampled[start:end], sequence):
            _sample_rows(
                logits[start:end],
                is_usable[start:end],
                sequence.history.drafts,
                sequence.history.adjustment_arrays,
                distribution_parameters(sampling),
                np.uint64(sampling.seed),
                sequence.first_position,
                rule is AcceptanceRule.RATIO,
                sampled[start:end],
            )
        if sampling.logprobs is not None:
            reported.append((i, start))
        start = end
    output_token_ids, num_accepted_tokens, last_is_usable = accept_rows(
        sampled, draft_token_ids, num_draft_tokens, is_usable
    )
    logprobs = {}
    for i, start in reported:
        num_emitted = num_accepted_tokens[i] + last_is_usable[i]
        if num_emitted:
            emitted = output_token_ids[i, :num_emitted]
            logprobs[i] = _logprobs(logits[start : start + num_emitted], sequences[i], emitted)
    return Verdict(
        output_token_ids=output_token_ids,
        num_accepted_tokens=num_accepted_tokens,
        is_finite=last_is_usable,
        logprobs=logprobs,
    )


def verify_isolating_faults(
    logits: FloatArray,
    sequences: SequenceOf[JudgedSequence],
    *,
    draft_token_ids: IntArray,
    num_draft_tokens: IntArray,
    is_usable: BoolArray | None,
    rule: AcceptanceRule,
    fail: Callable[[int, Exception], None],
) -> Verdict:
    """Calls `verify`; if that raises, verifies the sequences one by one, slowly, so that the
    sequence that causes it is found and the others get the tokens that they would have got.

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
    except Exception as error:
        of_all = error  # raised again below, for one sequence
    num_sequences = len(sequences)
    width = int(num_draft_tokens.max(initial=0)) + 1
    output_token_ids = np.full((num_sequences, width), PADDING, dtype=np.int64)
    num_accepted_tokens = np.zeros(num_sequences, dtype=np.int64)
    is_finite = np.zeros(num_sequences, dtype=np.bool_)
    logprobs = {}
    is_found = False
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
            is_found = True
            fail(i, error)
        else:
            [token_ids] = verdict.output_token_ids
            output_token_ids[i, : len(token_ids)] = token_ids
            num_accepted_tokens[i] = verdict.num_accepted_tokens[0]
            is_finite[i] = verdict.is_finite[0]
            if 0 in verdict.logprobs:
                logprobs[i] = verdict.logprobs[0]
        first_row, first_draft = end_row, end_draft
    if not is_found:
        # A fault of the step, not of a sequence; as lengths that contradict each other.
        logger.error("verify_failed_for_no_sequence", exc_info=of_all)
    return Verdict(
        output_token_ids=output_token_ids,
        num_accepted_tokens=num_accepted_tokens,
        is_finite=is_finite,
        logprobs=logprobs,
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
    is_ratio: bool,
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
            position = first_position + index
            if is_ratio:
                token_id = sample_by_ratio(probs, token_ids, count, seed, position, draft)
            else:
                token_id = win_race(probs, token_ids, count, seed, position)
            sampled[index] = token_id
        if sampled[index] != draft:
            break
        num_seen = add_draft(adjusting, num_seen, draft)


def _logprobs(
    logits: FloatArray, sequence: JudgedSequence, emitted: IntArray
) -> list[TokenLogprob]:
    """The logprobs of the emitted tokens, each by its row of `logits`."""
    sampling = sequence.sampling
    return token_logprobs(
        reported_logprobs(logits, sampling, sequence.history, emitted, sampling.logprobs or 0)
    )
