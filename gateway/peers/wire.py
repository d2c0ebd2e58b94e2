"""The messages of verifiers and drafters to the gateway's own types and back.

Knows no sequence: `generation/` and `draft_feed.py` decide which messages are possible.

Repeated fields are read by slicing and written by filling the message in place: between a step's
events and its hints this is most of the gateway's work, and both are three times as fast as the
alternatives.
"""

import dataclasses

from google.protobuf.message import Message

from gateway.messages.drafter import DeltaBatch, Proposal, ProposalStatus
from gateway.messages.request import Keep, NgramParams, SamplingParams
from gateway.messages.response import FinishReason
from gateway.messages.sizes import MAX_UINT32
from gateway.messages.verifier import (
    CommandBatch,
    Decided,
    Hint,
    OpenCommand,
    Opened,
    PromptScored,
    Rejected,
    StepTraced,
    UnreadableEvent,
    VerifierEvent,
    Welcome,
)
from tandem.v1 import drafter_pb2, sampling_pb2, verifier_pb2

PROTOCOL_VERSION = 1

# After a step whose drafts were all accepted, the match is 1 + tokens_per_match times as long. A
# hint this many times as long as one step's drafts still holds all drafts of the next step.
_RUN_AHEAD = 4

_FINISH_REASONS = {int(reason): reason for reason in FinishReason}
_PROPOSAL_STATUSES = {int(status): status for status in ProposalStatus}

# Verifiers


def hello_to_proto(gateway_id: str) -> verifier_pb2.SessionRequest:
    """The first message of a session."""
    hello = verifier_pb2.Hello(protocol_version=PROTOCOL_VERSION, gateway_id=gateway_id)
    return verifier_pb2.SessionRequest(commands=[verifier_pb2.Command(hello=hello)])


def welcome_from_proto(message: verifier_pb2.SessionResponse) -> Welcome | None:
    """The answer to Hello; None if the message is anything else, or of another version."""
    if len(message.events) != 1 or message.events[0].WhichOneof("event") != "welcome":
        return None
    welcome = message.events[0].welcome
    if welcome.protocol_version != PROTOCOL_VERSION:
        return None
    return Welcome(
        model_id=welcome.model_id,
        model_digest=welcome.model_digest,
        tokenizer_digest=welcome.tokenizer_digest,
        max_model_len=welcome.limits.max_model_len,
        max_num_speculative_tokens=welcome.limits.max_num_speculative_tokens,
        vocab_size=welcome.limits.vocab_size,
    )


def commands_to_proto(batch: CommandBatch) -> verifier_pb2.SessionRequest:
    """One message to a verifier, without its Opens; hot path."""
    request = verifier_pb2.SessionRequest()
    add = request.commands.add
    for sequence_id, drafting in batch.updates:
        update = add().update
        update.sequence_id = sequence_id
        update.drafting = drafting
    for hint in batch.hints:
        sequence_id, base_length, token_ids, matched_ngram_length, is_indexing, source = hint
        draft = add().draft
        draft.sequence_id = sequence_id
        draft.base_length = base_length
        draft.token_ids.extend(token_ids)
        draft.matched_ngram_length = matched_ngram_length
        if is_indexing:
            draft.indexing = True
        if source:
            draft.source = drafter_pb2.Source.ValueType(source)
    for sequence_id in batch.closes:
        add().close.sequence_id = sequence_id
    return request


def open_to_proto(command: OpenCommand) -> verifier_pb2.Open:
    """Starts a sequence."""
    request = command.request
    return verifier_pb2.Open(
        sequence_id=command.sequence_id,
        token_ids=command.token_ids,
        prompt_length=len(request.prompt_token_ids),
        sampling=_sampling_to_proto(command.sampling, command.seed),
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        draft_wait=verifier_pb2.DraftWait.Value(f"DRAFT_WAIT_{command.draft_wait.name}"),
        drafting=command.drafting,
        num_speculative_tokens=request.num_speculative_tokens,
        cache_salt=request.cache_salt,
        priority=request.priority,
        expected_model_digest=request.model_digest,
        tokens_per_match=request.ngram.tokens_per_match,
        trace=request.trace,
    )


def largest_field(message: Message) -> str:
    """The path of the largest field of a message."""
    sizes = {
        field.name: type(message)(**{field.name: value}).ByteSize()
        for field, value in message.ListFields()
    }
    name = max(sizes, key=lambda name: sizes[name])
    value = getattr(message, name)
    return f"{name}.{largest_field(value)}" if isinstance(value, Message) else name


def events_from_proto(message: verifier_pb2.SessionResponse) -> list[VerifierEvent]:
    """The events of one verifier step, in order; hot path.

    An event that cannot be read becomes an `UnreadableEvent`: it fails its own sequence only.
    """
    events: list[VerifierEvent] = []
    for event in message.events:
        kind = event.WhichOneof("event")
        if kind == "decided":
            decided = event.decided
            finish_reason = _FINISH_REASONS.get(decided.finish_reason)
            if finish_reason is None:
                reason = f"finish_reason has no value {decided.finish_reason}"
                events.append(UnreadableEvent(decided.sequence_id, reason))
                continue
            events.append(
                Decided(
                    decided.sequence_id,
                    decided.base_length,
                    decided.token_ids[:],
                    decided.num_draft_tokens,
                    decided.num_accepted_tokens,
                    decided.num_wanted_draft_tokens,
                    finish_reason,
                    [each.SerializeToString() for each in decided.logprobs],
                    decided.matched_ngram_length,
                    decided.source,
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
        else:
            events.append(UnreadableEvent("", f"an event of kind {kind}"))
    return events


# Drafters


def deltas_to_proto(batch: DeltaBatch) -> drafter_pb2.ProposeRequest:
    """One message to a drafter; hot path."""
    request = drafter_pb2.ProposeRequest(batch_id=batch.batch_id)
    add = request.sequences.add
    for delta in batch.deltas:
        sequence = add()
        sequence.sequence_id = delta.sequence_id
        sequence.base_length = delta.base_length
        sequence.token_ids.extend(delta.token_ids)
        sequence.max_draft_tokens = delta.max_draft_tokens
        sequence.max_length = delta.max_length
        if delta.new_history is not None:
            sequence.prompt_length = delta.new_history.prompt_length
            sequence.params.CopyFrom(_ngram_to_proto(delta.new_history.ngram))
    for release in batch.releases:
        message = request.releases.add()
        message.sequence_id = release.sequence_id
        if release.keep is not Keep.NOTHING:
            message.keep = drafter_pb2.Keep.ValueType(release.keep)
            message.feed_id = release.sequence_id
            message.length = release.length
    return request


def proposals_from_proto(message: drafter_pb2.ProposeResponse) -> list[Proposal]:
    """One drafter's answers, in order; hot path."""
    return [
        Proposal(
            _PROPOSAL_STATUSES.get(proposal.status, ProposalStatus.UNSPECIFIED),
            Hint(
                proposal.sequence_id,
                proposal.base_length,
                proposal.token_ids[:],
                proposal.matched_ngram_length,
                proposal.status == drafter_pb2.STATUS_INDEXING,
                proposal.source,
            ),
            proposal.known_length,
            proposal.message,
        )
        for proposal in message.proposals
    ]


def _sampling_to_proto(sampling: SamplingParams, seed: int) -> sampling_pb2.SamplingParams:
    values = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    # Verifiers get no beam search.
    return sampling_pb2.SamplingParams(**values | {"seed": seed, "num_beams": None})


def _ngram_to_proto(ngram: NgramParams) -> drafter_pb2.NgramParams:
    return drafter_pb2.NgramParams(
        min_ngram=ngram.min_ngram,
        max_ngram=ngram.max_ngram,
        overlap=drafter_pb2.Overlap.ValueType(ngram.overlap),
        tie=drafter_pb2.Tie.ValueType(ngram.tie),
        # The verifier applies the request's figure; the rest of a draft serves its next steps.
        tokens_per_match=min(ngram.tokens_per_match * _RUN_AHEAD, MAX_UINT32),
        algorithm=drafter_pb2.Algorithm.ValueType(ngram.algorithm),
        chained=ngram.chained,
        pool_id=ngram.pool_id,
        pool_min_ngram=ngram.pool_min_ngram,
        pool_feed_tokens=ngram.pool_feed_tokens,
        pool_keep=drafter_pb2.Keep.ValueType(ngram.pool_keep)
        if ngram.pool_feed_tokens
        else drafter_pb2.KEEP_UNSPECIFIED,
    )
