"""Converts protobuf messages from and to the engine's types, and validates requests.

Every mistake that a client can make in an Open is found here, before the engine sees it, and named
by its field.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from servicekit.errors import MessageLimitError, code_number, find_code
from servicekit.message_limits import MessageLimits
from servicekit.trace_context import is_trace_parent
from servicekit.unknown_fields import find_unknown_field
from tandem.declared import FieldError, check_ranges
from tandem.messages import from_message, set_message
from tandem.v1 import drafter_pb2, limits_pb2, sampling_pb2, verifier_pb2
from tandem.values import (
    DraftSource,
    DraftWait,
    FinishReason,
    Keep,
    ReasoningTags,
    SamplingParams,
    TokenLogprob,
)
from verifier.drafters.messages import DrafterState
from verifier.drafts.draft_buffer import Hint
from verifier.drafts.drafted_by import DraftedBy
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
    Update,
)
from verifier.errors import (
    ERROR_TABLE,
    InvalidRequestError,
    UnsupportedFieldError,
    WrongModelError,
)
from verifier.scheduling.sequence import OpenSequence
from verifier.service.named_drafters import NamedDrafters
from verifier.structured.grammars import Grammar, GrammarKind

_Logprobs = RepeatedCompositeFieldContainer[sampling_pb2.TokenLogprob]

PROTOCOL_VERSION = 1
# Limits of a session's messages: the number of commands, and the fields of each.
SESSION_LIMITS = MessageLimits(verifier_pb2.SessionRequest.DESCRIPTOR, limits_pb2)
COMMAND_LIMITS = MessageLimits(verifier_pb2.Command.DESCRIPTOR, limits_pb2)
_DRAFT_LIMITS = MessageLimits(verifier_pb2.Draft.DESCRIPTOR, limits_pb2)
_MAX_DRAFT_ID_BYTES = _DRAFT_LIMITS.max_bytes("sequence_id")
_MAX_DRAFT_TOKENS = _DRAFT_LIMITS.max_items("token_ids")
# For one prompt, including the likeliest tokens at each position: a gateway can send them in one
# message.
MAX_PROMPT_LOGPROBS = 1 << 17
# The largest message to a gateway, unless a single event is larger. Parsing a large message blocks
# the gateway's event loop; a message over 5 MiB ends the session.
MAX_RESPONSE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The served model's properties and limits, as sent to clients and checked in requests."""

    model_id: str
    model_digest: str
    numerics_digest: str
    instance_id: str
    architecture: str
    dtype: str
    device: str
    numerics: str
    attention_backend: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_speculative_tokens: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    eos_token_ids: frozenset[int]
    # Limit of `logprobs` and `prompt_logprobs`. None: no logprobs at all.
    max_logprobs: int | None = 20
    # Whether a request may ask for a trace of every step.
    allow_trace: bool = False
    # "": the model's folder has no tokenizer.
    tokenizer_digest: str = ""
    hidden_size: int = 0
    # Whether a `Score` request may ask for distributions and hidden states.
    allows_full_scores: bool = False

    def limits(self) -> verifier_pb2.Limits:
        return verifier_pb2.Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_speculative_tokens=self.max_num_speculative_tokens,
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
        )

    def model_info(self) -> verifier_pb2.GetModelInfoResponse:
        return verifier_pb2.GetModelInfoResponse(
            model_id=self.model_id,
            model_digest=self.model_digest,
            numerics_digest=self.numerics_digest,
            instance_id=self.instance_id,
            architecture=self.architecture,
            dtype=self.dtype,
            device=self.device,
            numerics=self.numerics,
            attention_backend=self.attention_backend,
            limits=self.limits(),
            eos_token_ids=sorted(self.eos_token_ids),
            tokenizer_digest=self.tokenizer_digest,
        )


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


_MAX_TENANT_WEIGHT = 1000

_DRAFT_WAITS = {
    verifier_pb2.DRAFT_WAIT_UNSPECIFIED: DraftWait.ADAPTIVE,
    verifier_pb2.DRAFT_WAIT_ADAPTIVE: DraftWait.ADAPTIVE,
    verifier_pb2.DRAFT_WAIT_NEVER: DraftWait.NEVER,
    verifier_pb2.DRAFT_WAIT_ALWAYS: DraftWait.ALWAYS,
}
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
_SOURCE_OF = {number: source for source, number in _SOURCES.items()}

_KEEPS: dict[int, Keep | None] = {
    drafter_pb2.KEEP_UNSPECIFIED: None,
    drafter_pb2.KEEP_NOTHING: Keep.NOTHING,
    drafter_pb2.KEEP_OUTPUT: Keep.OUTPUT,
    drafter_pb2.KEEP_ALL: Keep.ALL,
}
_DRAFTER_STATES = {
    DrafterState.UP: verifier_pb2.DrafterStatus.STATE_UP,
    DrafterState.SLOW: verifier_pb2.DrafterStatus.STATE_SLOW,
    DrafterState.DOWN: verifier_pb2.DrafterStatus.STATE_DOWN,
    DrafterState.IDLE: verifier_pb2.DrafterStatus.STATE_IDLE,
}

_STRUCTURED = "sampling.structured_output"


def open_sequence(
    message: verifier_pb2.Open, served: ServedModel, *, drafters: NamedDrafters
) -> OpenSequence:
    """Checks an Open that is within `COMMAND_LIMITS`.

    Args:
        drafters: those that the session may name.

    Raises:
        RequestError: names the field.
    """
    if not message.sequence_id:
        raise InvalidRequestError("must not be empty", field="sequence_id")
    if message.trace_parent and not is_trace_parent(message.trace_parent):
        raise InvalidRequestError("it is no W3C trace parent", field="trace_parent")
    if message.trace and not served.allow_trace:
        raise UnsupportedFieldError("traces are not enabled on this server", field="trace")
    if message.expected_model_digest not in ("", served.model_digest):
        raise WrongModelError(
            f"model {served.model_digest} is served", field="expected_model_digest"
        )
    if message.draft_wait not in _DRAFT_WAITS:
        raise InvalidRequestError(f"unknown value {message.draft_wait}", field="draft_wait")
    # Checked before any loop over the tokens.
    if len(message.token_ids) >= served.max_model_len:
        raise InvalidRequestError(
            f"{len(message.token_ids)} tokens leave no room in the model's {served.max_model_len}",
            field="token_ids",
        )
    token_ids = list(message.token_ids)
    prompt_length = message.prompt_length or len(token_ids)
    _check_tokens(token_ids, prompt_length, served)
    longest = served.max_model_len - prompt_length
    max_new_tokens = min(message.max_new_tokens or longest, longest)
    if len(token_ids) - prompt_length >= max_new_tokens:
        raise InvalidRequestError(
            f"{len(token_ids) - prompt_length} output tokens are there, {max_new_tokens} allowed",
            field="max_new_tokens",
        )
    check_in_vocabulary(message.stop_token_ids, served, field="stop_token_ids")
    num_speculative_tokens = served.max_num_speculative_tokens
    if message.HasField("num_speculative_tokens"):
        if message.num_speculative_tokens > num_speculative_tokens:
            raise InvalidRequestError(
                f"{message.num_speculative_tokens} is over the limit {num_speculative_tokens}",
                field="num_speculative_tokens",
            )
        num_speculative_tokens = message.num_speculative_tokens
    if message.tenant_weight > _MAX_TENANT_WEIGHT:
        raise InvalidRequestError(
            f"{message.tenant_weight} is over the limit {_MAX_TENANT_WEIGHT}",
            field="tenant_weight",
        )
    stop_token_ids = frozenset(message.stop_token_ids)
    sampling = check_sampling(message.sampling, served)
    if sampling.prompt_logprobs is not None:
        num_logprobs = prompt_length * (sampling.prompt_logprobs + 1)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"{num_logprobs} logprobs of {prompt_length} tokens are over the limit "
                f"{MAX_PROMPT_LOGPROBS}",
                field="sampling.prompt_logprobs",
            )
    drafted_by = _drafted_by(message, drafters)
    drafting = message.drafting if message.HasField("drafting") else True
    if message.drafter_address and drafted_by is not None and not drafted_by.address:
        drafting = False  # Nobody drafts: no step may wait for it.
    return OpenSequence(
        sequence_id=message.sequence_id,
        token_ids=token_ids,
        prompt_length=prompt_length,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids
        if message.ignore_eos
        else stop_token_ids | served.eos_token_ids,
        draft_wait=_DRAFT_WAITS[message.draft_wait],
        drafting=drafting,
        num_speculative_tokens=num_speculative_tokens,
        cache_salt=message.cache_salt,
        tenant_weight=message.tenant_weight or 1,
        priority=message.priority,
        tokens_per_match=message.tokens_per_match,
        trace=message.trace,
        drafted_by=drafted_by,
    )


def grammar_of(message: verifier_pb2.Open, served: ServedModel) -> Grammar | None:
    """The grammar that the output of a checked Open follows; None if it is free.

    Raises:
        RequestError: names the field.
    """
    if not message.sampling.HasField("structured_output"):
        return None
    structured = message.sampling.structured_output
    kind = structured.WhichOneof("grammar")
    field = f"{_STRUCTURED}.{kind}"
    if kind is None:
        raise InvalidRequestError("names no grammar", field=_STRUCTURED)
    if not served.tokenizer_digest:
        raise UnsupportedFieldError("the model has no tokenizer", field=_STRUCTURED)
    for given, other in (
        (message.ignore_eos, "ignore_eos"),
        (message.sampling.min_new_tokens, "sampling.min_new_tokens"),
    ):
        if given:
            raise InvalidRequestError(
                "not together with structured output, whose grammar says where it ends", field=other
            )
    reasoning: ReasoningTags | None = None
    if structured.HasField("reasoning"):
        reasoning = ReasoningTags(begin=structured.reasoning.begin, end=structured.reasoning.end)
        if not reasoning.end:
            raise InvalidRequestError("must be given", field=f"{_STRUCTURED}.reasoning.end")
    if kind != "choices":
        return Grammar(GrammarKind(kind), getattr(structured, kind), field, reasoning)
    values = list(structured.choices.values)
    if not values:
        raise InvalidRequestError("there is none", field=field)
    return Grammar(GrammarKind.CHOICES, json.dumps(values), field, reasoning)


def update(message: verifier_pb2.Update, session_id: int, *, drafters: NamedDrafters) -> Update:
    """The command of an Update.

    Raises:
        InvalidRequestError: the operator does not allow its drafter.
    """
    address = message.drafter_address if message.HasField("drafter_address") else None
    is_unused = False
    if address:
        is_unused = not drafters.admit(address, field="update.drafter_address")
    return Update(
        session_id=session_id,
        sequence_id=message.sequence_id,
        # Nobody drafts for a sequence that had no drafter either: no step may wait for it.
        drafting=message.drafting and not is_unused,
        drafter_address=None if is_unused else address,
    )


def keep_of_closed(keep: int) -> Keep:
    """What a pool keeps of a sequence that is closed: nothing, if only a newer gateway knows the
    number. Refused, the sequence would run on for nobody.
    """
    return _KEEPS.get(keep) or Keep.NOTHING


def _drafted_by(message: verifier_pb2.Open, drafters: NamedDrafters) -> DraftedBy | None:
    address = message.drafter_address
    if not address and not message.HasField("ngram"):
        return None
    if address and not drafters.admit(address, field="drafter_address"):
        address = ""
    if message.keep not in _KEEPS:
        raise InvalidRequestError(f"unknown value {message.keep}", field="keep")
    # It is sent whole, in one message beside others.
    params = drafter_pb2.NgramParams()
    params.CopyFrom(message.ngram)
    params.DiscardUnknownFields()
    return DraftedBy(
        address=address,
        encoded_params=params.SerializeToString(),
        has_pool=bool(message.ngram.pool_id),
        trace_parent=message.trace_parent,
        hint_tokens=message.hint_tokens,
        keep=_KEEPS[message.keep],
    )


def rejected_command(message: verifier_pb2.Command, error: MessageLimitError) -> Rejected:
    """The event for a command that exceeds a limit.

    It ends a sequence only if the command is an Open; another command is dropped, and its sequence
    goes on.
    """
    if not message.HasField("open"):
        return Rejected(sequence_id="", error=error)
    field = error.field.removeprefix("open.")
    # An id that is too long itself names no sequence.
    sequence_id = "" if field == "sequence_id" else message.open.sequence_id
    return Rejected(sequence_id=sequence_id, error=MessageLimitError(field, error.reason))


def hint(message: verifier_pb2.Draft, served: ServedModel) -> Hint:
    """The hint of a Draft message.

    The draft is cut before its first id outside the vocabulary, which the model could neither
    embed nor sample, and at the longest sequence's end, which bounds its memory. Hot path: its two
    limits are checked here, not by `COMMAND_LIMITS`.

    Raises:
        MessageLimitError: it exceeds a limit; names the field from its command on.
    """
    sequence_id, sent = message.sequence_id, message.token_ids
    is_long = len(sequence_id) > _MAX_DRAFT_ID_BYTES or not sequence_id.isascii()
    if is_long or len(sent) > _MAX_DRAFT_TOKENS:
        _DRAFT_LIMITS.check_within(message, "draft")
    room = max(0, served.max_model_len - message.base_length)
    token_ids = sent[:room]
    if token_ids and max(token_ids) >= served.vocab_size:
        token_ids = list(itertools.takewhile(lambda t: t < served.vocab_size, token_ids))
    return Hint(
        sequence_id=sequence_id,
        base_length=message.base_length,
        token_ids=token_ids,
        matched_ngram_length=message.matched_ngram_length,
        is_indexing=message.indexing,
        source=_SOURCE_OF.get(message.source),
    )


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


def _check_tokens(token_ids: list[int], prompt_length: int, served: ServedModel) -> None:
    if not token_ids:
        raise InvalidRequestError("must not be empty", field="token_ids")
    if prompt_length > len(token_ids):
        raise InvalidRequestError(
            f"{prompt_length} is over the {len(token_ids)} token_ids", field="prompt_length"
        )
    check_in_vocabulary(token_ids, served, field="token_ids")


def check_in_vocabulary(token_ids: Iterable[int], served: ServedModel, *, field: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= served.vocab_size:
        raise InvalidRequestError(
            f"token id {largest} is outside the vocabulary of {served.vocab_size}", field=field
        )


def check_num_logprobs(num_logprobs: int | None, served: ServedModel, *, field: str) -> None:
    """Checks the number of likeliest tokens requested; None: no logprobs requested.

    Raises:
        RequestError: the server offers none, or fewer.
    """
    if num_logprobs is None:
        return
    if served.max_logprobs is None:
        raise UnsupportedFieldError("logprobs are not enabled on this server", field=field)
    if num_logprobs > served.max_logprobs:
        raise InvalidRequestError(
            f"{num_logprobs} is over the limit {served.max_logprobs}", field=field
        )


def check_sampling(
    message: sampling_pb2.SamplingParams, served: ServedModel, *, needs_seed: bool = True
) -> SamplingParams:
    """Checks the parameters of one sequence; `needs_seed`: temperature > 0 requires a seed.

    Raises:
        RequestError: names the field.
    """
    if unknown := find_unknown_field(message):
        raise UnsupportedFieldError(
            f"this version does not know field {unknown}", field=f"sampling.{unknown}"
        )
    try:
        sampling = from_message(SamplingParams, message, path="sampling.")
        check_ranges(sampling, path="sampling.")
    except FieldError as error:
        raise InvalidRequestError(error.reason, field=error.field) from None
    check_in_vocabulary(sampling.logit_bias, served, field="sampling.logit_bias")
    check_num_logprobs(sampling.logprobs, served, field="sampling.logprobs")
    check_num_logprobs(sampling.prompt_logprobs, served, field="sampling.prompt_logprobs")
    if needs_seed and sampling.temperature > 0 and sampling.seed is None:
        raise InvalidRequestError("must be set with temperature > 0", field="sampling.seed")
    return sampling
