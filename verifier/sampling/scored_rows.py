"""The scores of rows, computed from their logits.

A row is the model's output after one token. A prompt row gives the logprob of the next prompt
token; a draft row gives that of the next draft, and the likeliest tokens.

Shape legend: n rows of one sequence in one step, V vocabulary, H hidden size.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from verifier.sampling.logits_processing import (
    History,
    reported_logprobs,
    row_slices,
    sampling_probs,
)
from verifier.sampling.logprobs import TokenLogprob, token_logprobs
from verifier.sampling.parameters import Sampling

# Limits of one step's scored logits, as float32, and of its events, at `_LOGPROB_BYTES` each: the
# event loop writes the events, and larger ones would block it.
_MAX_LOGITS_BYTES = 128 << 20
_MAX_EVENT_BYTES = 128 << 10
_LOGPROB_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPosition:
    """The scores of one draft row."""

    top_token_id: int
    # Of the draft after this row; None after the last draft.
    draft: TokenLogprob | None
    top: tuple[TokenLogprob, ...]
    # On request, on the CPU: the distribution that would be sampled, [V] float32; the logprobs that
    # `draft` and `top` are of, [V] float32; the output layer's input, [H].
    probs: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    hidden_state: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Scores of one sequence in one step; either list may be empty."""

    # Of the prompt token after each prompt row.
    prompt_logprobs: list[TokenLogprob]
    # Of each draft row.
    positions: list[ScoredPosition]


def max_rows_per_step(*, vocab_size: int, max_logprobs: int) -> int:
    """How many rows a step may score: it bounds the step's logits and events."""
    by_logits = _MAX_LOGITS_BYTES // (4 * vocab_size)
    by_events = _MAX_EVENT_BYTES // (_LOGPROB_BYTES * (max_logprobs + 1))
    return max(8, min(by_logits, by_events))


def are_finite(logits: torch.Tensor) -> bool:
    """Whether every row [n, V] has a finite largest logit and no NaN."""
    return bool(torch.isfinite(logits.amax(dim=-1)).all())


def prompt_logprobs(
    logits: torch.Tensor, token_ids: SequenceOf[int], *, first_row: int, sampling: Sampling,
    num_top: int,
) -> list[TokenLogprob]:  # fmt: skip
    """The logprob of each prompt token, given the tokens before it.

    Parameters apply as to a first output token: penalties that count output tokens count none.

    Args:
        logits: [n, V] of the rows at positions first_row, first_row + 1 ...
        token_ids: the prompt, the token after the last row included.
    """
    parameters = dataclasses.replace(
        sampling, frequency_penalty=0.0, presence_penalty=0.0, min_new_tokens=0
    )
    scored: list[TokenLogprob] = []
    for rows in row_slices(len(logits), logits.shape[-1]):
        start, part = rows.start, logits[rows]
        position = first_row + start
        followers = list(token_ids[position + 1 : position + 1 + len(part)])
        history = History(
            prompt_token_ids=token_ids[: position + 1],
            output_token_ids=(),
            draft_token_ids=followers[:-1],
        )
        logprobs = reported_logprobs(part, parameters, history)
        ids = torch.tensor(followers, dtype=torch.int64, device=logprobs.device)
        scored += token_logprobs(logprobs, ids, num_top)
    return scored


def draft_positions(
    logits: torch.Tensor, *, prompt_token_ids: SequenceOf[int], draft_token_ids: SequenceOf[int],
    first_draft: int, sampling: Sampling, stop_token_ids: frozenset[int], num_top: int,
    keeps_distributions: bool = False, hidden_states: torch.Tensor | None = None,
) -> list[ScoredPosition]:  # fmt: skip
    """The scores after `prompt + drafts[:j]`, for j from `first_draft` on.

    Args:
        logits: [n, V] of these rows.
        draft_token_ids: all drafts of the sequence.
        keeps_distributions: whether the scores contain the rows' distributions.
        hidden_states: [n, H] of these rows, on the CPU, if the scores shall contain them.
    """
    positions: list[ScoredPosition] = []
    for rows in row_slices(len(logits), logits.shape[-1]):
        start, part = rows.start, logits[rows]
        first = first_draft + start
        followers = list(draft_token_ids[first : first + len(part)])
        history = History(
            prompt_token_ids=prompt_token_ids,
            output_token_ids=draft_token_ids[:first],
            draft_token_ids=draft_token_ids[first : first + len(part) - 1],
            stop_token_ids=stop_token_ids,
        )
        logprobs = reported_logprobs(part, sampling, history)
        top_ids = logprobs.argmax(dim=-1)
        ids = top_ids.clone()
        ids[: len(followers)] = torch.tensor(followers, dtype=torch.int64, device=ids.device)
        scores = token_logprobs(logprobs, ids, num_top)
        probs = sampling_probs(part, sampling, history).cpu() if keeps_distributions else None
        kept_logprobs = logprobs.float().cpu() if keeps_distributions else None
        states = None if hidden_states is None else hidden_states[rows]
        for row, (top_token_id, each) in enumerate(zip(top_ids.tolist(), scores, strict=True)):
            draft = dataclasses.replace(each, top=()) if row < len(followers) else None
            positions.append(
                ScoredPosition(
                    top_token_id=top_token_id,
                    draft=draft,
                    top=each.top,
                    probs=None if probs is None else probs[row],
                    logprobs=None if kept_logprobs is None else kept_logprobs[row],
                    hidden_state=None if states is None else states[row],
                )
            )
    return positions
