"""Reads the commands of a session into the engine's types, and checks them.

Every mistake that a client can make in an Open is found here, before the engine sees it, and named
by its field.
"""

import itertools
import json

from servicekit.errors import MessageLimitError
from servicekit.message_limits import MessageLimits
from servicekit.telemetry.trace_context import is_trace_parent
from tandem.v1 import drafter_pb2, limits_pb2, verifier_pb2
from tandem.values import DraftSource, DraftWait, Keep, ReasoningTags
from verifier.drafts.draft_buffer import Hint
from verifier.drafts.drafted_by import DraftedBy
from verifier.engine.messages import Rejected, Update
from verifier.errors import InvalidRequestError, UnsupportedFieldError, WrongModelError
from verifier.scheduling.sequence import OpenSequence
from verifier.service.named_drafters import NamedDrafters
from verifier.service.sampling_checks import check_in_vocabulary, check_sampling
from verifier.service.served_model import ServedModel
from verifier.structured.grammar import Grammar
from verifier.structured.library_grammar import GrammarKind

# Limits of a session's messages: the number of commands, and the fields of each.
SESSION_LIMITS = MessageLimits(verifier_pb2.SessionRequest.DESCRIPTOR, limits_pb2)
COMMAND_LIMITS = MessageLimits(verifier_pb2.Command.DESCRIPTOR, limits_pb2)
_DRAFT_LIMITS = MessageLimits(verifier_pb2.Draft.DESCRIPTOR, limits_pb2)
_MAX_DRAFT_ID_BYTES = _DRAFT_LIMITS.max_bytes("sequence_id")
_MAX_DRAFT_TOKENS = _DRAFT_LIMITS.max_items("token_ids")
# For one prompt, including the likeliest tokens at each position: a gateway can send them in one
# message.
MAX_PROMPT_LOGPROBS = 1 << 17
_MAX_TENANT_WEIGHT = 1000

_DRAFT_WAITS = {
    verifier_pb2.DRAFT_WAIT_UNSPECIFIED: DraftWait.ADAPTIVE,
    verifier_pb2.DRAFT_WAIT_ADAPTIVE: DraftWait.ADAPTIVE,
    verifier_pb2.DRAFT_WAIT_NEVER: DraftWait.NEVER,
    verifier_pb2.DRAFT_WAIT_ALWAYS: DraftWait.ALWAYS,
}
_SOURCE_OF: dict[int, DraftSource] = {
    drafter_pb2.SOURCE_SEQUENCE: DraftSource.SEQUENCE,
    drafter_pb2.SOURCE_POOL: DraftSource.POOL,
}

_KEEPS: dict[int, Keep | None] = {
    drafter_pb2.KEEP_UNSPECIFIED: None,
    drafter_pb2.KEEP_NOTHING: Keep.NOTHING,
    drafter_pb2.KEEP_OUTPUT: Keep.OUTPUT,
    drafter_pb2.KEEP_ALL: Keep.ALL,
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
    if len(message.predicted_token_ids) > served.max_model_len:
        raise InvalidRequestError(
            f"{len(message.predicted_token_ids)} tokens are over the model's "
            f"{served.max_model_len}",
            field="predicted_token_ids",
        )
    check_in_vocabulary(message.predicted_token_ids, served, field="predicted_token_ids")
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
        predicted_token_ids=message.predicted_token_ids[:],
        # Other policies are those of known drafters, whose drafts are theirs alone.
        resumes_hints=params.tie == drafter_pb2.TIE_LONGEST
        and message.draft_wait != verifier_pb2.DRAFT_WAIT_ALWAYS,
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


def _check_tokens(token_ids: list[int], prompt_length: int, served: ServedModel) -> None:
    if not token_ids:
        raise InvalidRequestError("must not be empty", field="token_ids")
    if prompt_length > len(token_ids):
        raise InvalidRequestError(
            f"{prompt_length} is over the {len(token_ids)} token_ids", field="prompt_length"
        )
    check_in_vocabulary(token_ids, served, field="token_ids")
