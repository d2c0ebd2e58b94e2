"""What came in -> what is run, or an error that names the field.

Owns every rule that a request must keep beyond the .proto files' own limits on how much it holds,
which have been checked before; in terms of the proto's field paths. Pure. In two parts,
because a request that is wrong by itself is refused before anything is spent on it:
`check_request` needs nothing but the request, `accept` needs the model and the prompt's tokens.
"""

import dataclasses
import math
import secrets
from collections.abc import Collection, Mapping, Sequence

from gateway.errors import InvalidRequestError, UnsupportedFieldError
from gateway.request import (
    AcceptedRequest,
    GenerateRequest,
    Model,
    NgramParams,
    Overlap,
    SamplingParams,
    SpeculationParams,
    Tie,
)

MAX_CHOICES = 16
MAX_NGRAM = 32
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_PRIORITY = 2**31 - 1
# Of one prompt, each with the likeliest ones beside it; the verifier's bound is the same.
MAX_PROMPT_LOGPROBS = 1 << 17
# Where a draft is as long as it may be, whatever it matches: what is likely right of it.
FIXED_NUM_SPECULATIVE_TOKENS = 7
# The product's best figure for `Tie.LONGEST`; `benchmarks.drafter` compares some.
DEFAULT_TOKENS_PER_MATCH = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What this gateway adds to requests, and what it lets pass.

    Attributes:
        num_speculative_tokens: where a request says nothing; at most the model's limit counts.
            None: as many as that, if the draft's length follows its match, so that a long one
            is likely right; else `FIXED_NUM_SPECULATIVE_TOKENS`.
        tie: where a request says nothing.
        tokens_per_match: likewise, with `Tie.LONGEST`; 0 lets a draft be as long as is asked for,
            whatever it matches.
        tenant: whose pools are drafted from and whose cached prefixes are shared. One for all,
            until requests are authenticated.
        tokenizer_digest: of the gateway's tokenizer; "": it has none.
        max_prompt_tokens: None for what the model's limit leaves.
    """

    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    tie: Tie = Tie.LONGEST
    tokens_per_match: int = DEFAULT_TOKENS_PER_MATCH
    tenant: str = ""
    max_prompt_tokens: int | None = None
    tokenizer_digest: str = ""


def check_request(request: GenerateRequest, *, has_tokenizer: bool) -> None:
    """Refuses what is wrong whatever the model.

    Raises:
        InvalidRequestError: a value is out of range.
        UnsupportedFieldError: a field asks for what this gateway cannot do (yet).
    """
    _check_prompt_is_there(request, has_tokenizer=has_tokenizer)
    if request.max_new_tokens is not None and request.max_new_tokens < 1:
        raise InvalidRequestError(
            "max_new_tokens must be at least 1, not 0", field="max_new_tokens"
        )
    _check_stops(request, has_tokenizer=has_tokenizer)
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


def find_model(model_id: str, models: Mapping[str, Model]) -> Model:
    """The model that is asked for.

    Args:
        model_id: "" for the only one.
        models: those served now, by id; not empty.

    Raises:
        InvalidRequestError: it is not served, or there are several and none was named.
    """
    if not model_id and len(models) == 1:
        return next(iter(models.values()))
    served = ", ".join(sorted(models))
    if not model_id:
        raise InvalidRequestError(f"name one of the models served: {served}", field="model_id")
    if model_id not in models:
        raise InvalidRequestError(f"{model_id!r} is not served; served: {served}", field="model_id")
    return models[model_id]


def most_prompt_tokens(model: Model, defaults: RequestDefaults) -> int:
    """The longest prompt that leaves room for output."""
    most = model.max_model_len - 1
    return most if defaults.max_prompt_tokens is None else min(most, defaults.max_prompt_tokens)


def too_long(
    num_tokens: int, model: Model, defaults: RequestDefaults, field: str
) -> InvalidRequestError:
    """The error of a prompt of more than `most_prompt_tokens`, which `field` holds."""
    if num_tokens >= model.max_model_len:
        return InvalidRequestError(
            f"the prompt of {num_tokens} tokens is too long: the model's limit of "
            f"{model.max_model_len} leaves no room for output",
            field=field,
        )
    return InvalidRequestError(
        f"the prompt of {num_tokens} tokens is over this server's limit of "
        f"{defaults.max_prompt_tokens}",
        field=field,
    )


def has_tokenizer_of(model: Model, defaults: RequestDefaults) -> bool:
    """Whether the gateway's tokenizer is the model's; a model that does not say is believed."""
    return model.tokenizer_digest in ("", defaults.tokenizer_digest)


def check_tokenizer(request: GenerateRequest, *, model: Model, defaults: RequestDefaults) -> None:
    """Refuses text where the gateway would make other tokens of it than the model was made for.

    Raises:
        UnsupportedFieldError: the tokenizer is another model's.
    """
    if has_tokenizer_of(model, defaults):
        return
    for field, is_used in (
        ("text", request.text is not None),
        ("stop_sequences", bool(request.stop_sequences)),
    ):
        if is_used:
            raise UnsupportedFieldError(
                f"this server's tokenizer is not that of {model.model_id}; send token ids",
                field=field,
            )


def accept(
    request: GenerateRequest,
    *,
    prompt_token_ids: Sequence[int],
    model: Model,
    defaults: RequestDefaults,
) -> AcceptedRequest:
    """Checks a request against its model and fills in what it leaves open.

    Args:
        request: has passed `check_request`, and has an id.
        prompt_token_ids: the prompt, whichever way it was given.
        model: what it will run on.
        defaults: the gateway's.

    Raises:
        InvalidRequestError: something does not fit the model.
    """
    prompt_field = "text" if request.text is not None else "tokens.token_ids"
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt has no tokens", field=prompt_field)
    num_prompt_tokens = len(prompt_token_ids)
    # Before anything that looks at each token.
    if num_prompt_tokens > most_prompt_tokens(model, defaults):
        raise too_long(num_prompt_tokens, model, defaults, prompt_field)
    _check_ids(prompt_field, prompt_token_ids, model.vocab_size)
    _check_ids("output_token_ids", request.output_token_ids, model.vocab_size)
    _check_ids("stop_token_ids", request.stop_token_ids, model.vocab_size)
    _check_ids("sampling.logit_bias", request.sampling.logit_bias, model.vocab_size)
    num_given_tokens = len(request.output_token_ids)
    room = model.max_model_len - num_prompt_tokens
    if request.sampling.prompt_logprobs is not None:
        num_logprobs = num_prompt_tokens * (request.sampling.prompt_logprobs + 1)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"{num_logprobs} logprobs of {num_prompt_tokens} tokens are over the limit of "
                f"{MAX_PROMPT_LOGPROBS}",
                field="sampling.prompt_logprobs",
            )
    max_new_tokens = min(room, request.max_new_tokens or room)
    if num_given_tokens >= max_new_tokens:
        raise InvalidRequestError(
            f"with {num_given_tokens} output tokens of at most {max_new_tokens} there is nothing "
            "left to generate",
            field="output_token_ids",
        )
    ngram = _ngram(request.speculation, defaults)
    return AcceptedRequest(
        request_id=request.request_id,
        model_id=model.model_id,
        model_digest=model.model_digest,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=request.sampling,
        seed=secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed,
        max_new_tokens=max_new_tokens,
        stop_sequences=request.stop_sequences,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        num_choices=1 if request.num_choices is None else request.num_choices,
        num_speculative_tokens=_num_speculative_tokens(request.speculation, ngram, model, defaults),
        ngram=ngram,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        affinity_key=request.affinity_key,
        priority=request.priority,
        cache_salt=cache_salt(defaults.tenant),
        has_text=has_tokenizer_of(model, defaults),
    )


def _check_prompt_is_there(request: GenerateRequest, *, has_tokenizer: bool) -> None:
    if request.text is not None:
        if not request.text:
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
            low=0.0,
            low_is_allowed=False,
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
    if speculation.overlap not in {int(overlap) for overlap in Overlap}:
        raise InvalidRequestError(
            f"overlap has no value {speculation.overlap}", field="speculation.overlap"
        )
    if speculation.tie not in {int(tie) for tie in Tie}:
        raise InvalidRequestError(f"tie has no value {speculation.tie}", field="speculation.tie")


def _num_speculative_tokens(
    speculation: SpeculationParams, ngram: NgramParams, model: Model, defaults: RequestDefaults
) -> int:
    wanted = speculation.num_speculative_tokens
    limit = model.max_num_speculative_tokens
    if wanted is not None and wanted > limit:
        raise InvalidRequestError(
            f"at most {limit} draft tokens are verified per step, not {wanted}",
            field="speculation.num_speculative_tokens",
        )
    if speculation.enabled is False:
        return 0
    if wanted is not None:
        return wanted
    if defaults.num_speculative_tokens is not None:
        return min(defaults.num_speculative_tokens, limit)
    follows_match = ngram.tie is Tie.LONGEST and ngram.tokens_per_match != 0
    return limit if follows_match else min(FIXED_NUM_SPECULATIVE_TOKENS, limit)


def _ngram(speculation: SpeculationParams, defaults: RequestDefaults) -> NgramParams:
    shortest, longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    min_ngram = defaults.prompt_lookup_min if shortest is None else shortest
    max_ngram = defaults.prompt_lookup_max if longest is None else longest
    if min_ngram > max_ngram:
        name = "prompt_lookup_max" if shortest is None else "prompt_lookup_min"
        raise InvalidRequestError(
            f"the shortest n-gram, {min_ngram}, is longer than the longest, {max_ngram}",
            field=f"speculation.{name}",
        )
    tie = Tie(speculation.tie) or defaults.tie
    tokens_per_match = speculation.tokens_per_match
    if tokens_per_match is None and tie is Tie.LONGEST:
        tokens_per_match = defaults.tokens_per_match
    return NgramParams(
        min_ngram=min_ngram,
        max_ngram=max_ngram,
        overlap=Overlap(speculation.overlap),
        tie=tie,
        tokens_per_match=tokens_per_match,
        pool_id=pool_id(defaults.tenant, speculation.pool),
    )


def pool_id(tenant: str, pool: str) -> str:
    """The drafter's name for a tenant's pool: no tenant can name another's.

    The tenant is the server's word, never the client's. Its length comes first, so that no two
    pairs have one name.
    """
    return f"{cache_salt(tenant)}{pool}" if pool else ""


def cache_salt(tenant: str) -> str:
    """What a verifier keeps a tenant's cached prefixes apart by; never the client's word either."""
    return f"{len(tenant)}:{tenant}/"


def _check_range(
    field: str,
    value: float,
    *,
    low: float,
    high: float = math.inf,
    low_is_allowed: bool = True,
) -> None:
    # Written so that NaN fails it, and infinity where there is no upper bound.
    is_above = value >= low if low_is_allowed else value > low
    if not (is_above and value <= high and math.isfinite(value)):
        bracket = "[" if low_is_allowed else "("
        end = f"{high:g}]" if math.isfinite(high) else "infinity)"
        name = field.rpartition(".")[2]
        raise InvalidRequestError(
            f"{name} must be in {bracket}{low:g}, {end}, not {value:g}", field=field
        )


def _check_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}", field=field
        )
