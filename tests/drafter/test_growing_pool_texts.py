"""Texts that feed a pool while they grow, against the same texts fed whole."""

import numpy as np

from drafter.ngram.table import EARLIEST, LATEST, LONGEST
from drafter.pool_index.propose import copy_from_pool, find_in_pool
from drafter.pool_index.records import PoolLimits, feed_key_of, owner_tag_of
from drafter.pools.store import PoolStore
from tests.drafter.running_drafter import FakeClock

NGRAMS = 0b11111
LIMITS = PoolLimits(max_pool_bytes=1 << 20, max_pools_bytes=1 << 21, pool_ttl_s=100.0)


class GrowingPool:
    """One pool; `grow` feeds it all of a text so far, `feed` a text as a whole."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = PoolStore(LIMITS, clock=self.clock, seed=3)

    def grow(self, token_ids: list[int], feed_id: str = "g") -> int:
        array = np.array(token_ids, dtype=np.uint32)
        num_fed = self.store.grow("p", array, feed_id=feed_id, num_fed=0, ngram_mask=NGRAMS)
        self.finish()
        return num_fed

    def feed(self, token_ids: list[int]) -> None:
        array = np.array(token_ids, dtype=np.uint32)
        self.store.feed("p", array, feed_id="", ngram_mask=NGRAMS)
        self.finish()

    def finish(self) -> None:
        self.store.finish()
        self.store.check_integrity()

    def draft(
        self, context: list[int], *, tie: int = LATEST, most: int = 20, own: str = ""
    ) -> tuple[list[int], int] | None:
        """The draft and how far back its match reaches."""
        pool = self.store.block_of("p", NGRAMS)
        buffer = np.array(context, dtype=np.uint32)
        tag = owner_tag_of(feed_key_of(own)) if own else 0
        arena = self.store.arena
        position, reach = find_in_pool(arena, pool, buffer, len(buffer), 1, 5, tie, 64, tag)
        if position == 0:
            return None
        out = np.empty(most, dtype=np.uint32)
        return out[: copy_from_pool(arena, pool, position, out, most)].tolist(), reach


def test_the_pieces_of_a_text_are_drafted_from_as_the_whole_of_it_is() -> None:
    rng = np.random.default_rng(4)
    text = np.concatenate(
        [rng.integers(0, 4, 700), rng.integers(0, 2**32, 700), rng.integers(0, 300, 1200)]
    ).tolist()
    whole, pieces = GrowingPool(), GrowingPool()
    whole.feed(text)
    length = 0
    while length < len(text):
        # From one token at a time to more than a block of them.
        length = min(len(text), length + int(rng.choice([1, 2, 16, 64, 65, 200, 1000])))
        assert pieces.grow(text[:length]) == (length if length > 1 else 0)
    num_drafts = 0
    for end in range(2, len(text), 3):
        for context in (text[max(0, end - 80) : end], [7, *text[end - 2 : end]]):
            for tie in (EARLIEST, LATEST, LONGEST):
                expected = whole.draft(context, tie=tie)
                assert pieces.draft(context, tie=tie) == expected
                num_drafts += expected is not None
    assert num_drafts > 3000
    # What is forgotten of both is the same too, but for the texts' ages.
    assert pieces.store.num_tokens > whole.store.num_tokens == len(text)


def test_what_is_known_of_a_growing_text_is_not_fed_again() -> None:
    pool = GrowingPool()
    assert pool.grow([1, 2, 3, 4]) == 4
    num_bytes = pool.store.occupied_bytes
    # A history that is replayed to a drafter that has lost it, but not its pools.
    assert pool.grow([1, 2]) == 4
    assert pool.grow([1, 2, 3, 4]) == 4
    assert pool.store.occupied_bytes == num_bytes
    assert pool.store.num_texts == 1
    assert pool.grow([1, 2, 3, 4, 5]) == 5
    assert pool.draft([1, 2]) == ([3, 4, 5], 2)


def test_a_growing_text_is_no_occurrence_for_itself_and_hides_none_of_others() -> None:
    pool = GrowingPool()
    pool.feed([1, 2, 3, 10, 11])
    pool.feed([9, 1, 2, 3, 20, 21])
    for length in range(2, 13):
        pool.grow([1, 2, 3, 30, 1, 2, 3, 31, 1, 2, 3, 32][:length])
    context = [8, 1, 2, 3]
    assert pool.draft(context) == ([32], 3)
    assert pool.draft(context, own="g") == ([20, 21], 3)
    assert pool.draft(context, own="another") == ([32], 3)
    assert pool.draft(context, own="g", tie=EARLIEST) == ([10, 11], 3)
    # Nobody else goes on from these.
    assert pool.draft([1, 2, 3, 30], own="g") is None
    assert pool.draft([1, 2, 3, 30]) == ([1, 2, 3, 31, 1, 2, 3, 32], 4)


def test_where_the_earliest_occurrence_is_the_askers_own_the_latest_of_others_counts() -> None:
    pool = GrowingPool()
    pool.grow([1, 2, 3])
    for following in (4, 5):
        pool.feed([1, 2, following])
    assert pool.draft([1, 2], tie=EARLIEST) == ([3], 2)
    assert pool.draft([1, 2], tie=EARLIEST, own="g") == ([5], 2)


def test_a_text_of_others_that_is_forgotten_is_not_found_behind_the_askers_own() -> None:
    pool = GrowingPool()
    pool.feed([1, 2, 10, 11])
    pool.clock.now_s += 50
    pool.grow([1, 2, 30])
    pool.grow([1, 2, 30, 1, 2, 31])
    assert pool.draft([1, 2], own="g") == ([10, 11], 2)
    pool.clock.now_s += 50
    pool.finish()
    assert pool.store.num_texts == 2
    assert pool.draft([1, 2], own="g") is None
    assert pool.draft([1, 2]) == ([31], 2)


def test_a_piece_goes_on_after_the_one_before_it_is_forgotten() -> None:
    pool = GrowingPool()
    text = list(range(100, 300))
    pool.grow(text[:100])
    pool.clock.now_s += 99
    pool.grow(text[:150])
    pool.clock.now_s += 1
    pool.finish()
    pool.grow(text)
    assert pool.draft(text[90:98]) is None, "what is there only to be matched is no occurrence"
    draft = pool.draft(text[60:110], most=100)
    assert draft == (text[110:], 50)
    pool.clock.now_s += 1000
    pool.finish()
    assert pool.store.occupied_bytes == 0


def test_what_was_fed_whole_does_not_grow() -> None:
    pool = GrowingPool()
    array = np.array([1, 2, 3], dtype=np.uint32)
    pool.store.feed("p", array, feed_id="g", ngram_mask=NGRAMS)
    assert pool.grow([1, 2, 3, 4]) == 4
    assert pool.draft([2, 3]) is None
