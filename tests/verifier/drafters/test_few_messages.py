"""Releases, and prompts whose hints are of no use, go with messages that are sent anyway."""

from tandem.values import Keep
from tests.verifier.drafters.feeding import (
    drafted_by,
    exchange,
    fed_sequence,
    feed_of,
    next_batch,
    step,
)
from verifier.drafters.feed import DraftFeed
from verifier.drafters.releases import RELEASE_DELAY_S
from verifier.drafts.draft_wait import HintRecord
from verifier.drafts.hint_requests import USELESS_HINTS_BEFORE_PROBING
from verifier.scheduling.sequence import Sequence


class TestReleases:
    def test_they_go_with_the_next_batch(self) -> None:
        feed = ended(fed_sequence())
        assert feed.next_batch(0.0) is None
        feed.histories.add(fed_sequence([4, 5], name="next"), drafted_by())
        batch = next_batch(feed, 0.01)
        assert [release.sequence_id for release in batch.releases] == ["sequence"]
        assert [delta.sequence_id for delta in batch.deltas] == ["next"]

    def test_alone_they_wait_for_a_bounded_time_that_wakes_the_engine(self) -> None:
        feed = ended(fed_sequence())
        assert feed.next_batch(0.0) is None
        assert feed.due_s(0.0) == RELEASE_DELAY_S
        assert feed.next_batch(RELEASE_DELAY_S * 0.9) is None
        assert next_batch(feed, RELEASE_DELAY_S).releases
        assert feed.due_s(RELEASE_DELAY_S) is None

    def test_one_that_feeds_a_pool_waits_for_nothing(self) -> None:
        feed = DraftFeed()
        feed.histories.add(fed_sequence(), drafted_by(pool_id="0:/shared"))
        exchange(feed)
        feed.histories.remove("sequence", keep=Keep.OUTPUT)
        assert next_batch(feed).releases


class TestPrompts:
    def test_where_hints_are_useless_one_goes_with_the_first_request(self) -> None:
        sequence = expecting_useless_hints([1, 2, 3])
        feed = feed_of(sequence)
        assert feed.next_batch(0.0) is None
        step(feed, sequence, 4)
        (delta,) = next_batch(feed).deltas
        assert (delta.token_ids, delta.max_draft_tokens) == ([1, 2, 3, 4], 24)

    def test_a_long_one_goes_at_once(self) -> None:
        feed = feed_of(expecting_useless_hints([1] * 2_000))
        assert len(next_batch(feed).deltas[0].token_ids) == 2_000

    def test_a_sequence_that_ends_before_its_first_request_costs_no_message(self) -> None:
        feed = feed_of(expecting_useless_hints([1, 2, 3]))
        feed.histories.remove("sequence")
        assert feed.is_idle


def ended(sequence: Sequence) -> DraftFeed:
    """The feed of a sequence that was sent, and is over."""
    feed = feed_of(sequence)
    exchange(feed)
    feed.histories.remove(sequence.sequence_id)
    return feed


def expecting_useless_hints(token_ids: list[int]) -> Sequence:
    sequence = fed_sequence(token_ids)
    sequence.hint_record = HintRecord(num_useless_before=USELESS_HINTS_BEFORE_PROBING)
    return sequence
