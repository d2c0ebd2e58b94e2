"""A client's messages to the gateway's own types and back.

Knows no rules: `requests/` decides which values are acceptable.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, assert_never

from google.protobuf.message import Message

from gateway.messages.request import GenerateRequest, SamplingParams, SpeculationParams
from gateway.messages.response import Chunk, Finished, GenerateEvent, Model, Started, Traced
from tandem.v1 import gateway_pb2, sampling_pb2

_Params = TypeVar("_Params", SamplingParams, SpeculationParams)


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
        # The map is the message's own.
        sampling=dataclasses.replace(sampling, logit_bias=dict(sampling.logit_bias)),
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        stop_sequences=message.stop_sequences[:],
        stop_token_ids=message.stop_token_ids[:],
        ignore_eos=message.ignore_eos,
        num_choices=message.n if message.HasField("n") else None,
        speculation=_params_from_proto(message.speculation, SpeculationParams),
        affinity_key=message.affinity_key,
        priority=message.priority,
        adapter_id=message.adapter_id,
        has_media=bool(message.media),
        trace=message.trace,
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
            response.started.num_prompt_tokens = event.num_prompt_tokens
        case Finished():
            response.finished.choice_index = event.choice_index
            response.finished.finish_reason = sampling_pb2.FinishReason.ValueType(
                event.finish_reason
            )
            response.finished.usage.CopyFrom(gateway_pb2.Usage(**dataclasses.asdict(event.usage)))
        case _:
            assert_never(event)
    return response


def models_to_proto(models: Iterable[Model]) -> gateway_pb2.ListModelsResponse:
    """The models that are served."""
    return gateway_pb2.ListModelsResponse(
        models=[
            gateway_pb2.Model(
                model_id=model.model_id,
                model_digest=model.model_digest,
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                max_num_speculative_tokens=model.max_num_speculative_tokens,
                num_verifiers=model.num_verifiers,
            )
            for model in models
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
