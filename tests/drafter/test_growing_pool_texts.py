"""Texts that feed a pool while they grow, against the same texts fed as a whole."""

import numpy as np

from drafter.ngram.table import EARLIEST, LATEST, LONGEST
from drafter.pool_index.records import PoolLimits
from drafter.pools.store import PoolStore
from tests.drafter.pool_drafts import draft_from_pool
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
        self, context: list[int], *, tie: int = LATEST, max_tokens: int = 20, own: str = ""
    ) -> tuple[list[int], int] | None:
        """The draft and its match length."""
        return draft_from_pool(
            self.store.arena,
            self.store.block_of("p", NGRAMS),
            context,
            min_ngram=1,
            max_ngram=5,
            tie=tie,
            max_draft_tokens=max_tokens,
            own=own,
        )


def test_a_text_fed_in_pieces_gives_the_same_drafts_as_the_whole_text() -> None:
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
    # The pieces overlap.
    assert pieces.store.num_tokens > whole.store.num_tokens == len(text)


def test_known_tokens_of_a_growing_text_are_not_fed_again() -> None:
    pool = GrowingPool()
    assert pool.grow([1, 2, 3, 4]) == 4
    num_bytes = pool.store.occupied_bytes
    # A history that is replayed to a drafter that still has its pools.
    assert pool.grow([1, 2]) == 4
    assert pool.grow([1, 2, 3, 4]) == 4
    assert pool.store.occupied_bytes == num_bytes
    assert pool.store.num_texts == 1
    assert pool.grow([1, 2, 3, 4, 5]) == 5
    assert pool.draft([1, 2]) == ([3, 4, 5], 2)


def test_a_growing_text_is_not_drafted_from_its_own_pieces_but_from_others() -> None:
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
    # These occur in no other text.
    assert pool.draft([1, 2, 3, 30], own="g") is None
    assert pool.draft([1, 2, 3, 30]) == ([1, 2, 3, 31, 1, 2, 3, 32], 4)


def test_an_earliest_occurrence_in_the_sequences_own_text_yields_to_the_latest_of_others() -> None:
    pool = GrowingPool()
    pool.grow([1, 2, 3])
    for following in (4, 5):
        pool.feed([1, 2, following])
    assert pool.draft([1, 2], tie=EARLIEST) == ([3], 2)
    assert pool.draft([1, 2], tie=EARLIEST, own="g") == ([5], 2)


def test_an_expired_text_is_not_found_behind_the_sequences_own_pieces() -> None:
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


def test_a_piece_stays_usable_after_the_piece_before_it_expired() -> None:
    pool = GrowingPool()
    text = list(range(100, 300))
    pool.grow(text[:100])
    pool.clock.now_s += 99
    pool.grow(text[:150])
    pool.clock.now_s += 1
    pool.finish()
    pool.grow(text)
    assert pool.draft(text[90:98]) is None, "the overlap with the piece before is no occurrence"
    draft = pool.draft(text[60:110], max_tokens=100)
    assert draft == (text[110:], 50)
    pool.clock.now_s += 1000
    pool.finish()
    assert pool.store.occupied_bytes == 0


def test_a_text_fed_whole_does_not_grow() -> None:
    pool = GrowingPool()
    array = np.array([1, 2, 3], dtype=np.uint32)
    pool.store.feed("p", array, feed_id="g", ngram_mask=NGRAMS)
    assert pool.grow([1, 2, 3, 4]) == 4
    assert pool.draft([2, 3]) is None
