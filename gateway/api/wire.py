"""A client's messages to the gateway's own types and back.

Knows no rules beyond a message's own: `requests/` decides which values are acceptable.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import assert_never

from gateway.errors import InvalidRequestError
from gateway.messages.request import GenerateRequest
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
from servicekit.message_limits import MessageLimits
from servicekit.unknown_fields import find_unknown_field
from tandem.declared import FieldError
from tandem.messages import from_message, set_field, set_message
from tandem.v1 import gateway_pb2, limits_pb2, sampling_pb2
from tandem.values import SamplingDefaults, SpeculationParams, TokenLogprob

#: The limits of a request's parameters.
SAMPLING_LIMITS = MessageLimits(sampling_pb2.SamplingParams.DESCRIPTOR, limits_pb2)
SPECULATION_LIMITS = MessageLimits(sampling_pb2.SpeculationParams.DESCRIPTOR, limits_pb2)
GRAMMAR_LIMITS = MessageLimits(sampling_pb2.StructuredOutput.DESCRIPTOR, limits_pb2)


def generate_request_from_proto(message: gateway_pb2.GenerateRequest) -> GenerateRequest:
    """A client's request, unchecked.

    Raises:
        InvalidRequestError: a choice among words has a number that is not known.
    """
    prompt = message.WhichOneof("prompt")
    try:
        return from_message(
            GenerateRequest,
            message,
            text=message.text if prompt == "text" else None,
            prompt_token_ids=message.tokens.token_ids[:] if prompt == "tokens" else None,
            num_choices=message.n if message.HasField("n") else None,
            unknown_field=find_unknown_field(message),
        )
    except FieldError as error:
        raise InvalidRequestError(error.reason, field=error.field) from None


def load_request_from_proto(message: gateway_pb2.LoadPoolRequest) -> GenerateRequest:
    """A text for a pool, unchecked, as the prompt of a request that names the pool."""
    return GenerateRequest(
        model_id=message.model_id,
        text=message.text,
        speculation=SpeculationParams(pool=message.pool),
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
            if event.finish_reason is not None:
                set_field(chunk, "finish_reason", event.finish_reason)
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
            response.started.model_id = event.model.model_id
        case Finished():
            set_message(response.finished, event)
            # Also if nothing was counted.
            response.finished.usage.SetInParent()
        case _:
            assert_never(event)
    return response


def logprob_from_encoded(encoded: EncodedLogprob) -> TokenLogprob:
    """A logprob as the verifier sent it; hot path."""
    message = sampling_pb2.TokenLogprob.FromString(encoded)
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top=tuple(
            TokenLogprob(token_id=each.token_id, logprob=each.logprob, rank=each.rank)
            for each in message.top
        ),
    )


def rejected_drafts(encoded: EncodedStep) -> Sequence[int]:
    """The drafts that a step verified and did not accept, in their order."""
    step = sampling_pb2.StepTrace.FromString(encoded)
    return step.draft_token_ids[step.num_accepted_tokens :]


def models_to_proto(
    models: Iterable[tuple[Model, SamplingDefaults, str]],
) -> gateway_pb2.ListModelsResponse:
    """The models that are served, what requests over HTTP get that name no value, and the note
    about their drafts.
    """
    response = gateway_pb2.ListModelsResponse()
    for model, defaults, note in models:
        message = response.models.add(speculation_note=note)
        set_message(message, model)
        message.http_sampling_defaults.CopyFrom(
            gateway_pb2.SamplingDefaults(**dataclasses.asdict(defaults))
        )
    return response
