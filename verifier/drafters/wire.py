"""The messages of a drafter's stream: deltas to bytes, and bytes to proposals."""

import itertools

from google.protobuf.message import DecodeError

from tandem.messages import set_field
from tandem.v1 import drafter_pb2
from tandem.values import DraftSource, Keep
from verifier.drafters.batches import (
    DeltaBatch,
    DrafterProtocolError,
    Proposal,
    ProposalStatus,
)

METHOD = "/tandem.v1.DrafterService/ProposeStream"

# The batch id of greetings; those of the feed begin at 1.
_GREETING_ID = 0

_STATUSES = {int(status): status for status in ProposalStatus}
_SOURCES: dict[int, DraftSource] = {
    drafter_pb2.SOURCE_SEQUENCE: DraftSource.SEQUENCE,
    drafter_pb2.SOURCE_POOL: DraftSource.POOL,
}


def greeting() -> bytes:
    """A request that a drafter answers at once, and that changes nothing."""
    return drafter_pb2.ProposeRequest(batch_id=_GREETING_ID).SerializeToString()


def is_greeting(answer: object) -> bool:
    """Whether this is the answer to `greeting`."""
    try:
        return (
            isinstance(answer, bytes)
            and drafter_pb2.ProposeResponse.FromString(answer).batch_id == _GREETING_ID
        )
    except DecodeError:
        return False


def request(batch: DeltaBatch) -> bytes:
    """One message to a drafter; hot path."""
    # Filling the message in place is three times as fast as the alternatives.
    message = drafter_pb2.ProposeRequest(batch_id=batch.batch_id)
    add = message.sequences.add
    for delta in batch.deltas:
        sequence = add()
        sequence.sequence_id = delta.sequence_id
        sequence.base_length = delta.base_length
        sequence.token_ids.extend(delta.token_ids)
        sequence.max_draft_tokens = delta.max_draft_tokens
        sequence.max_length = delta.max_length
        if delta.encoded_params is not None:
            sequence.prompt_length = delta.prompt_length
            sequence.params.MergeFromString(delta.encoded_params)
            sequence.trace_parent = delta.trace_parent
    for release in batch.releases:
        released = message.releases.add()
        released.sequence_id = release.sequence_id
        if release.keep is not Keep.NOTHING:
            set_field(released, "keep", release.keep)
            released.length = release.length
    return message.SerializeToString()


def proposals(data: bytes, *, num_expected: int, vocab_size: int) -> tuple[int, list[Proposal]]:
    """A drafter's answer: its batch's id, and the proposals in order; hot path.

    A draft is cut before its first id outside the vocabulary, which the model could not embed.

    Raises:
        DrafterProtocolError: it is no answer.
    """
    try:
        response = drafter_pb2.ProposeResponse.FromString(data)
    except DecodeError:
        raise DrafterProtocolError("it cannot be parsed") from None
    # Before anything is made of them: many empty ones fit into an answer.
    if len(response.proposals) != num_expected:
        raise DrafterProtocolError(f"{len(response.proposals)} answers to {num_expected} deltas")
    return response.batch_id, [_proposal(each, vocab_size) for each in response.proposals]


def _proposal(message: drafter_pb2.Proposal, vocab_size: int) -> Proposal:
    token_ids = message.token_ids[:]
    if token_ids and max(token_ids) >= vocab_size:
        token_ids = list(itertools.takewhile(lambda token_id: token_id < vocab_size, token_ids))
    return Proposal(
        message.sequence_id,
        message.base_length,
        token_ids,
        message.matched_ngram_length,
        _SOURCES.get(message.source),
        _STATUSES.get(message.status, ProposalStatus.UNSPECIFIED),
        message.known_length,
        message.message,
    )
