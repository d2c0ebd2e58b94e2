"""The messages that ask a drafter for drafts, without a channel.

Owns which tokens are sent, in pieces that the wire allows, and which are sent again when the
drafter has lost them. An exchange is a generator that yields requests, is sent their answers and
returns the drafts; the blocking and the asyncio client differ only in how they carry the messages.

Of a history only the tokens that the drafter lacks are read and sent, after a few that it should
have. If the history was changed meanwhile (cut back and continued differently), those few
contradict the drafter's, and the history is sent again from its beginning. So only the length of a
history is kept here.

A drafter may have more tokens than that, from a call whose answer did not arrive. If a history is
shorter than what the drafter has and agrees with it, the draft continues the longer text. Then,
too, the history is sent again from its beginning.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TypeAlias

import grpc

from tandem.drafts.drafting import Draft, DraftedSequence, DraftQuery
from tandem.generation import TandemError
from tandem.messages import set_field, set_message, word_of
from tandem.v1 import drafter_pb2
from tandem.values import DraftSource, Keep
from tandem.wire import field_errors

Exchange: TypeAlias = Generator[
    drafter_pb2.ProposeRequest, drafter_pb2.ProposeResponse, tuple[Draft, ...]
]

# Within the limits of drafter.proto. Fewer sequences and releases than it allows, so that their ids
# and parameters fit the 1 MiB of a message beside the tokens.
_MAX_DELTA_TOKENS = 8_192
_MAX_REQUEST_TOKENS = 65_536
_MAX_REQUEST_SEQUENCES = 1_024
_MAX_RELEASES = 2_048

# Tokens that the drafter has and that are sent again, so that it notices a changed history.
_OVERLAP_TOKENS = 8

# A drafter that loses a sequence while it is being sent is over its bounds: go on without a draft.
_MAX_REWINDS = 2

_ACCEPTED = (drafter_pb2.STATUS_OK, drafter_pb2.STATUS_NO_MATCH, drafter_pb2.STATUS_INDEXING)


def exchange(queries: Sequence[DraftQuery]) -> Exchange:
    """Yields requests, is sent their answers, returns one draft per query, in order.

    May be abandoned at any point: the tokens that the drafter has received do no harm.

    Raises:
        ValueError: a sequence appears twice, or was released.
        TandemError: INVALID_ARGUMENT, a value that no message can hold; INTERNAL, the answer does
            not fit the request.
    """
    drafts: list[Draft] = [Draft()] * len(queries)
    open_queries = dict(enumerate(queries))
    num_rewinds = [0] * len(queries)
    _check(queries)
    batch_id = 0
    while open_queries:
        batch_id += 1
        request = drafter_pb2.ProposeRequest(batch_id=batch_id)
        ends: dict[int, int] = {}
        room = _MAX_REQUEST_TOKENS
        for i, query in open_queries.items():
            if room < _MAX_DELTA_TOKENS or len(ends) == _MAX_REQUEST_SEQUENCES:
                break
            ends[i] = _add_delta(request, query)
            room -= len(request.sequences[-1].token_ids)
        proposals = _proposals(request, (yield request))
        for (i, end), proposal in zip(ends.items(), proposals, strict=True):
            query = open_queries[i]
            sequence = query.sequence
            is_accepted = proposal.status in _ACCEPTED
            if is_accepted and end < len(query.token_ids):
                sequence.num_sent = end
                continue
            if is_accepted and proposal.base_length == end:
                sequence.num_sent = end
                drafts[i] = _to_draft(proposal)
            elif is_accepted or proposal.status == drafter_pb2.STATUS_OUT_OF_SYNC:
                # Accepted: as part of a longer text, which only a base of 0 replaces.
                known_length = 0 if is_accepted else proposal.known_length
                sequence.num_sent = min(known_length, len(query.token_ids))
                num_rewinds[i] += 1
                if num_rewinds[i] <= _MAX_REWINDS:
                    continue
            else:
                sequence.num_sent = 0
                drafts[i] = Draft(error=_refusal(proposal.message))
            del open_queries[i]
    return tuple(drafts)


def release_requests(
    sequences: Iterable[DraftedSequence], *, keep: Keep, feed_id: str
) -> Iterator[drafter_pb2.ReleaseRequest]:
    """The messages that release these sequences."""
    releases = [
        drafter_pb2.Release(sequence_id=sequence.sequence_id, feed_id=feed_id)
        for sequence in sequences
    ]
    with field_errors():
        for release in releases:
            set_field(release, "keep", keep)
    for start in range(0, len(releases), _MAX_RELEASES):
        yield drafter_pb2.ReleaseRequest(releases=releases[start : start + _MAX_RELEASES])


def _check(queries: Sequence[DraftQuery]) -> None:
    seen: set[str] = set()
    for query in queries:
        sequence_id = query.sequence.sequence_id
        if query.sequence.is_released:
            raise ValueError(f"sequence {sequence_id} was released")
        if sequence_id in seen:
            raise ValueError(f"sequence {sequence_id} is queried twice")
        seen.add(sequence_id)


def _add_delta(request: drafter_pb2.ProposeRequest, query: DraftQuery) -> int:
    """Adds the next piece of a history; returns where it ends."""
    sequence, token_ids = query.sequence, query.token_ids
    num_tokens = len(token_ids)
    if sequence.prompt_length is None:
        sequence.prompt_length = num_tokens
    if sequence.num_sent > num_tokens:
        sequence.num_sent = 0  # cut back: this is another history
    # A base of 0 creates it anew, which costs nothing while it is so short.
    base = max(0, sequence.num_sent - _OVERLAP_TOKENS)
    end = min(num_tokens, base + _MAX_DELTA_TOKENS)
    is_whole = end == num_tokens
    delta = request.sequences.add(sequence_id=sequence.sequence_id, base_length=base)
    with field_errors():
        set_field(delta, "token_ids", token_ids[base:end])
        set_field(delta, "max_draft_tokens", query.max_draft_tokens if is_whole else 0)
        set_field(delta, "max_length", sequence.max_length)
        if base == 0:
            set_field(delta, "prompt_length", sequence.prompt_length)
            delta.params.SetInParent()
            set_message(delta.params, sequence.params, path="params.")
    return end


def _proposals(
    request: drafter_pb2.ProposeRequest, response: drafter_pb2.ProposeResponse
) -> Sequence[drafter_pb2.Proposal]:
    requested = [delta.sequence_id for delta in request.sequences]
    answered = [proposal.sequence_id for proposal in response.proposals]
    if response.batch_id != request.batch_id or answered != requested:
        raise TandemError(
            grpc.StatusCode.INTERNAL, "the drafter's answer does not match the request"
        )
    return response.proposals


def _to_draft(proposal: drafter_pb2.Proposal) -> Draft:
    source = word_of(drafter_pb2.Source.DESCRIPTOR, proposal.source)
    return Draft(
        token_ids=tuple(proposal.token_ids),
        matched_ngram_length=proposal.matched_ngram_length,
        source=None if source is None else DraftSource(source),
        is_indexing=proposal.status == drafter_pb2.STATUS_INDEXING,
    )


def _refusal(message: str) -> TandemError:
    """A refusal names its field first, as `field: what is wrong`."""
    field, colon, text = message.partition(": ")
    if not colon or " " in field:
        field, text = "", message
    return TandemError(grpc.StatusCode.INVALID_ARGUMENT, text, field=field)
