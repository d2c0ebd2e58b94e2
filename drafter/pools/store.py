"""All pools: which texts are kept, in which pool, for how long, within which bounds.

Owns feeding, the order of texts and every reason to forget one: the pool is full, all pools
together are, the text is too old. Does not know why a text is fed, who runs the work, nor how
memory is laid out and counted (`pool_memory.py`).

A text is fed at once, but taken in by `work`, piece by piece, so that nobody waits for it: appended
at the end of its pool, indexed, and drafted from up to where it is indexed. Where room is needed
the oldest text goes, from its beginning, piece by piece as well: that of the same pool where the
pool is at its bound, else the oldest of all.

A text that is fed while it grows is kept as pieces, each a text of its own that begins with the
last tokens of the one before. Of these tokens nothing is indexed again, and a draft goes on from
piece to piece: so the pieces of a text serve as the whole of it does.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from drafter.ngram.match import MAX_MATCH_LENGTH
from drafter.pool_index.memory import PoolMemory
from drafter.pool_index.records import (
    FeedOutcome,
    Pool,
    PoolLimits,
    Text,
    TextCopy,
    TextEviction,
    feed_key_of,
)
from drafter.pools.waiting import WaitingTexts

MIN_TEXT_TOKENS = 2
"""A shorter text continues nothing."""

# What one call of `work` does at most: each about a hundred microseconds.
_NGRAMS_PER_PIECE = 256
_TOKENS_PER_PIECE = 958


class PoolStore:
    """Owned by the event loop: every method runs to its end without an await.

    Invariants (see `check_integrity`): `occupied_bytes` is never above `max_pools_bytes`; texts are
    ordered by when they were fed, in each pool and over all; a pool without any text is not there.

    Attributes:
        limits: the bounds.
        arena: all pools' memory; what a kernel looks pools up in.
        generation: 1 or more; another after every change of what `block_of` may return.
    """

    def __init__(
        self,
        limits: PoolLimits,
        *,
        clock: Callable[[], float],
        seed: int,
        on_feed: Callable[[FeedOutcome], None] = lambda outcome: None,
        on_eviction: Callable[[TextEviction], None] = lambda reason: None,
        key_bits: int = 27,
    ) -> None:
        """Makes an empty store.

        Args:
            limits: the bounds.
            clock: seconds, monotonic.
            seed: 64 secret bits, see `make_arena`.
            on_feed: called for every text that was to be kept.
            on_eviction: called for every text that was forgotten.
            key_bits: see `make_arena`; for tests.
        """
        self.limits = limits
        self._make_memory = partial(PoolMemory, limits, seed=seed, key_bits=key_bits)
        self._clock = clock
        self._on_feed = on_feed
        self._on_eviction = on_eviction
        self.generation = 0
        self._num_pools_made = 0
        self.forget_all()

    def forget_all(self) -> None:
        """Empties the store, whatever state it is in."""
        self._memory = self._make_memory()
        self.arena = self._memory.arena
        self.generation += 1
        self._pools: dict[str, Pool] = {}
        self._num_texts = 0
        # Texts of which something is in a pool, in the order they were fed; the last may be partly
        # waiting. Then those of which nothing is.
        self._texts: OrderedDict[Text, None] = OrderedDict()
        self._waiting = WaitingTexts(self.limits.max_waiting_bytes)
        # In the order in which they are indexed.
        self._unindexed: dict[Pool, None] = {}

    @property
    def num_pools(self) -> int:
        return len(self._pools)

    @property
    def num_texts(self) -> int:
        """Of all pools; any thread may ask."""
        return self._num_texts

    @property
    def num_tokens(self) -> int:
        """Tokens that are in pools, not those that wait."""
        return sum(self._memory.num_tokens(pool) for pool in self._pools.values())

    @property
    def occupied_bytes(self) -> int:
        """What all pools occupy, their indexes, records and waiting texts included."""
        return self._memory.occupied_bytes + self._waiting.num_bytes

    def feed(
        self, pool_id: str, token_ids: npt.NDArray[np.uint32], *, feed_id: str, ngram_mask: int
    ) -> FeedOutcome:
        """Keeps a text, once `work` has been done.

        Args:
            pool_id: of the pool it goes to; made if there is none.
            token_ids: [n] uint32; copied.
            feed_id: feeding one that is kept again changes nothing. Empty: always a new text.
            ngram_mask: bit n - 1 for each n-gram size that the pool's index must cover.
        """
        outcome = self._feed(pool_id, token_ids, feed_key_of(feed_id), ngram_mask, self._clock())
        self._on_feed(outcome)
        return outcome

    def grow(
        self,
        pool_id: str,
        token_ids: npt.NDArray[np.uint32],
        *,
        feed_id: str,
        num_fed: int,
        ngram_mask: int,
    ) -> int:
        """Keeps what a text has grown by since it was fed last, once `work` has been done.

        Args:
            pool_id: of the pool it goes to; made if there is none.
            token_ids: all of the text, [n] uint32; what is new is copied.
            feed_id: the text's name, not empty; what is kept under it is not fed again.
            num_fed: how many of its tokens have been fed before, as far as the caller knows.
            ngram_mask: see `feed`.

        Returns:
            How many of its tokens have been fed by now; those that were dropped count too.
        """
        feed_key = feed_key_of(feed_id)
        pool = self._pools.get(pool_id)
        known = None if pool is None else pool.newest.get(feed_key)
        if known is not None:
            # What was fed whole does not grow.
            num_fed = max(num_fed, known.end or len(token_ids))
        if len(token_ids) <= num_fed:
            return num_fed
        num_overlap = min(num_fed, MAX_MATCH_LENGTH)
        outcome = self._feed(
            pool_id,
            token_ids[num_fed - num_overlap :],
            feed_key,
            ngram_mask,
            self._clock(),
            num_overlap=num_overlap,
            end=len(token_ids),
        )
        self._on_feed(outcome)
        return num_fed if outcome is FeedOutcome.TOO_SHORT else len(token_ids)

    def restore(self, text: TextCopy) -> FeedOutcome:
        """Keeps a text of a snapshot; the oldest first, and before any is fed."""
        if text.age_s >= self.limits.pool_ttl_s:
            return FeedOutcome.DROPPED
        return self._feed(
            text.pool_id,
            text.token_ids,
            text.feed_key,
            text.ngram_mask,
            self._clock() - text.age_s,
            num_overlap=text.num_overlap,
            end=text.end,
        )

    def block_of(self, pool_id: str, ngram_mask: int) -> int:
        """Returns what a kernel looks a pool up by; 0: there is nothing to find.

        n-gram sizes that the pool's index does not cover are indexed from now on, by `work`.
        """
        pool = self._pools.get(pool_id)
        if pool is None:
            return 0
        if ngram_mask & ~pool.ngram_mask:
            self._cover(pool, ngram_mask)
        return pool.block

    @property
    def has_work(self) -> bool:
        """Whether `work` has anything to do."""
        return bool(self._unindexed or self._waiting.texts or self._has_expired())

    def work(self) -> bool:
        """Does one small piece of what is to do; returns `has_work`."""
        if self._has_expired():
            self._evict_piece(next(iter(self._texts)), TextEviction.EXPIRED)
        elif self._unindexed:
            pool = next(iter(self._unindexed))
            num_indexed = self._memory.index(pool, _NGRAMS_PER_PIECE)
            if num_indexed < 0:
                self._make_room(pool)
            elif num_indexed < _NGRAMS_PER_PIECE:
                del self._unindexed[pool]
        elif self._waiting.texts:
            self._take_in_piece(self._waiting.texts[0])
        return self.has_work

    def finish(self) -> None:
        """Does all work, however long that takes: before anything is served, and in tests."""
        while self.has_work:
            self.work()

    def pool_ids(self) -> list[str]:
        """The pools that are there now."""
        return list(self._pools)

    def version_of(self, pool_id: str) -> int:
        """Another after every change of what a pool holds, also if it goes and comes again."""
        pool = self._pools.get(pool_id)
        return -1 if pool is None else pool.version

    def texts_of(self, pool_id: str) -> Iterator[TextCopy]:
        """Copies the texts of a pool one by one, the oldest first; the store may change between.

        A text that is evicted meanwhile is left out, of one that is evicted in part the rest comes.
        """
        pool = self._pools.get(pool_id)
        if pool is None:
            return
        now_s = self._clock()
        for text in list(pool.texts):
            if self._pools.get(pool_id) is not pool:
                # Nothing of it is left, and in its place there may be text of others by now.
                return
            token_ids = self._memory.copy(text)
            if text.waiting is not None:
                token_ids = np.concatenate((token_ids, text.waiting))
            if len(token_ids) >= MIN_TEXT_TOKENS:
                yield TextCopy(
                    pool_id=pool_id,
                    token_ids=token_ids,
                    feed_key=text.feed_key,
                    age_s=max(0.0, now_s - text.fed_at_s),
                    ngram_mask=pool.ngram_mask,
                    num_overlap=text.num_overlap,
                    end=text.end,
                )

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert self.occupied_bytes <= self.limits.max_pools_bytes
        assert self.num_texts == sum(len(pool.texts) for pool in self._pools.values())
        self._memory.check_integrity(self._pools.values())
        self._waiting.check_integrity()
        for pool in self._pools.values():
            assert pool.texts, "a pool without text is not there"
            for feed_key, text in pool.newest.items():
                assert text is [each for each in pool.texts if each.feed_key == feed_key][-1]
            assert pool.num_kept == sum(text in self._texts for text in pool.texts)
            fed_at = [text.fed_at_s for text in pool.texts]
            assert fed_at == sorted(fed_at)
        fed_at = [text.fed_at_s for text in (*self._texts, *self._waiting.texts)]
        assert fed_at == sorted(fed_at)

    def _feed(
        self,
        pool_id: str,
        token_ids: npt.NDArray[np.uint32],
        feed_key: bytes,
        ngram_mask: int,
        fed_at_s: float,
        *,
        num_overlap: int = 0,
        end: int = 0,
    ) -> FeedOutcome:
        if len(token_ids) < MIN_TEXT_TOKENS:
            return FeedOutcome.TOO_SHORT
        pool = self._pools.get(pool_id)
        known = None if pool is None else pool.newest.get(feed_key)
        if known is not None and end <= known.end:
            return FeedOutcome.DUPLICATE
        if not self._waiting.has_room_for(token_ids):
            return FeedOutcome.DROPPED
        waiting = token_ids.copy()  # there may be no memory: nothing is changed yet
        if pool is None:
            pool = self._pools[pool_id] = Pool(pool_id, version=self._num_pools_made << 32)
            self._num_pools_made += 1
        text = Text(pool, waiting, feed_key, fed_at_s, num_overlap=num_overlap, end=end)
        pool.add(text)
        self._num_texts += 1
        self._waiting.add(text)
        self._cover(pool, ngram_mask)
        return FeedOutcome.KEPT

    def _cover(self, pool: Pool, ngram_mask: int) -> None:
        if ngram_mask & ~pool.ngram_mask:
            pool.ngram_mask |= ngram_mask
            pool.version += 1
        if pool.block:
            self._memory.cover(pool)
            self._unindexed[pool] = None

    def _take_in_piece(self, text: Text) -> None:
        """Appends the next tokens of a text that waits, if there is room."""
        pool = text.pool
        if text not in self._texts:
            self.generation += pool.block == 0
            if not self._memory.add(text):
                self._make_room(pool)
                return
            self._texts[text] = None
        assert text.waiting is not None
        num_appended = self._memory.append(text, text.waiting[:_TOKENS_PER_PIECE])
        if num_appended == 0:
            self._make_room(pool)
            return
        text.waiting = text.waiting[num_appended:]
        self._unindexed[pool] = None
        if len(text.waiting) == 0:
            self._waiting.end(text)

    def _make_room(self, pool: Pool) -> None:
        """Evicts a piece of the oldest text: of the pool if that is at its bound, else of all."""
        is_of_pool = self._memory.is_at_bound(pool)
        candidates = pool.texts if is_of_pool else self._texts
        oldest = next((text for text in candidates if text.num_tokens > 0), None)
        if oldest is not None:
            reason = TextEviction.POOL_FULL if is_of_pool else TextEviction.POOLS_FULL
            self._evict_piece(oldest, reason)
        else:
            # Nothing is left to go: the text would wait for ever.
            text = self._waiting.texts[0]
            self._waiting.end(text)
            self._forget(text, TextEviction.POOLS_FULL)

    def _evict_piece(self, text: Text, reason: TextEviction) -> None:
        """Evicts the next tokens of the oldest text of its pool, and forgets it with the last."""
        if text.num_tokens > 0:
            num_sizes = text.pool.ngram_mask.bit_count()
            self._memory.evict(text, max(1, _NGRAMS_PER_PIECE // num_sizes))
            text.pool.version += 1
        if text.num_tokens == 0 and text.waiting is not None and reason is TextEviction.EXPIRED:
            self._waiting.end(text)
        if text.num_tokens == 0 and text.waiting is None:
            self._forget(text, reason)

    def _forget(self, text: Text, reason: TextEviction) -> None:
        """Removes the record of a text that has no tokens any more."""
        pool = text.pool
        pool.remove(text)
        self._num_texts -= 1
        if text in self._texts:
            del self._texts[text]
            self._memory.remove(text)
        self._on_eviction(reason)
        if not pool.texts:
            self._memory.free(pool)
            self.generation += 1
            self._unindexed.pop(pool, None)
            del self._pools[pool.pool_id]

    def _has_expired(self) -> bool:
        oldest = next(iter(self._texts), None)
        return oldest is not None and self._clock() - oldest.fed_at_s >= self.limits.pool_ttl_s
