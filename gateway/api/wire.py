"""A client's messages to the gateway's own types and back.

Knows no rules: `requests/` decides which values are acceptable.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, assert_never

from google.protobuf.message import Message

from gateway.messages.request import (
    EncodedGrammar,
    GenerateRequest,
    SamplingParams,
    SpeculationParams,
)
from gateway.messages.response import (
    Chunk,
    EncodedLogprob,
    EncodedStep,
    Finished,
    GenerateEvent,
    Model,
    Started,
    Traced,
)
from gateway.text.sampling_defaults import SamplingDefaults
from servicekit.message_limits import MessageLimits
from servicekit.unknown_fields import find_unknown_field
from tandem.v1 import gateway_pb2, limits_pb2, sampling_pb2

_Params = TypeVar("_Params", SamplingParams, SpeculationParams)

_GRAMMAR_LIMITS = MessageLimits(sampling_pb2.StructuredOutput.DESCRIPTOR, limits_pb2)


class TokenLogprob(NamedTuple):
    """One token's logprob.

    Attributes:
        top: id and logprob of the likeliest tokens, in order.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def generate_request_from_proto(message: gateway_pb2.GenerateRequest) -> GenerateRequest:
    """A client's request, unchecked."""
    prompt = message.WhichOneof("prompt")
    sampling = _params_from_proto(message.sampling, SamplingParams)
    return GenerateRequest(
        request_id=message.request_id,
        model_id=message.model_id,
        text=message.text if prompt == "text" else None,
        prompt_token_ids=message.tokens.token_ids[:] if prompt == "tokens" else None,
        output_token_ids=message.output_token_ids[:],
        expected_model_digest=message.expected_model_digest,
        sampling=dataclasses.replace(
            sampling,
            # The map is the message's own.
            logit_bias=dict(sampling.logit_bias),
            structured_output=message.sampling.structured_output.SerializeToString()
            if message.sampling.HasField("structured_output")
            else None,
        ),
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        stop_sequences=message.stop_sequences[:],
        stop_token_ids=message.stop_token_ids[:],
        ignore_eos=message.ignore_eos,
        num_choices=message.n if message.HasField("n") else None,
        speculation=_params_from_proto(message.speculation, SpeculationParams),
        affinity_key=message.affinity_key,
        priority=message.priority,
        trace=message.trace,
        report_tokens=message.report_tokens,
        unknown_field=find_unknown_field(message),
    )


def event_to_proto(event: GenerateEvent) -> gateway_pb2.GenerateResponse:
    """One answer to a client."""
    response = gateway_pb2.GenerateResponse()
    match event:
        case Chunk():
            chunk = response.chunk
            chunk.choice_index = event.choice_index
            chunk.offset = event.offset
            chunk.token_ids.extend(event.token_ids)
            chunk.text = event.text
            chunk.num_draft_tokens = event.num_draft_tokens
            chunk.num_accepted_tokens = event.num_accepted_tokens
            chunk.num_steps = event.num_steps
            chunk.finish_reason = sampling_pb2.FinishReason.ValueType(event.finish_reason)
            for step in event.steps:
                for index, text in enumerate(step.token_texts):
                    accepted = index < step.num_accepted_tokens
                    chunk.reported_tokens.add(text=text, accepted=accepted)
            for logprob in event.logprobs:
                chunk.logprobs.add().MergeFromString(logprob)
            for logprob in event.prompt_logprobs:
                chunk.prompt_logprobs.add().MergeFromString(logprob)
        case Traced():
            response.traced.choice_index = event.choice_index
            response.traced.step.MergeFromString(event.step)
        case Started():
            response.started.request_id = event.request_id
            response.started.seed = event.seed
            response.started.num_prompt_tokens = len(event.prompt_token_ids)
            response.started.model_digest = event.model.model_digest
        case Finished():
            response.finished.choice_index = event.choice_index
            response.finished.finish_reason = sampling_pb2.FinishReason.ValueType(
                event.finish_reason
            )
            response.finished.usage.CopyFrom(gateway_pb2.Usage(**dataclasses.asdict(event.usage)))
        case _:
            assert_never(event)
    return response


def max_grammar_bytes(field: str) -> int:
    """The most bytes of a grammar's text, by its field."""
    return _GRAMMAR_LIMITS.max_bytes(field)


def encoded_grammar(
    *,
    json_schema: str | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    lark: str | None = None,
) -> EncodedGrammar:
    """A grammar as verifiers get it; one of them is given."""
    message = sampling_pb2.StructuredOutput()
    if json_schema is not None:
        message.json_schema = json_schema
    if regex is not None:
        message.regex = regex
    if choices is not None:
        message.choices.values.extend(choices)
    if lark is not None:
        message.lark = lark
    return message.SerializeToString()


def behind_reasoning(grammar: EncodedGrammar, *, begin: str, end: str) -> EncodedGrammar:
    """The same grammar, of the text behind a model's reasoning.

    Args:
        begin: the tag that begins it; "": the prompt has begun it.
        end: the tag that ends it.
    """
    message = sampling_pb2.StructuredOutput.FromString(grammar)
    message.reasoning.begin = begin
    message.reasoning.end = end
    return message.SerializeToString()


def logprob_from_encoded(encoded: EncodedLogprob) -> TokenLogprob:
    """A logprob as the verifier sent it."""
    message = sampling_pb2.TokenLogprob.FromString(encoded)
    top = [(each.token_id, each.logprob) for each in message.top]
    return TokenLogprob(message.token_id, message.logprob, top)


def rejected_drafts(encoded: EncodedStep) -> Sequence[int]:
    """The drafts that a step verified and did not accept, in their order."""
    step = sampling_pb2.StepTrace.FromString(encoded)
    return step.draft_token_ids[step.num_accepted_tokens :]


def models_to_proto(
    models: Iterable[tuple[Model, SamplingDefaults]],
) -> gateway_pb2.ListModelsResponse:
    """The models that are served, and what requests over HTTP get that name no value."""
    return gateway_pb2.ListModelsResponse(
        models=[
            gateway_pb2.Model(
                model_id=model.model_id,
                model_digest=model.model_digest,
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                max_num_speculative_tokens=model.max_num_speculative_tokens,
                num_verifiers=model.num_verifiers,
                http_sampling_defaults=gateway_pb2.SamplingDefaults(**dataclasses.asdict(defaults)),
            )
            for model, defaults in models
        ]
    )


def _params_from_proto(message: Message, params: type[_Params]) -> _Params:
    """Params whose fields have the message's names; None where the client gave no value."""
    fields = message.DESCRIPTOR.fields_by_name
    values: dict[str, Any] = {
        field.name: getattr(message, field.name)
        if not fields[field.name].has_presence or message.HasField(field.name)
        else None
        for field in dataclasses.fields(params)
    }
    return params(**values)
