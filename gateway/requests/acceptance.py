"""From a valid request to one that can be run on its model.

Owns the rules that need the model or the prompt's tokens, and the values of what a request leaves
open. Errors name the proto's field paths. Pure.
"""

import dataclasses
import secrets
from collections.abc import Collection, Mapping, Sequence

from gateway.errors import InvalidRequestError, PromptTooLongError, UnsupportedFieldError
from gateway.messages.request import AcceptedRequest, GenerateRequest
from gateway.messages.response import Model
from gateway.requests.drafting_policy import POLICIES, TANDEM, DraftingPolicy
from gateway.text.output.parts import Reading
from tandem.values import Keep, NgramParams, SpeculationParams

# Logprobs of one prompt, alternatives included; the verifier's limit is the same.
MAX_PROMPT_LOGPROBS = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Values that this gateway adds to requests, and its own limits.

    Attributes:
        drafting: the policy of a request that names no preset.
        hint_tokens: the most draft tokens requested from a drafter at a time.
        pool: of requests that name neither a pool nor a preset; "": none.
        max_prompt_tokens: None: the model's limit.
    """

    drafting: DraftingPolicy = TANDEM
    hint_tokens: int = 64
    pool: str = ""
    max_prompt_tokens: int | None = None


def with_default_pool(request: GenerateRequest, defaults: RequestDefaults) -> GenerateRequest:
    """The request, with the default pool if it leaves its pool open."""
    speculation = request.speculation
    if not defaults.pool or speculation.pool or speculation.preset:
        return request
    in_pool = dataclasses.replace(speculation, pool=defaults.pool)
    return dataclasses.replace(request, speculation=in_pool)


def find_model(model_id: str, models: Mapping[str, Model]) -> Model:
    """The model that a request names.

    Args:
        model_id: "": the only one.
        models: those served now, by id; not empty.

    Raises:
        InvalidRequestError: it is not served, or there are several and none is named.
    """
    if not model_id and len(models) == 1:
        return next(iter(models.values()))
    served = ", ".join(sorted(models))
    if not model_id:
        raise InvalidRequestError(f"name one of the models served: {served}", field="model_id")
    if model_id not in models:
        raise InvalidRequestError(f"{model_id!r} is not served; served: {served}", field="model_id")
    return models[model_id]


def max_prompt_tokens(model: Model, defaults: RequestDefaults) -> int:
    """The longest prompt that leaves room for output."""
    limit = model.max_model_len - 1
    return limit if defaults.max_prompt_tokens is None else min(limit, defaults.max_prompt_tokens)


def prompt_too_long(
    num_tokens: int, model: Model, defaults: RequestDefaults, field: str, *, is_exact: bool = True
) -> PromptTooLongError:
    """The error of a prompt, in `field`, of more than `max_prompt_tokens`.

    Args:
        is_exact: otherwise it has at least `num_tokens`.
    """
    counted = f"{num_tokens}" if is_exact else f"{num_tokens} or more"
    if num_tokens >= model.max_model_len:
        return PromptTooLongError(
            f"this model's maximum context length is {model.max_model_len} tokens, and with "
            f"{counted} there is no room for output",
            field=field,
        )
    return PromptTooLongError(
        f"its {counted} tokens are over this server's limit of {defaults.max_prompt_tokens}",
        field=field,
    )


def check_has_no_text(request: GenerateRequest, *, model: Model) -> None:
    """Refuses text to a model whose tokenizer the gateway does not have.

    Raises:
        UnsupportedFieldError: the request has some.
    """
    for field, is_used in (
        ("text", request.text is not None or request.conversation is not None),
        ("stop_sequences", bool(request.stop_sequences)),
        ("report_tokens", request.report_tokens),
        ("speculation.prediction", bool(request.speculation.prediction)),
    ):
        if is_used:
            raise no_tokenizer(model, field)


def no_tokenizer(model: Model, field: str) -> UnsupportedFieldError:
    """The error of text for a model whose tokenizer the gateway does not have."""
    return UnsupportedFieldError(
        f"this server has no tokenizer of {model.model_id}; send token ids", field=field
    )


def accept(
    request: GenerateRequest,
    *,
    prompt_token_ids: Sequence[int],
    model: Model,
    defaults: RequestDefaults,
    predicted_token_ids: Sequence[int] = (),
    reading: Reading | None = None,
    tenant: str = "",
    tenant_weight: int = 1,
    trace_parent: str = "",
) -> AcceptedRequest:
    """Checks a request against its model and fills in what it leaves open.

    Args:
        request: has passed `validation.check_request`, and has an id.
        prompt_token_ids: of the request's text, or as it gave them.
        model: the one that it will run on.
        defaults: the gateway's.
        predicted_token_ids: of the request's prediction.
        reading: what is told apart in the output.
        tenant: the client's, from its credentials.
        tenant_weight: against others', where tenants take turns.
        trace_parent: the span that verifiers are told of; "": none.

    Raises:
        InvalidRequestError: a value does not fit the model.
    """
    _check_tokens(request, prompt_token_ids, model, defaults)
    room = model.max_model_len - len(prompt_token_ids)
    max_new_tokens = min(room, request.max_new_tokens or room)
    num_given_tokens = len(request.output_token_ids)
    if num_given_tokens >= max_new_tokens:
        raise InvalidRequestError(
            f"with {num_given_tokens} output tokens of at most {max_new_tokens} there is nothing "
            "left to generate",
            field="output_token_ids",
        )
    speculation = request.speculation
    policy = _drafting_policy(speculation, model, defaults)
    num_speculative_tokens = (
        0
        if speculation.enabled is False
        else policy.num_speculative_tokens_within(model.max_num_speculative_tokens)
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
            min_ngram=policy.min_ngram,
            max_ngram=policy.max_ngram,
            overlap=policy.overlap,
            tie=policy.tie,
            tokens_per_match=policy.tokens_per_match,
            algorithm=policy.algorithm,
            pool_id=pool_id(tenant, speculation.pool),
            pool_min_ngram=policy.pool_min_ngram,
        ),
        pool_keep=Keep(speculation.pool_keep or Keep.OUTPUT),
        hint_tokens=_hint_tokens(speculation, policy, num_speculative_tokens, defaults),
        vocab_size=model.vocab_size,
        affinity_key=request.affinity_key,
        priority=request.priority,
        cache_salt=cache_salt(tenant),
        tenant_weight=tenant_weight,
        pool_keep_cancelled=speculation.pool_keep_cancelled,
        trace=request.trace,
        report_tokens=request.report_tokens,
        reading=reading,
        trace_parent=trace_parent,
        predicted_token_ids=predicted_token_ids,
    )


def pool_id(tenant: str, pool: str) -> str:
    """A drafter's name for a tenant's pool: no tenant can name another's.

    The gateway decides the tenant, never the client. Its length comes first, so that no two pairs
    have one name.
    """
    return f"{cache_salt(tenant)}{pool}" if pool else ""


def cache_salt(tenant: str) -> str:
    """The salt by which a verifier separates tenants' cached prefixes, and their turns; never the
    client's word.
    """
    return f"{len(tenant)}:{tenant}/"


def _check_tokens(
    request: GenerateRequest,
    prompt_token_ids: Sequence[int],
    model: Model,
    defaults: RequestDefaults,
) -> None:
    prompt_field = "tokens.token_ids" if request.prompt_token_ids is not None else "text"
    num_prompt_tokens = len(prompt_token_ids)
    if not num_prompt_tokens:
        raise InvalidRequestError("the prompt has no tokens", field=prompt_field)
    # Before the checks that read every token.
    if num_prompt_tokens > max_prompt_tokens(model, defaults):
        raise prompt_too_long(num_prompt_tokens, model, defaults, prompt_field)
    _check_ids(prompt_field, prompt_token_ids, model.vocab_size)
    _check_ids("output_token_ids", request.output_token_ids, model.vocab_size)
    _check_ids("stop_token_ids", request.stop_token_ids, model.vocab_size)
    _check_ids("sampling.logit_bias", request.sampling.logit_bias, model.vocab_size)
    if request.sampling.prompt_logprobs is not None:
        num_logprobs = num_prompt_tokens * (request.sampling.prompt_logprobs + 1)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"{num_logprobs} logprobs of {num_prompt_tokens} tokens are over the limit of "
                f"{MAX_PROMPT_LOGPROBS}",
                field="sampling.prompt_logprobs",
            )


def _drafting_policy(
    speculation: SpeculationParams, model: Model, defaults: RequestDefaults
) -> DraftingPolicy:
    base = POLICIES[speculation.preset] if speculation.preset else defaults.drafting
    policy = base.override(speculation)
    if policy.min_ngram > policy.max_ngram:
        raise InvalidRequestError(
            f"the shortest n-gram, {policy.min_ngram}, is longer than the longest, "
            f"{policy.max_ngram}",
            field="speculation.prompt_lookup_min",
        )
    if speculation.tokens_per_match and policy.tie != "longest":
        raise InvalidRequestError(
            "tokens_per_match needs TIE_LONGEST", field="speculation.tokens_per_match"
        )
    requested, limit = speculation.num_speculative_tokens, model.max_num_speculative_tokens
    if requested is not None and requested > limit:
        raise InvalidRequestError(
            f"at most {limit} draft tokens are verified per step, not {requested}",
            field="speculation.num_speculative_tokens",
        )
    return policy


def _hint_tokens(
    speculation: SpeculationParams,
    policy: DraftingPolicy,
    num_speculative_tokens: int,
    defaults: RequestDefaults,
) -> int:
    limit = defaults.hint_tokens
    requested = speculation.hint_tokens
    if requested is None:
        return max(1, limit if policy.runs_ahead else min(num_speculative_tokens, limit))
    if not 1 <= requested <= limit:
        raise InvalidRequestError(
            f"a drafter is asked for 1 to {limit} tokens at a time, not {requested}",
            field="speculation.hint_tokens",
        )
    return requested


def _check_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}", field=field
        )
