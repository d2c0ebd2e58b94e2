"""The rules that a request must keep whatever its model.

Owns every rule beyond the .proto files' own size limits, which have been checked before; errors
name the proto's field paths. Pure. `acceptance.py` holds the rules that need the model and the
prompt's tokens: a request that is wrong by itself is refused before any work is spent on it.
"""

import math

from gateway.errors import InvalidRequestError, UnsupportedFieldError
from gateway.messages.request import (
    Algorithm,
    GenerateRequest,
    Keep,
    Overlap,
    SamplingParams,
    SpeculationParams,
    Tie,
)
from gateway.requests.drafting_policy import Preset

MAX_CHOICES = 16
MAX_NGRAM = 32
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_PRIORITY = 2**31 - 1


def check_request(
    request: GenerateRequest, *, has_tokenizer: bool, allow_trace: bool = False
) -> None:
    """Refuses a request that no model can run.

    Raises:
        InvalidRequestError: a value is out of range.
        UnsupportedFieldError: a field asks for what this gateway cannot do (yet).
    """
    if request.unknown_field:
        raise UnsupportedFieldError(
            f"this version does not know field {request.unknown_field}",
            field=request.unknown_field,
        )
    if request.trace and not allow_trace:
        raise UnsupportedFieldError(
            "this server does not trace steps: --allow-trace", field="trace"
        )
    _check_prompt(request, has_tokenizer=has_tokenizer)
    if request.max_new_tokens is not None and request.max_new_tokens < 1:
        raise InvalidRequestError(
            "max_new_tokens must be at least 1, not 0", field="max_new_tokens"
        )
    _check_stops(request, has_tokenizer=has_tokenizer)
    if request.report_tokens and not has_tokenizer:
        raise UnsupportedFieldError("this server has no tokenizer", field="report_tokens")
    if request.num_choices is not None and not 1 <= request.num_choices <= MAX_CHOICES:
        raise InvalidRequestError(
            f"n must be from 1 to {MAX_CHOICES}, not {request.num_choices}", field="n"
        )
    if not -MAX_PRIORITY - 1 <= request.priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be a 32-bit integer, not {request.priority}", field="priority"
        )
    _check_sampling(request.sampling)
    _check_speculation(request.speculation)
    _check_feeding(request.speculation)


def _check_prompt(request: GenerateRequest, *, has_tokenizer: bool) -> None:
    if request.text is not None or request.conversation is not None:
        if request.text == "":
            raise InvalidRequestError("the prompt is empty", field="text")
        if not has_tokenizer:
            raise UnsupportedFieldError(
                "this server has no tokenizer; send token ids", field="text"
            )
    elif request.prompt_token_ids is None:
        raise InvalidRequestError("there is no prompt; give text or tokens", field="prompt")
    elif not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty", field="tokens.token_ids")


def _check_stops(request: GenerateRequest, *, has_tokenizer: bool) -> None:
    for index, stop in enumerate(request.stop_sequences):
        if not stop:
            raise InvalidRequestError(
                "a stop sequence must not be empty", field=f"stop_sequences[{index}]"
            )
    if request.stop_sequences and not has_tokenizer:
        raise UnsupportedFieldError("this server has no tokenizer", field="stop_sequences")


def _check_sampling(sampling: SamplingParams) -> None:
    _check_range("sampling.temperature", sampling.temperature, low=0.0)
    if sampling.top_p is not None:
        _check_range("sampling.top_p", sampling.top_p, low=0.0, high=1.0, low_is_allowed=False)
    _check_range("sampling.min_p", sampling.min_p, low=0.0, high=1.0)
    if sampling.repetition_penalty is not None:
        _check_range(
            "sampling.repetition_penalty",
            sampling.repetition_penalty,
            # Beyond, logits would not be finite.
            low=1e-6,
            high=1e6,
        )
    for field, penalty in (
        ("sampling.frequency_penalty", sampling.frequency_penalty),
        ("sampling.presence_penalty", sampling.presence_penalty),
    ):
        _check_range(field, penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
    for bias in sampling.logit_bias.values():
        _check_range("sampling.logit_bias", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
    if sampling.logprobs_mode not in (0, 1, 2):
        raise InvalidRequestError(
            f"logprobs_mode has no value {sampling.logprobs_mode}", field="sampling.logprobs_mode"
        )


def _check_speculation(speculation: SpeculationParams) -> None:
    for field, ngram in (
        ("speculation.prompt_lookup_min", speculation.prompt_lookup_min),
        ("speculation.prompt_lookup_max", speculation.prompt_lookup_max),
    ):
        if ngram is not None and not 1 <= ngram <= MAX_NGRAM:
            raise InvalidRequestError(
                f"an n-gram has from 1 to {MAX_NGRAM} tokens, not {ngram}", field=field
            )
    for field, value, known in (
        ("overlap", speculation.overlap, Overlap),
        ("tie", speculation.tie, Tie),
        ("algorithm", speculation.algorithm, Algorithm),
        ("preset", speculation.preset, Preset),
    ):
        if value not in {int(each) for each in known}:
            raise InvalidRequestError(f"{field} has no value {value}", field=f"speculation.{field}")
    if speculation.pool_min_ngram is not None and not speculation.pool:
        raise InvalidRequestError("pool_min_ngram needs a pool", field="speculation.pool_min_ngram")


def _check_feeding(speculation: SpeculationParams) -> None:
    """Refuses text that the request's pool cannot be fed."""
    if speculation.pool_keep not in {int(keep) for keep in Keep}:
        raise InvalidRequestError(
            f"pool_keep has no value {speculation.pool_keep}", field="speculation.pool_keep"
        )
    keeps_nothing = speculation.pool_keep == Keep.NOTHING
    for name, is_given in (
        ("pool_keep", speculation.pool_keep != Keep.DEFAULT),
        ("pool_keep_cancelled", speculation.pool_keep_cancelled),
    ):
        if is_given and not speculation.pool:
            raise InvalidRequestError(f"{name} needs a pool", field=f"speculation.{name}")
        if is_given and keeps_nothing and name != "pool_keep":
            raise InvalidRequestError(
                f"{name} contradicts pool_keep KEEP_NOTHING", field=f"speculation.{name}"
            )


def _check_range(
    field: str,
    value: float,
    *,
    low: float,
    high: float = math.inf,
    low_is_allowed: bool = True,
) -> None:
    # Also fails for NaN, and for infinity without an upper bound.
    is_above = value >= low if low_is_allowed else value > low
    if not (is_above and value <= high and math.isfinite(value)):
        bracket = "[" if low_is_allowed else "("
        end = f"{high:g}]" if math.isfinite(high) else "infinity)"
        name = field.rpartition(".")[2]
        raise InvalidRequestError(
            f"{name} must be in {bracket}{low:g}, {end}, not {value:g}", field=field
        )
