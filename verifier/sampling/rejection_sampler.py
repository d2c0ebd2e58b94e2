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
including the first that differs from its draft (`accept`).

Shape legend: B sequences, K_i drafts of sequence i, P = sum K_i, R = P + B rows: each sequence's
K_i draft rows, then its bonus row. V vocabulary.
"""

import enum
import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from verifier.sampling import philox
from verifier.sampling.acceptance_rules import (
    PADDING,
    BoolArray,
    IntArray,
    accept,
    race,
    ratio_rows,
)
from verifier.sampling.logits_processing import (
    History,
    adjusted_logits,
    reported_logprobs,
    row_probs,
    row_slices,
)
from verifier.sampling.logprobs import TokenLogprob, token_logprobs
from verifier.sampling.parameters import Sampling


class AcceptanceRule(enum.Enum):
    MATCH = "match"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSequence:
    """What a sequence's rows are verified with."""

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
    logits: torch.Tensor,
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
        logits: [R, V], any float dtype and device.
        sequences: B of them.
        draft_token_ids: [P]; ids outside the vocabulary are never accepted.
        num_draft_tokens: [B].
        is_usable: [R]; False: the row must not be used, whatever its logits. None: all may be.
    """
    num_rows_each = num_draft_tokens + 1
    starts = np.cumsum(num_rows_each) - num_rows_each
    sampled, is_finite = _likeliest_of_rows(logits)
    is_usable = is_finite if is_usable is None else is_finite & is_usable
    special = [
        i
        for i, s in enumerate(sequences)
        if is_usable[starts[i]] and (s.sampling.adjusts_logits or not s.sampling.is_greedy)
    ]
    if special:
        rows = np.concatenate([np.arange(starts[i], starts[i] + num_rows_each[i]) for i in special])
        sampled[rows] = _sample(logits, rows, [sequences[i] for i in special], rule)
    output_token_ids, num_accepted_tokens = accept(
        sampled, draft_token_ids, num_draft_tokens, is_usable
    )
    last_is_usable = is_usable[starts + num_accepted_tokens]
    num_emitted = num_accepted_tokens + last_is_usable
    logprobs = {}
    for i, sequence in enumerate(sequences):
        if sequence.sampling.logprobs is not None and num_emitted[i]:
            emitted = output_token_ids[i, : num_emitted[i]]
            own = logits[starts[i] : starts[i] + len(emitted)]
            logprobs[i] = _logprobs(own, sequence, emitted)
    return Verdict(
        output_token_ids=output_token_ids,
        num_accepted_tokens=num_accepted_tokens,
        is_finite=last_is_usable,
        logprobs=logprobs,
    )


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
    """As `verify`; but if that raises, verifies the sequences one by one, slowly, so that the
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
    except Exception:
        pass  # raised again below, for one sequence
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


def _likeliest_of_rows(logits: torch.Tensor) -> tuple[IntArray, BoolArray]:
    """The likeliest token of each row, the lowest id of equals, and whether the row is finite: it
    has no NaN, and its largest logit is finite.
    """
    if logits.device.type == "cpu":
        # torch's maximum with its index takes several times as long.
        likeliest = np.empty(len(logits), dtype=np.int64)
        is_finite = np.empty(len(logits), dtype=np.bool_)
        is_numpy_type = logits.dtype in (torch.float32, torch.float64)
        slices = [slice(None)] if is_numpy_type else row_slices(*logits.shape)
        for part in slices:
            rows = (logits if is_numpy_type else logits[part].float()).numpy()
            likeliest[part] = found = rows.argmax(axis=-1)
            is_finite[part] = np.isfinite(rows[np.arange(len(rows)), found])
        return likeliest, is_finite
    largest, places = logits.max(dim=-1)
    return places.cpu().numpy(), torch.isfinite(largest).cpu().numpy()


def _sample(
    logits: torch.Tensor,
    rows: IntArray,
    sequences: SequenceOf[JudgedSequence],
    rule: AcceptanceRule,
) -> IntArray:
    """One token for each of the given sequences' rows, a slice at a time.

    Args:
        logits: [R, V]. rows: indices of the sequences' rows, sequence after sequence.
    """
    counts = np.array([len(s.history.draft_token_ids) + 1 for s in sequences], dtype=np.int64)
    owners = np.repeat(np.arange(len(sequences)), counts)
    places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    sampled = np.empty(len(rows), dtype=np.int64)
    for part in row_slices(len(rows), logits.shape[-1]):
        own = logits[torch.from_numpy(rows[part]).to(logits.device)]
        sampled[part] = _sample_slice(own, owners[part], places[part], sequences, rule)
    return sampled


def _sample_slice(
    logits: torch.Tensor,
    owners: IntArray,
    places: IntArray,
    sequences: SequenceOf[JudgedSequence],
    rule: AcceptanceRule,
) -> IntArray:
    """One token per row.

    Args:
        logits: [n, V].
        owners: [n], each row's index in `sequences`, ascending.
        places: [n], each row's index within its sequence.
    """
    rows = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    starts = np.flatnonzero(np.diff(owners, prepend=-1)).tolist()
    for start, end in itertools.pairwise([*starts, len(owners)]):
        sequence = sequences[owners[start]]
        rows[start:end] = adjusted_logits(
            logits[start:end], sequence.sampling, sequence.history, first_row=int(places[start])
        )
    sampled = rows.argmax(dim=-1).cpu().numpy()
    chosen = np.flatnonzero([not sequences[i].sampling.is_greedy for i in owners])
    if not len(chosen):
        return sampled
    owners, places = owners[chosen], places[chosen]
    probs = row_probs(
        rows[torch.from_numpy(chosen).to(rows.device)], [sequences[i].sampling for i in owners]
    ).cpu()
    del rows
    seeds = np.array([sequences[i].sampling.seed for i in owners], dtype=np.uint64)
    positions = np.array([sequences[i].first_position for i in owners], dtype=np.int64) + places
    if rule is AcceptanceRule.MATCH:
        noise = philox.exponential_noise(seeds, positions, (probs > 0).numpy())
        sampled[chosen] = race(probs, torch.from_numpy(noise)).numpy()
        return sampled
    drafts = np.array(
        [
            (*sequences[i].history.draft_token_ids, PADDING)[place]
            for i, place in zip(owners, places, strict=True)
        ],
        dtype=np.int64,
    )
    accept_uniforms = philox.uniforms(seeds, positions, drafts, philox.Purpose.ACCEPT)
    emit_uniforms = philox.uniforms(seeds, positions, np.zeros_like(drafts), philox.Purpose.EMIT)
    sampled[chosen] = ratio_rows(
        probs,
        torch.from_numpy(drafts),
        torch.from_numpy(accept_uniforms),
        torch.from_numpy(emit_uniforms),
    ).numpy()
    return sampled


def _logprobs(
    logits: torch.Tensor, sequence: JudgedSequence, emitted: IntArray
) -> list[TokenLogprob]:
    """The logprobs of the emitted tokens, each by its row of `logits`."""
    sampling, logprobs = sequence.sampling, []
    for part in row_slices(*logits.shape):
        rows = reported_logprobs(logits[part], sampling, sequence.history, first_row=part.start)
        token_ids = torch.from_numpy(emitted[part]).to(rows.device)
        logprobs += token_logprobs(rows, token_ids, sampling.logprobs or 0)
    return logprobs
