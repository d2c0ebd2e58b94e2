"""Sequences that a drafter drafts for, and a drafter's honest answers to what it is sent."""

from typing import Any

from tandem.v1 import drafter_pb2
from tandem.values import DraftSource, Keep
from tests.verifier.sequences import make_sequence
from verifier.drafters.batches import (
    Delta,
    DeltaBatch,
    Proposal,
    ProposalStatus,
)
from verifier.drafters.feed import DraftFeed
from verifier.drafts.draft_buffer import Hint
from verifier.drafts.drafted_by import DraftedBy
from verifier.scheduling.sequence import Sequence

ADDRESS = "drafter:1"


def drafted_by(
    address: str = ADDRESS,
    *,
    pool_id: str = "",
    hint_tokens: int = 0,
    keep: Keep = Keep.NOTHING,
    predicted: tuple[int, ...] = (),
    **ngram: Any,
) -> DraftedBy:
    params = drafter_pb2.NgramParams(min_ngram=2, max_ngram=5, pool_id=pool_id, **ngram)
    return DraftedBy(
        address=address,
        encoded_params=params.SerializeToString(),
        has_pool=bool(pool_id),
        hint_tokens=hint_tokens,
        keep=keep,
        predicted_token_ids=predicted,
    )


def fed_sequence(
    token_ids: tuple[int, ...] | list[int] = (1, 2, 3), name: str = "sequence", **fields: Any
) -> Sequence:
    """A sequence with room for thousands of tokens."""
    return make_sequence(
        token_ids=list(token_ids), sequence_id=name, num_output_tokens=10_000, **fields
    )


def feed_of(*sequences: Sequence, **policy: Any) -> DraftFeed:
    """A feed of these sequences; `policy`: as `drafted_by` takes it."""
    feed = DraftFeed()
    for sequence in sequences:
        assert feed.histories.add(sequence, drafted_by(**policy))
    return feed


def num_unanswered(feed: DraftFeed) -> int:
    """Batches in flight."""
    return len(feed._in_flight)


def step(feed: DraftFeed, sequence: Sequence, *token_ids: int, wanted: int = 24) -> None:
    """A step decided these tokens, and wants drafts from now on."""
    sequence.token_ids += token_ids
    sequence.num_wanted_draft_tokens = wanted
    feed.histories.advance(sequence)


def answer(
    delta: Delta,
    status: ProposalStatus = ProposalStatus.OK,
    *,
    known: int = 0,
    draft: tuple[int, ...] = (),
) -> Proposal:
    """What a drafter that appended the delta would answer, or one that did not."""
    return Proposal(
        delta.sequence_id,
        delta.base_length + len(delta.token_ids),
        list(draft),
        2 if draft else 0,
        DraftSource.SEQUENCE if draft else None,
        status,
        known,
        "why" if status is ProposalStatus.INVALID else "",
    )


def next_batch(feed: DraftFeed, now_s: float = 0.0) -> DeltaBatch:
    """The next batch, which there must be."""
    batch = feed.next_batch(now_s)
    assert batch is not None
    return batch


def exchange(
    feed: DraftFeed, *, now_s: float = 0.0, **fields: Any
) -> tuple[DeltaBatch, list[tuple[Sequence, Hint]]]:
    """One batch, answered alike for all its deltas: the batch, and the hints that came of it."""
    batch = next_batch(feed, now_s)
    proposals = [answer(delta, **fields) for delta in batch.deltas]
    return batch, feed.on_proposals(batch.batch_id, proposals).hints


def hint_of(
    sequence: Sequence, *token_ids: int, length: int | None = None, is_indexing: bool = False
) -> tuple[Sequence, Hint]:
    """A hint as a feed returns it, for the sequence's current length unless it says otherwise."""
    return sequence, Hint(
        sequence.sequence_id,
        len(sequence.token_ids) if length is None else length,
        list(token_ids),
        2 if token_ids else 0,
        is_indexing,
        DraftSource.SEQUENCE if token_ids else None,
    )


def check_invariants(feed: DraftFeed) -> None:
    """Asserts the invariants in `Histories`' docstring, and the bounds of what is in flight."""
    fed = feed.histories
    urgent, backlog, histories = fed.urgent, fed.backlog, fed.by_id
    assert not urgent.keys() & backlog.keys()
    for queued in (urgent, backlog):
        assert all(histories[name] is history for name, history in queued.items())
    over = {name: each for name, each in histories.items() if each.end is not None}
    assert fed.waiting == {name: each for name, each in over.items() if not each.is_held}
    feed.histories.check_integrity()
    for name, history in histories.items():
        assert history.sequence.sequence_id == name
        assert history.num_sent >= 0
        is_queued = name in urgent or name in backlog
        if history.end is None:
            length = len(history.predicted) + len(history.sequence.token_ids)
            assert history.num_sent <= length
            is_unsent = history.num_sent < length
            assert is_queued or not (is_unsent and history.num_wanted)
            is_deferred = history.sequence.hint_record.expects_useless_hints
            assert is_queued or history.num_sent or is_deferred
    assert not set(fed.releases) & histories.keys()
    assert len(feed._in_flight) <= 8
    assert sum(not batch.is_live for batch in feed._in_flight) <= 2
