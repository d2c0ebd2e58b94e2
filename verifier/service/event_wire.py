"""Writes the engine's events, and what a session says by itself, as protobuf messages."""

from collections.abc import Iterable

import grpc
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from servicekit.errors import code_number, find_code
from tandem.messages import set_message
from tandem.v1 import drafter_pb2, sampling_pb2, verifier_pb2
from tandem.values import DraftSource, FinishReason, TokenLogprob
from verifier.drafters.messages import DrafterState
from verifier.engine.messages import (
    Decided,
    DrafterStatus,
    Event,
    Opened,
    PromptScored,
    Rejected,
    Scored,
    StepStats,
    StepTraced,
)
from verifier.errors import ERROR_TABLE
from verifier.service.served_model import ServedModel

_Logprobs = RepeatedCompositeFieldContainer[sampling_pb2.TokenLogprob]

PROTOCOL_VERSION = 1
# The largest message to a gateway, unless a single event is larger. Parsing a large message blocks
# the gateway's event loop; a message over 5 MiB ends the session.
MAX_RESPONSE_BYTES = 128 << 10

_FINISH_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: sampling_pb2.FINISH_REASON_CANCELLED,
}
_SOURCES: dict[DraftSource | None, drafter_pb2.Source.ValueType] = {
    None: drafter_pb2.SOURCE_UNSPECIFIED,
    DraftSource.SEQUENCE: drafter_pb2.SOURCE_SEQUENCE,
    DraftSource.POOL: drafter_pb2.SOURCE_POOL,
}
_DRAFTER_STATES = {
    DrafterState.UP: verifier_pb2.DrafterStatus.STATE_UP,
    DrafterState.SLOW: verifier_pb2.DrafterStatus.STATE_SLOW,
    DrafterState.DOWN: verifier_pb2.DrafterStatus.STATE_DOWN,
    DrafterState.IDLE: verifier_pb2.DrafterStatus.STATE_IDLE,
}


def welcome(served: ServedModel) -> verifier_pb2.SessionResponse:
    """The response to Hello."""
    message = verifier_pb2.Welcome(
        protocol_version=PROTOCOL_VERSION,
        instance_id=served.instance_id,
        model_digest=served.model_digest,
        numerics_digest=served.numerics_digest,
        limits=served.limits(),
        model_id=served.model_id,
        tokenizer_digest=served.tokenizer_digest,
        allows_trace=served.allow_trace,
    )
    return verifier_pb2.SessionResponse(events=[verifier_pb2.Event(welcome=message)])


def draining() -> verifier_pb2.SessionResponse:
    """The event that says that the verifier is shutting down."""
    event = verifier_pb2.Event(draining=verifier_pb2.Draining())
    return verifier_pb2.SessionResponse(events=[event])


def response(events: Iterable[Event], step: StepStats | None) -> verifier_pb2.SessionResponse:
    """One message for all the events of a step."""
    message = verifier_pb2.SessionResponse()
    for event in events:
        _write_event(message.events.add(), event)
    if step is not None:
        message.step.MergeFrom(
            verifier_pb2.StepStats(
                step_id=step.step_id,
                num_sequences=step.num_sequences,
                num_scheduled_tokens=step.num_scheduled_tokens,
                duration_s=step.duration_s,
                draft_wait_s=step.draft_wait_s,
                num_running=step.num_running,
                num_waiting=step.num_waiting,
                num_kv_blocks_used=step.num_kv_blocks_used,
                draft_round_trip_s=step.draft_round_trip_s,
            )
        )
    return message


def split(response: verifier_pb2.SessionResponse) -> list[verifier_pb2.SessionResponse]:
    """The response's events, in order, in messages of at most `MAX_RESPONSE_BYTES` if possible."""
    if response.ByteSize() <= MAX_RESPONSE_BYTES:
        return [response]
    events = list(response.events)
    if len(events) == 1:
        events = _halves(events[0])
    if len(events) == 1:
        return [response]
    middle = len(events) // 2
    first = verifier_pb2.SessionResponse(
        events=events[:middle], step=response.step if response.HasField("step") else None
    )
    return split(first) + split(verifier_pb2.SessionResponse(events=events[middle:]))


def _halves(event: verifier_pb2.Event) -> list[verifier_pb2.Event]:
    """A prompt's logprobs as two events; any other event unchanged."""
    scored = event.prompt_scored
    middle = len(scored.logprobs) // 2
    if not event.HasField("prompt_scored") or not middle:
        return [event]
    return [
        verifier_pb2.Event(
            prompt_scored=verifier_pb2.PromptScored(
                sequence_id=scored.sequence_id,
                base_length=scored.base_length + start,
                logprobs=scored.logprobs[start:end],
            )
        )
        for start, end in ((0, middle), (middle, len(scored.logprobs)))
    ]


def _write_event(message: verifier_pb2.Event, event: Event) -> None:
    match event:
        case Decided():
            # Hot path: what has its default is not set, which halves the time of most events.
            decided = message.decided
            decided.sequence_id = event.sequence_id
            decided.base_length = event.base_length
            decided.token_ids.extend(event.token_ids)
            if event.num_wanted_draft_tokens:
                decided.num_wanted_draft_tokens = event.num_wanted_draft_tokens
            if event.num_draft_tokens:
                decided.num_draft_tokens = event.num_draft_tokens
                decided.num_accepted_tokens = event.num_accepted_tokens
                decided.matched_ngram_length = event.matched_ngram_length
                decided.source = _SOURCES[event.source]
            if event.finish_reason is not None:
                decided.finish_reason = _FINISH_REASONS[event.finish_reason]
            if event.undrafted is not None:
                set_message(decided.undrafted, event.undrafted)
            if event.logprobs:
                add_logprobs(decided.logprobs, event.logprobs)
        case StepTraced():
            message.step_traced.sequence_id = event.sequence_id
            set_message(message.step_traced.step, event.step)
        case PromptScored():
            message.prompt_scored.sequence_id = event.sequence_id
            message.prompt_scored.base_length = event.base_length
            add_logprobs(message.prompt_scored.logprobs, event.logprobs)
        case Scored():
            raise AssertionError("no session opens sequences that are only scored")
        case DrafterStatus():
            message.drafter_status.drafter_address = event.address
            message.drafter_status.state = _DRAFTER_STATES[event.state]
            message.drafter_status.reason = event.reason
        case Opened():
            message.opened.sequence_id = event.sequence_id
            message.opened.num_cached_tokens = event.num_cached_tokens
        case Rejected():
            rejected, error = message.rejected, event.error
            code = find_code(error, ERROR_TABLE) or grpc.StatusCode.INTERNAL
            rejected.sequence_id = event.sequence_id
            rejected.code = code_number(code)
            rejected.message = error.message
            rejected.field = error.field
            rejected.retry_after_ms = error.retry_after_ms or 0


def add_logprobs(entries: _Logprobs, logprobs: Iterable[TokenLogprob]) -> None:
    """Appends them in place. A step may have ten thousand; messages built first and copied then
    take seven times as long.
    """
    for logprob in logprobs:
        entry = entries.add()
        entry.token_id = logprob.token_id
        entry.logprob = logprob.logprob
        entry.rank = logprob.rank
        if logprob.top:
            add_logprobs(entry.top, logprob.top)
