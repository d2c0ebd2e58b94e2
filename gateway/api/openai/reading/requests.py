"""From a request's body to the gateway's own requests, one per prompt.

Owns where defaults count, and how a body's errors name the parameter at fault. Which values are
acceptable beyond the schema is decided where gRPC's requests are checked: `gateway/requests/`.
"""

import codecs
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic

from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import forms, grammars, schema
from gateway.api.openai.reading.json_size import MAX_JSON_SIZE, json_size
from gateway.api.openai.reading.message_schema import Prediction
from gateway.api.openai.reading.parameters import values_of
from gateway.messages.request import Conversation, GenerateRequest
from gateway.routing.aliases import PREFIX_CHARACTERS, beginning_of_tokens
from tandem.values import SamplingDefaults, SamplingParams, SpeculationParams, StructuredOutput

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_DEFAULT_COMPLETION_TOKENS = 16

# So many token ids take as long to parse as one string.
_NUMBERS_PER_STRING = 10

# Describing an error takes longer than finding it. Of more than so many, no parameter is named.
_MAX_DESCRIBED_ERRORS = 1024

# By pydantic's name of an error: its code, and a message that is plainer than pydantic's.
_FORM_OF_ERROR = {
    "missing": ("missing_required_parameter", "it is required"),
    "extra_forbidden": ("unknown_parameter", "there is no such parameter"),
}

_R = TypeVar("_R", bound=pydantic.BaseModel)


def check_size(body: bytes) -> None:
    """Refuses a body that would take too long to parse.

    Raises:
        ApiError: it is refused.
    """
    size = json_size(body, numbers_per_string=_NUMBERS_PER_STRING, enough=MAX_JSON_SIZE)
    if size > MAX_JSON_SIZE:
        raise ApiError(
            413,
            f"the body holds more than {MAX_JSON_SIZE} strings, objects and lists, where "
            f"{_NUMBERS_PER_STRING} numbers count as one",
            code="request_too_large",
        )


def parse(model: type[_R], body: bytes) -> _R:
    """Reads a body, whose size was checked.

    Raises:
        ApiError: it is not JSON, or not a request; the error names the parameter.
    """
    try:
        # Some clients begin UTF-8 with it.
        return model.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except pydantic.ValidationError as invalid:
        num_errors = invalid.error_count()
        if num_errors > _MAX_DESCRIBED_ERRORS:
            raise ApiError(
                400, f"the body has {num_errors} wrong or unknown values", code="invalid_value"
            ) from None
        error = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
    raise _to_api_error(model, error)


def completion_requests(
    parsed: schema.CompletionRequest,
    prompts: Sequence[str | Sequence[int]],
    *,
    defaults: SamplingDefaults,
    trace: bool,
    report_tokens: bool,
) -> list[GenerateRequest]:
    """One request per prompt.

    Args:
        prompts: the request's, each as text or as token ids.
        defaults: the model's.
        trace: whether each step is traced.
        report_tokens: whether each token's text is told.
    """
    return [
        _request(
            parsed,
            prompt,
            defaults=defaults,
            max_new_tokens=parsed.max_tokens or _DEFAULT_COMPLETION_TOKENS,
            num_logprobs=parsed.logprobs,
            num_prompt_logprobs=parsed.logprobs if parsed.echo else None,
            trace=trace,
            report_tokens=report_tokens,
        )
        for prompt in prompts
    ]


def chat_request(
    parsed: schema.ChatCompletionRequest,
    conversation: Conversation,
    *,
    defaults: SamplingDefaults,
    grammar: StructuredOutput | None,
    trace: bool,
    report_tokens: bool,
) -> GenerateRequest:
    """The request of a conversation.

    Args:
        grammar: of a tool call that must come.
        defaults, trace, report_tokens: as above.
    """
    return _request(
        parsed,
        conversation,
        defaults=defaults,
        max_new_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        num_logprobs=(parsed.top_logprobs or 0) if parsed.logprobs else None,
        num_prompt_logprobs=None,
        trace=trace,
        report_tokens=report_tokens,
        grammar=grammar,
        prediction=parsed.prediction,
    )


def affinity_key_of(parsed: schema.CommonRequest) -> str:
    """What requests that belong together have in common, by the client's word; "": nothing."""
    return parsed.prompt_cache_key or parsed.user or ""


def beginning_of(parsed: schema.CommonRequest) -> str:
    """What the requests of one conversation have in common: all before its first answer."""
    if isinstance(parsed, schema.CompletionRequest):
        prompt = prompts_of(parsed)[0]
        return prompt if isinstance(prompt, str) else beginning_of_tokens(prompt)
    items: Any = getattr(parsed, "messages", None) or getattr(parsed, "input", ())
    if isinstance(items, str):
        # The first message of a conversation, which later requests hold as an item.
        return f"user: {items}"
    beginning: list[str] = []
    for item in items:
        role, content = getattr(item, "role", ""), getattr(item, "content", None) or ""
        beginning.append(f"{role}: {content[:PREFIX_CHARACTERS]}")
        if role == "user":
            break
    return "\n".join(beginning)


def prompts_of(parsed: schema.CompletionRequest) -> list[str | Sequence[int]]:
    """The prompts of a request, each as text or as token ids."""
    prompt = parsed.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _request(
    parsed: schema.CompletionRequest | schema.ChatCompletionRequest,
    prompt: str | Sequence[int] | Conversation,
    *,
    defaults: SamplingDefaults,
    max_new_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    trace: bool,
    report_tokens: bool,
    grammar: StructuredOutput | None = None,
    prediction: Prediction | None = None,
) -> GenerateRequest:
    speculation = values_of(SpeculationParams, parsed.speculation)
    if prediction is not None:
        speculation["prediction"] = prediction.text
    return GenerateRequest(
        model_id=parsed.model,
        text=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=None if isinstance(prompt, str | Conversation) else prompt,
        conversation=prompt if isinstance(prompt, Conversation) else None,
        sampling=SamplingParams(
            **(dataclasses.asdict(defaults) | values_of(SamplingParams, parsed)),
            logprobs=num_logprobs,
            prompt_logprobs=num_prompt_logprobs,
            # Those of the distribution that is sampled from would all be 0 or infinite where the
            # temperature is 0.
            logprobs_mode=None if num_logprobs is None else "raw",
            structured_output=grammar or _grammar(parsed),
        ),
        max_new_tokens=max_new_tokens,
        stop_sequences=[parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or (),
        stop_token_ids=parsed.stop_token_ids or (),
        ignore_eos=bool(parsed.ignore_eos),
        num_choices=parsed.n,
        speculation=SpeculationParams(**speculation),
        affinity_key=affinity_key_of(parsed),
        priority=parsed.priority or 0,
        trace=trace,
        report_tokens=report_tokens,
    )


def _grammar(
    parsed: schema.CompletionRequest | schema.ChatCompletionRequest,
) -> StructuredOutput | None:
    """What the output follows.

    Raises:
        ApiError: two parameters ask for a format, or a schema is too large.
    """
    answer_format = parsed.response_format
    has_format = not isinstance(answer_format, schema.TextFormat | None)
    if (structured := parsed.structured_outputs) is not None:
        if has_format:
            raise ApiError(
                400,
                "response_format: structured_outputs beside it asks for another format",
                param="response_format",
                code="invalid_value",
            )
        if structured.json_schema is not None:
            return grammars.of_schema(structured.json_schema, param="structured_outputs")
        return StructuredOutput(
            regex=structured.regex, choices=structured.choice, lark=structured.grammar
        )
    if isinstance(answer_format, schema.JsonObjectFormat):
        return StructuredOutput(json_schema='{"type": "object"}')
    if isinstance(answer_format, schema.JsonSchemaFormat):
        return grammars.of_schema(answer_format.json_schema.schema_, param="response_format")
    return None


def _to_api_error(model: type[pydantic.BaseModel], error: "ErrorDetails") -> ApiError:
    kind, message = error["type"], error["msg"].replace(" after validation, not", ", not")
    if kind == "json_invalid":
        text = message.removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is not valid JSON: {text}", code="invalid_json")
    location = [
        part for part in error["loc"] if part != "[key]" and not str(part).startswith(forms.TAG)
    ]
    for union in (["response_format"], ["text", "format"]):
        if location[: len(union)] == union:
            # The next part is its type.
            del location[len(union) : len(union) + 1]
    param = ".".join(map(str, location))
    if not param:
        return ApiError(400, message, code="invalid_value")
    if kind == "unsupported":
        code = "unsupported_parameter"
    elif _is_unsupported(model, location):
        code = "unsupported_parameter"
        # Only a choice is worth telling: other values that are accepted are empty.
        only = f" with this value: {message}" if kind == "literal_error" else ""
        return ApiError(400, f"{param} is not supported{only}", code=code, param=param)
    else:
        code, message = _FORM_OF_ERROR.get(kind, ("invalid_value", message))
    return ApiError(400, f"{param}: {message}", code=code, param=param)


def _is_unsupported(model: type[pydantic.BaseModel], location: Sequence[int | str]) -> bool:
    """Whether a place in a request lies in a field that is marked so."""
    models: Sequence[type[pydantic.BaseModel]] = [model]
    for name in location:
        if isinstance(name, int):
            continue
        fields = [
            field
            for each in models
            for known, field in each.model_fields.items()
            if name == (field.alias or known)
        ]
        if any(forms.UNSUPPORTED in field.metadata for field in fields):
            return True
        models = [each for field in fields for each in _models_within(field.annotation)]
    return False


def _models_within(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Those that a type is, or holds."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_within(argument)
