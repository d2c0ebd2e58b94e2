"""Which drafts stand, and what is emitted: rejection sampling with a deterministic draft.

The draft is a given token, so its law is a point mass, and two rules keep the output's law the
model's:

- `match` (default): at every position the target is sampled with noise that depends on seed,
  position and token only; the sample is emitted; as long as it equals the draft, the next position
  is judged too. For a fixed seed the output is then the same with and without drafts.
- `ratio`: a draft is accepted with the target's probability of it; on rejection the target is
  sampled without the draft. (Leviathan et al., "Fast inference from transformers via speculative
  decoding", ICML 2023, with a point mass for the draft's law.)

Both come down to one sampled token per row, kept up to and including the first that differs from
its draft: `accept`.

Shape legend: B sequences, K_i drafts of sequence i, P = sum K_i, R = P + B rows: each sequence's
K_i draft rows, then its bonus row. V vocabulary.
"""

import enum
import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from verifier.sampling import philox
from verifier.sampling.logits_processing import (
    History,
    adjusted_logits,
    reported_logprobs,
    row_probs,
    row_slices,
)
from verifier.sampling.parameters import Sampling

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

PADDING = -1


class AcceptanceRule(enum.Enum):
    MATCH = "match"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's logprob and rank (1: the likeliest), and the n likeliest with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSequence:
    """What a sequence's rows are judged by."""

    sampling: Sampling
    history: History
    # Absolute position of the token that its first row samples.
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one step decided for its sequences, in batch order."""

    output_token_ids: IntArray  # [B, K_max + 1]: accepted drafts and one more, then -1
    num_accepted_tokens: IntArray  # [B]
    # [B]; False: the row behind the accepted drafts is not usable, so they are all the output.
    is_finite: BoolArray
    # By index in the batch, of the sequences that asked: one per emitted token.
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
    """Judges all drafts of a step and samples one further token per sequence.

    What is in a sequence's rows behind the first draft that is not accepted changes nothing.

    Args:
        logits: [R, V], any float dtype and device.
        sequences: B of them.
        draft_token_ids: [P]; ids outside the vocabulary are never accepted.
        num_draft_tokens: [B].
        is_usable: [R]; False: not to be used, whatever its logits. None: all may be.
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
        accept_uniforms: [P], one per draft; it stands if its uniform is below its probability.
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
    """One token per row [R] under rule `ratio`: the draft where it stands, else another.

    Args:
        probs: [R, V].
        row_drafts: [R] int64, the draft that each row judges; -1, or any id that is not in the
            vocabulary: none that could stand.
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
        is_usable: [R]; a sequence's samples end before the first that is not. None: all are.

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


def _likeliest_of_rows(logits: torch.Tensor) -> tuple[IntArray, BoolArray]:
    """The likeliest token of each row, the lowest id of equals, and whether the row is finite: its
    largest logit is, and none is NaN.
    """
    if logits.device.type == "cpu":
        # torch's maximum with its place takes several times as long.
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
        logits: [R, V]. rows: which of them are theirs, one sequence's after another's.
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
        owners: [n], which sequence each row is of, in order.
        places: [n], which of the sequence's rows it is.
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
    """Of each emitted token, by the law of its row; `logits` are those of these rows."""
    sampling, told = sequence.sampling, []
    for part in row_slices(*logits.shape):
        logprobs = reported_logprobs(logits[part], sampling, sequence.history, first_row=part.start)
        token_ids = torch.from_numpy(emitted[part]).to(logprobs.device)
        told += token_logprobs(logprobs, token_ids, sampling.logprobs or 0)
    return told


def token_logprobs(
    logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> list[TokenLogprob]:
    """Logprob and rank of one token per row, and of the row's likeliest.

    Args:
        logprobs: [R, V]. token_ids: [R]. num_top: how many of the likeliest; among equals the
            lower id comes first.
    """
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, ids = _likeliest(logprobs, min(num_top, logprobs.shape[-1]))
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top=tuple(
                TokenLogprob(token_id=i, logprob=v, rank=r)
                for r, (i, v) in enumerate(zip(top_ids, top_values, strict=True), start=1)
            ),
        )
        for token_id, logprob, rank, top_ids, top_values in zip(
            token_ids.tolist(),
            own[:, 0].tolist(),
            ranks.tolist(),
            ids.tolist(),
            values.tolist(),
            strict=True,
        )
    ]


def _likeliest(logprobs: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [R, num_top] of the largest of each row [R, V], lower ids first among equals.

    `topk` leaves open which of several equals it takes, and sorting whole rows is slow.
    """
    if num_top == 0:
        return logprobs[:, :0], logprobs[:, :0].long()
    smallest = logprobs.topk(num_top, dim=-1).values[:, -1:]
    is_above, is_equal = logprobs > smallest, logprobs == smallest
    num_equals = num_top - is_above.sum(dim=-1, keepdim=True)
    is_taken = is_above | (is_equal & (is_equal.cumsum(dim=-1) <= num_equals))
    ids = is_taken.nonzero()[:, 1].view(len(logprobs), num_top)
    values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


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
