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
from gateway.messages.request import (
    AcceptedRequest,
    Algorithm,
    GenerateRequest,
    Keep,
    NgramParams,
    Overlap,
    SamplingParams,
    SpeculationParams,
    Tie,
)
from gateway.messages.response import Model
from gateway.requests.drafting_policy import LAWS, TANDEM, DraftingLaw, Preset

MAX_CHOICES = 16
MAX_NGRAM = 32
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_PRIORITY = 2**31 - 1
# A pool that is fed fewer tokens at a time is kept busy by the tokens around them.
MIN_POOL_FEED_TOKENS = 16
# Of one prompt, each with the likeliest ones beside it; the verifier's bound is the same.
MAX_PROMPT_LOGPROBS = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What this gateway adds to requests, and what it lets pass.

    Attributes:
        law: of drafting, where a request names no preset.
        hint_tokens: most draft tokens that a drafter is asked for at a time.
        tenant: whose pools are drafted from and whose cached prefixes are shared. One for all,
            until requests are authenticated.
        tokenizer_digest: of the gateway's tokenizer; "": it has none.
        max_prompt_tokens: None for what the model's limit leaves.
    """

    law: DraftingLaw = TANDEM
    hint_tokens: int = 64
    tenant: str = ""
    max_prompt_tokens: int | None = None
    tokenizer_digest: str = ""


def check_request(
    request: GenerateRequest, *, has_tokenizer: bool, allow_trace: bool = False
) -> None:
    """Refuses what is wrong whatever the model.

    Raises:
        InvalidRequestError: a value is out of range.
        UnsupportedFieldError: a field asks for what this gateway cannot do (yet).
    """
    if request.trace and not allow_trace:
        raise UnsupportedFieldError("this server tells of no steps", field="trace")
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
    _check_scope(request)
    _check_feeding(request)


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
    law = _law(request.speculation, model, defaults)
    num_speculative_tokens = (
        0
        if request.speculation.enabled is False
        else law.most_drafts(model.max_num_speculative_tokens)
    )
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
        num_speculative_tokens=num_speculative_tokens,
        ngram=NgramParams(
            min_ngram=law.min_ngram,
            max_ngram=law.max_ngram,
            overlap=law.overlap,
            tie=law.tie,
            tokens_per_match=law.tokens_per_match,
            algorithm=law.algorithm,
            chained=law.chained,
            pool_id=pool_id(defaults.tenant, request.speculation.pool),
            pool_min_ngram=law.pool_min_ngram,
            pool_keep=Keep(request.speculation.pool_keep) or Keep.OUTPUT,
            pool_feed_tokens=request.speculation.pool_feed_tokens,
        ),
        hint_tokens=_hint_tokens(request.speculation, law, num_speculative_tokens, defaults),
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        affinity_key=request.affinity_key,
        priority=request.priority,
        cache_salt=cache_salt(defaults.tenant),
        pool_keep_cancelled=request.speculation.pool_keep_cancelled,
        has_text=has_tokenizer_of(model, defaults),
        trace=request.trace,
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
    for field, value, known in (
        ("overlap", speculation.overlap, Overlap),
        ("tie", speculation.tie, Tie),
        ("algorithm", speculation.algorithm, Algorithm),
        ("preset", speculation.preset, Preset),
    ):
        if value not in {int(each) for each in known}:
            raise InvalidRequestError(f"{field} has no value {value}", field=f"speculation.{field}")
    if speculation.pool_min_ngram is not None and not speculation.pool:
        raise InvalidRequestError("it needs a pool", field="speculation.pool_min_ngram")


def _check_feeding(request: GenerateRequest) -> None:
    """Refuses what of a request's text its pool cannot be fed, or not so."""
    speculation = request.speculation
    feed_tokens = speculation.pool_feed_tokens
    if speculation.pool_keep not in {int(keep) for keep in Keep}:
        raise InvalidRequestError(
            f"pool_keep has no value {speculation.pool_keep}", field="speculation.pool_keep"
        )
    keeps_nothing = speculation.pool_keep == Keep.NOTHING
    for name, is_given in (
        ("pool_keep", speculation.pool_keep != Keep.DEFAULT),
        ("pool_feed_tokens", feed_tokens > 0),
        ("pool_keep_cancelled", speculation.pool_keep_cancelled),
    ):
        if is_given and not speculation.pool:
            raise InvalidRequestError("there is no pool to feed", field=f"speculation.{name}")
        if is_given and keeps_nothing and name != "pool_keep":
            raise InvalidRequestError(
                "KEEP_NOTHING leaves nothing to feed", field=f"speculation.{name}"
            )
    if 0 < feed_tokens < MIN_POOL_FEED_TOKENS:
        raise InvalidRequestError(
            f"a pool is fed at least {MIN_POOL_FEED_TOKENS} tokens at a time, not {feed_tokens}",
            field="speculation.pool_feed_tokens",
        )
    if feed_tokens and request.stop_sequences:
        # Drafters have the tokens before it is known where their text ends.
        raise InvalidRequestError(
            "with stop sequences a pool is fed at the end only: what lies behind one must not be "
            "fed",
            field="speculation.pool_feed_tokens",
        )


def _check_scope(request: GenerateRequest) -> None:
    """Refuses what this server will not do, whatever its version."""
    for field, is_asked_for, what in (
        ("sampling.num_beams", request.sampling.num_beams > 1, "beam search"),
        ("speculation.tree_width", request.speculation.tree_width > 1, "drafts that branch"),
        ("adapter_id", bool(request.adapter_id), "adapters (LoRA)"),
        ("media", request.has_media, "images, sound and video"),
    ):
        if is_asked_for:
            raise UnsupportedFieldError(f"Tandem does not do {what}", field=field)


def _law(speculation: SpeculationParams, model: Model, defaults: RequestDefaults) -> DraftingLaw:
    """The law that a request asks for."""
    base = LAWS[Preset(speculation.preset)] if speculation.preset else defaults.law
    law = base.changed(
        min_ngram=speculation.prompt_lookup_min,
        max_ngram=speculation.prompt_lookup_max,
        overlap=Overlap(speculation.overlap),
        tie=Tie(speculation.tie),
        tokens_per_match=speculation.tokens_per_match,
        algorithm=Algorithm(speculation.algorithm),
        chained=speculation.chained,
        pool_min_ngram=speculation.pool_min_ngram,
        num_speculative_tokens=speculation.num_speculative_tokens,
    )
    if law.min_ngram > law.max_ngram:
        name = "prompt_lookup_max" if speculation.prompt_lookup_min is None else "prompt_lookup_min"
        raise InvalidRequestError(
            f"the shortest n-gram, {law.min_ngram}, is longer than the longest, {law.max_ngram}",
            field=f"speculation.{name}",
        )
    if speculation.tokens_per_match and law.tie is not Tie.LONGEST:
        raise InvalidRequestError(
            "it counts with TIE_LONGEST only", field="speculation.tokens_per_match"
        )
    wanted, limit = speculation.num_speculative_tokens, model.max_num_speculative_tokens
    if wanted is not None and wanted > limit:
        raise InvalidRequestError(
            f"at most {limit} draft tokens are verified per step, not {wanted}",
            field="speculation.num_speculative_tokens",
        )
    return law


def _hint_tokens(
    speculation: SpeculationParams,
    law: DraftingLaw,
    num_speculative_tokens: int,
    defaults: RequestDefaults,
) -> int:
    wanted = speculation.hint_tokens
    if wanted is None:
        wanted = defaults.hint_tokens if law.runs_ahead else num_speculative_tokens
        return max(1, min(wanted, defaults.hint_tokens))
    if not 1 <= wanted <= defaults.hint_tokens:
        raise InvalidRequestError(
            f"a drafter is asked for 1 to {defaults.hint_tokens} tokens at a time, not {wanted}",
            field="speculation.hint_tokens",
        )
    return wanted


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
