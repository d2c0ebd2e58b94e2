"""A client's messages to the gateway's own types and back.

Knows no rules: `requests/` decides which values are acceptable.
"""

from collections.abc import Iterable
from typing import TypeVar, assert_never

from google.protobuf.message import Message

from gateway.messages.request import (
    GenerateRequest,
    SamplingParams,
    SpeculationParams,
)
from gateway.messages.response import (
    Chunk,
    Finished,
    GenerateEvent,
    Model,
    Started,
    Traced,
    Usage,
)
from tandem.v1 import gateway_pb2, sampling_pb2

_Scalar = TypeVar("_Scalar", bool, int, float)


def generate_request_from_proto(message: gateway_pb2.GenerateRequest) -> GenerateRequest:
    """A client's request, unchecked."""
    prompt = message.WhichOneof("prompt")
    return GenerateRequest(
        request_id=message.request_id,
        model_id=message.model_id,
        text=message.text if prompt == "text" else None,
        prompt_token_ids=message.tokens.token_ids[:] if prompt == "tokens" else None,
        output_token_ids=message.output_token_ids[:],
        sampling=_sampling_from_proto(message.sampling),
        max_new_tokens=_present(message, "max_new_tokens", message.max_new_tokens),
        stop_sequences=message.stop_sequences[:],
        stop_token_ids=message.stop_token_ids[:],
        ignore_eos=message.ignore_eos,
        num_choices=_present(message, "n", message.n),
        speculation=_speculation_from_proto(message.speculation),
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
            response.finished.usage.CopyFrom(_usage_to_proto(event.usage))
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


def _sampling_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=_present(message, "top_p", message.top_p),
        min_p=message.min_p,
        repetition_penalty=_present(message, "repetition_penalty", message.repetition_penalty),
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        seed=_present(message, "seed", message.seed),
        min_new_tokens=message.min_new_tokens,
        logprobs=_present(message, "logprobs", message.logprobs),
        prompt_logprobs=_present(message, "prompt_logprobs", message.prompt_logprobs),
        logprobs_mode=message.logprobs_mode,
        num_beams=message.num_beams,
    )


def _speculation_from_proto(message: sampling_pb2.SpeculationParams) -> SpeculationParams:
    return SpeculationParams(
        enabled=_present(message, "enabled", message.enabled),
        num_speculative_tokens=_present(
            message, "num_speculative_tokens", message.num_speculative_tokens
        ),
        prompt_lookup_min=_present(message, "prompt_lookup_min", message.prompt_lookup_min),
        prompt_lookup_max=_present(message, "prompt_lookup_max", message.prompt_lookup_max),
        overlap=message.overlap,
        tie=message.tie,
        tokens_per_match=_present(message, "tokens_per_match", message.tokens_per_match),
        algorithm=message.algorithm,
        chained=_present(message, "chained", message.chained),
        pool=message.pool,
        pool_min_ngram=_present(message, "pool_min_ngram", message.pool_min_ngram),
        preset=message.preset,
        hint_tokens=_present(message, "hint_tokens", message.hint_tokens),
        tree_width=message.tree_width,
        pool_keep=message.pool_keep,
        pool_feed_tokens=message.pool_feed_tokens,
        pool_keep_cancelled=message.pool_keep_cancelled,
    )


def _present(message: Message, field: str, value: _Scalar) -> _Scalar | None:
    return value if message.HasField(field) else None


def _usage_to_proto(usage: Usage) -> gateway_pb2.Usage:
    return gateway_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        num_steps=usage.num_steps,
        num_drafts=usage.num_drafts,
        num_draft_tokens=usage.num_draft_tokens,
        num_accepted_tokens=usage.num_accepted_tokens,
        accepted_per_position=usage.accepted_per_position,
        resumes=usage.resumes,
        by_match_length=[
            gateway_pb2.MatchAcceptance(
                matched_ngram_length=each.matched_ngram_length,
                num_drafts=each.num_drafts,
                num_draft_tokens=each.num_draft_tokens,
                num_accepted_tokens=each.num_accepted_tokens,
            )
            for each in usage.by_match_length
        ],
        num_sequence_drafts=usage.num_sequence_drafts,
        num_pool_drafts=usage.num_pool_drafts,
    )
