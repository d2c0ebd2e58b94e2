"""The scores of rows, computed from their logits.

A row is the model's output after one token. A prompt row gives the logprob of the next prompt
token; a draft row gives that of the next draft, and the likeliest tokens.

Shape legend: n rows of one sequence in one step, V vocabulary, H hidden size.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from tandem.values import TokenLogprob
from verifier.sampling.adjustments import LogitsArray
from verifier.sampling.logits_processing import (
    FloatArray,
    History,
    reported_logprobs,
    sampling_probs,
)
from verifier.sampling.logprobs import token_logprobs
from verifier.sampling.parameters import Sampling

#: The likeliest tokens per position whose logprobs a request may ask for; OpenAI's limit.
MAX_LOGPROBS = 20

# Limits of one step's scored logits, as float32, and of its events, at `_LOGPROB_BYTES` each: the
# event loop writes the events, and larger ones would block it.
_MAX_LOGITS_BYTES = 128 << 20
_MAX_EVENT_BYTES = 128 << 10
_LOGPROB_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPosition:
    """The scores of one draft row."""

    top_token_id: int
    # The logprob of the draft after this row; None after the last draft.
    draft: TokenLogprob | None
    top: tuple[TokenLogprob, ...]
    # On request: the distribution that would be sampled, [V] float32; the logprobs that
    # `draft` and `top` are of, [V] float32; the output layer's input, [H].
    probs: FloatArray | None = None
    logprobs: FloatArray | None = None
    hidden_state: FloatArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Scores of one sequence in one step; either list may be empty."""

    # One for each prompt row, of the prompt token after it.
    prompt_logprobs: list[TokenLogprob]
    # One for each draft row.
    positions: list[ScoredPosition]


def max_rows_per_step(*, vocab_size: int, max_logprobs: int) -> int:
    """How many rows a step may score: it bounds the step's logits and events."""
    by_logits = _MAX_LOGITS_BYTES // (4 * vocab_size)
    by_events = _MAX_EVENT_BYTES // (_LOGPROB_BYTES * (max_logprobs + 1))
    return max(8, min(by_logits, by_events))


def are_finite(logits: LogitsArray) -> bool:
    """Whether every row [n, V] has a finite largest logit and no NaN."""
    return bool(np.isfinite(logits.max(axis=-1)).all())


def prompt_logprobs(
    logits: LogitsArray, token_ids: SequenceOf[int], *, first_row: int, sampling: Sampling,
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
    end = first_row + len(logits)
    followers = np.array(token_ids[first_row + 1 : end + 1], dtype=np.int64)
    history = History.of(
        parameters,
        prompt_token_ids=token_ids[: first_row + 1],
        output_token_ids=(),
        draft_token_ids=token_ids[first_row + 1 : end],
    )
    return token_logprobs(reported_logprobs(logits, parameters, history, followers, num_top))


def draft_positions(
    logits: LogitsArray, *, prompt_token_ids: SequenceOf[int], draft_token_ids: SequenceOf[int],
    first_draft: int, sampling: Sampling, stop_token_ids: frozenset[int], num_top: int,
    keeps_distributions: bool = False, hidden_states: FloatArray | None = None,
) -> list[ScoredPosition]:  # fmt: skip
    """The scores after `prompt + drafts[:j]`, for j from `first_draft` on.

    Args:
        logits: [n, V] of these rows.
        draft_token_ids: all drafts of the sequence.
        keeps_distributions: whether the scores contain the rows' distributions.
        hidden_states: [n, H] of these rows, if the scores shall contain them.
    """
    num_rows, last = len(logits), first_draft + len(logits) - 1
    followers = np.full(num_rows, -1, dtype=np.int64)
    known = draft_token_ids[first_draft : last + 1]
    followers[: len(known)] = known
    history = History.of(
        sampling,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=draft_token_ids[:first_draft],
        draft_token_ids=draft_token_ids[first_draft:last],
        stop_token_ids=stop_token_ids,
    )
    rows = reported_logprobs(
        logits, sampling, history, followers, max(1, num_top), keeps_all=keeps_distributions
    )
    probs = sampling_probs(logits, sampling, history) if keeps_distributions else None
    return [
        ScoredPosition(
            top_token_id=each.top[0].token_id,
            draft=dataclasses.replace(each, top=()) if row < len(known) else None,
            top=each.top[:num_top],
            probs=None if probs is None else probs[row],
            logprobs=rows.all_logprobs[row] if keeps_distributions else None,
            hidden_state=None if hidden_states is None else hidden_states[row],
        )
        for row, each in enumerate(token_logprobs(rows))
    ]
