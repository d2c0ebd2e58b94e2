"""The messages of verifiers to the gateway's own types and back.

Knows no sequence: `generation/` decides which messages are possible.

Repeated fields are read by slicing: that is three times as fast as the alternatives.
"""

from collections.abc import Iterable

from google.protobuf.message import Message

from gateway.messages.verifier import (
    CommandBatch,
    Decided,
    DrafterState,
    DrafterStatus,
    Draining,
    OpenCommand,
    Opened,
    PromptScored,
    Rejected,
    StepTraced,
    UnreadableEvent,
    VerifierEvent,
    Welcome,
)
from tandem.declared import MAX_UINT32
from tandem.messages import from_message, set_field, set_message
from tandem.v1 import drafter_pb2, sampling_pb2, verifier_pb2
from tandem.values import DraftSource, FinishReason, Keep, UndraftedSteps

PROTOCOL_VERSION = 1

# After a step whose drafts were all accepted, the match is 1 + tokens_per_match times as long. A
# hint this many times as long as one step's drafts still holds all drafts of the next step.
_RUN_AHEAD = 4

_FINISH_REASONS: dict[int, FinishReason | None] = {
    sampling_pb2.FINISH_REASON_UNSPECIFIED: None,
    sampling_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_SOURCES: dict[int, DraftSource] = {
    drafter_pb2.SOURCE_SEQUENCE: DraftSource.SEQUENCE,
    drafter_pb2.SOURCE_POOL: DraftSource.POOL,
}
_DRAFTER_STATES = {
    int(verifier_pb2.DrafterStatus.STATE_UP): DrafterState.UP,
    int(verifier_pb2.DrafterStatus.STATE_SLOW): DrafterState.SLOW,
    int(verifier_pb2.DrafterStatus.STATE_DOWN): DrafterState.DOWN,
    int(verifier_pb2.DrafterStatus.STATE_IDLE): DrafterState.IDLE,
}


def hello_to_proto(gateway_id: str) -> verifier_pb2.SessionRequest:
    """The first message of a session."""
    hello = verifier_pb2.Hello(protocol_version=PROTOCOL_VERSION, gateway_id=gateway_id)
    return verifier_pb2.SessionRequest(commands=[verifier_pb2.Command(hello=hello)])


def welcome_from_proto(
    message: verifier_pb2.SessionResponse,
) -> tuple[Welcome, list[VerifierEvent]] | None:
    """The answer to Hello and the events that follow it; None if the message is anything else, or
    of another version.
    """
    if not message.events or message.events[0].WhichOneof("event") != "welcome":
        return None
    welcome = message.events[0].welcome
    if welcome.protocol_version != PROTOCOL_VERSION:
        return None
    return _welcome_from_proto(welcome), events_from_proto(message.events[1:])


def _welcome_from_proto(welcome: verifier_pb2.Welcome) -> Welcome:
    return Welcome(
        model_id=welcome.model_id,
        model_digest=welcome.model_digest,
        tokenizer_digest=welcome.tokenizer_digest,
        max_model_len=welcome.limits.max_model_len,
        max_num_speculative_tokens=welcome.limits.max_num_speculative_tokens,
        vocab_size=welcome.limits.vocab_size,
        instance_id=welcome.instance_id,
        numerics_digest=welcome.numerics_digest,
        allows_trace=welcome.allows_trace,
        max_step_tokens=welcome.limits.max_num_batched_tokens,
        num_kv_blocks=welcome.limits.num_kv_blocks,
    )


def commands_to_proto(batch: CommandBatch) -> verifier_pb2.SessionRequest:
    """One message to a verifier, without its Opens."""
    request = verifier_pb2.SessionRequest()
    add = request.commands.add
    for sequence_id, drafter in batch.updates:
        update = add().update
        update.sequence_id = sequence_id
        update.drafter_address = drafter
    for command in batch.closes:
        close = add().close
        close.sequence_id = command.sequence_id
        set_field(close, "keep", command.keep)
        if command.keep is not Keep.NOTHING:
            close.keep_length = command.keep_length
    return request


def open_to_proto(command: OpenCommand) -> verifier_pb2.Open:
    """Starts a sequence.

    Raises:
        FieldError: a value cannot be written.
    """
    request = command.request
    message = verifier_pb2.Open(
        sequence_id=command.sequence_id,
        token_ids=command.token_ids,
        prompt_length=len(request.prompt_token_ids),
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        draft_wait=verifier_pb2.DraftWait.Value(f"DRAFT_WAIT_{command.draft_wait.name}"),
        drafting=bool(command.drafter),
        num_speculative_tokens=command.num_speculative_tokens,
        cache_salt=request.cache_salt,
        # Older verifiers refuse what they do not know.
        tenant_weight=0 if request.tenant_weight == 1 else request.tenant_weight,
        priority=request.priority,
        expected_model_digest=request.model_digest,
        tokens_per_match=request.ngram.tokens_per_match or 0,
        trace=request.trace,
        trace_parent=request.trace_parent,
    )
    set_message(message.sampling, command.sampling, path="sampling.")
    message.sampling.seed = command.seed
    if request.wants_drafts:
        # It may get a drafter later, if there is none now.
        message.drafter_address = command.drafter
        set_message(message.ngram, request.ngram)
        # The verifier applies the request's figure; the rest of a draft serves its next steps.
        per_match = (request.ngram.tokens_per_match or 0) * _RUN_AHEAD
        message.ngram.tokens_per_match = min(per_match, MAX_UINT32)
        message.hint_tokens = request.hint_tokens
        message.predicted_token_ids.extend(request.predicted_token_ids)
        if request.ngram.pool_id and not request.is_kept_by_close:
            set_field(message, "keep", request.pool_keep)
    return message


def largest_field(message: Message) -> str:
    """The path of the largest field of a message."""
    sizes = {
        field.name: type(message)(**{field.name: value}).ByteSize()
        for field, value in message.ListFields()
    }
    name = max(sizes, key=lambda name: sizes[name])
    value = getattr(message, name)
    return f"{name}.{largest_field(value)}" if isinstance(value, Message) else name


def events_from_proto(messages: Iterable[verifier_pb2.Event]) -> list[VerifierEvent]:
    """The events of one message, in order; hot path.

    An event that cannot be read becomes an `UnreadableEvent`: it fails its own sequence only.
    """
    events: list[VerifierEvent] = []
    for event in messages:
        kind = event.WhichOneof("event")
        if kind == "decided":
            decided = event.decided
            if decided.finish_reason not in _FINISH_REASONS:
                reason = f"finish_reason has no value {decided.finish_reason}"
                events.append(UnreadableEvent(decided.sequence_id, reason))
                continue
            logprobs = decided.logprobs
            events.append(
                Decided(
                    decided.sequence_id,
                    decided.base_length,
                    decided.token_ids[:],
                    decided.num_draft_tokens,
                    decided.num_accepted_tokens,
                    _FINISH_REASONS[decided.finish_reason],
                    [each.SerializeToString() for each in logprobs] if logprobs else (),
                    decided.matched_ngram_length,
                    _SOURCES.get(decided.source),
                    from_message(UndraftedSteps, decided.undrafted)
                    if decided.finish_reason and decided.HasField("undrafted")
                    else None,
                )
            )
        elif kind == "step_traced":
            traced = event.step_traced
            events.append(
                StepTraced(sequence_id=traced.sequence_id, step=traced.step.SerializeToString())
            )
        elif kind == "opened":
            opened = event.opened
            events.append(
                Opened(sequence_id=opened.sequence_id, num_cached_tokens=opened.num_cached_tokens)
            )
        elif kind == "prompt_scored":
            scored = event.prompt_scored
            events.append(
                PromptScored(
                    sequence_id=scored.sequence_id,
                    base_length=scored.base_length,
                    logprobs=[each.SerializeToString() for each in scored.logprobs],
                )
            )
        elif kind == "rejected":
            rejected = event.rejected
            events.append(
                Rejected(
                    sequence_id=rejected.sequence_id,
                    code=rejected.code,
                    message=rejected.message,
                    field=rejected.field,
                    retry_after_ms=rejected.retry_after_ms,
                )
            )
        elif kind == "drafter_status":
            status = event.drafter_status
            state = _DRAFTER_STATES.get(status.state)
            if state is None:
                reason = f"drafter_status.state has no value {status.state}"
                events.append(UnreadableEvent("", reason))
            else:
                events.append(DrafterStatus(status.drafter_address, state))
        elif kind == "draining":
            events.append(Draining())
        else:
            events.append(UnreadableEvent("", f"an event of kind {kind}"))
    return events
