"""All pools: which texts are stored, in which pool, for how long, within which bounds.

Owns feeding, the order of texts and every reason to forget one: its pool is full, all pools
together are, or it is too old. Does not know why a text is fed, who runs the work, nor how memory
is laid out and counted (`drafter.pool_index`).

A fed text waits until `work` appends it to its pool and indexes it, piece by piece, so that nobody
waits for it; drafts come from the part that is indexed. Pools with work take turns, so a pool that
is fed much, or indexed anew, does not hold up the others. To make room the oldest text is evicted,
piece by piece from its beginning: that of the same pool if the pool is at its bound, else the
oldest of all.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from drafter.budgets import POOL_NGRAMS_PER_PIECE, POOL_TOKENS_PER_PIECE
from drafter.pool_index.memory import PoolMemory
from drafter.pool_index.records import (
    POOL_RECORD_BYTES,
    TEXT_RECORD_BYTES,
    FeedOutcome,
    Pool,
    PoolLimits,
    PoolText,
    Text,
    TextEviction,
    feed_key_of,
)

MIN_TEXT_TOKENS = 2
"""A shorter text has nothing to draft."""


class PoolStore:
    """Owned by the event loop; no method awaits.

    Invariants (see `check_integrity`): `occupied_bytes` is never above `max_pools_bytes`; a
    pool's texts are in the order of feeding, and those of all in the order in which they came into
    their pools; a pool has a text. `on_feed` is called for
    every text that is fed, `on_eviction` for every text that is forgotten.

    Attributes:
        limits: the bounds.
        arena: the memory of all pools, for kernels.
        generation: >= 1; changes whenever a result of `block_of` may.
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
        """Makes an empty store; `seed` and `key_bits` as in `make_arena`."""
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
        # Texts that are in a pool, maybe only a part, in the order in which they came there.
        self._texts: OrderedDict[Text, None] = OrderedDict()
        # Of all texts that wait to be appended.
        self._waiting_bytes = 0
        # Pools that have work, the next one first: they take turns, so that none holds up another.
        self._turns: OrderedDict[Pool, None] = OrderedDict()

    @property
    def num_pools(self) -> int:
        return len(self._pools)

    @property
    def num_texts(self) -> int:
        """Of all pools; any thread may read it."""
        return self._num_texts

    @property
    def num_tokens(self) -> int:
        """Tokens in pools, without those that wait."""
        return sum(self._memory.num_tokens(pool) for pool in self._pools.values())

    @property
    def occupied_bytes(self) -> int:
        """Memory of all pools, their indexes, records and waiting texts included."""
        return self._memory.occupied_bytes + self._waiting_bytes

    def feed(
        self, pool_id: str, token_ids: npt.NDArray[np.uint32], *, ngram_mask: int, feed_id: str = ""
    ) -> FeedOutcome:
        """Feeds a text to a pool; `work` will append it.

        Args:
            pool_id: of the pool, which is made if there is none.
            token_ids: [n] uint32; copied.
            ngram_mask: bit n - 1 for each n-gram size that the pool's index must cover.
            feed_id: a text whose id is in the pool is not fed again. Empty: always a new text.
        """
        outcome = self._add(
            PoolText(
                pool_id=pool_id,
                token_ids=token_ids,
                ngram_mask=ngram_mask,
                feed_key=feed_key_of(feed_id),
            )
        )
        self._on_feed(outcome)
        return outcome

    def restore(self, text: PoolText) -> FeedOutcome:
        """Adds a text of a snapshot; the oldest first, and before any is fed."""
        return FeedOutcome.DROPPED if text.age_s >= self.limits.pool_ttl_s else self._add(text)

    def block_of(self, pool_id: str, ngram_mask: int) -> int:
        """Returns the block of a pool, for kernels; 0: the pool holds nothing.

        `work` will index the n-gram sizes that the pool's index does not cover yet.
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
        return bool(self._turns or self._has_expired())

    def work(self) -> bool:
        """Does one small piece of the work; returns `has_work`."""
        if self._has_expired():
            self._evict_piece(next(iter(self._texts)), TextEviction.EXPIRED)
        elif self._turns:
            pool = next(iter(self._turns))
            self._turns.move_to_end(pool)
            # Text that is not indexed yet would evict text that is.
            if pool.is_unindexed:
                self._index_piece(pool)
            else:
                self._append_piece(pool.texts[-pool.num_waiting])
            if not pool.has_work:
                self._turns.pop(pool, None)
        return self.has_work

    def finish(self) -> None:
        """Does all work, however long that takes: before anything is served, and in tests."""
        while self.has_work:
            self.work()

    def pool_ids(self) -> list[str]:
        """The pools that are there now."""
        return list(self._pools)

    def version_of(self, pool_id: str) -> int:
        """Returns a number that differs after every change of a pool, even if it is made anew."""
        pool = self._pools.get(pool_id)
        return -1 if pool is None else pool.version

    def texts_of(self, pool_id: str) -> Iterator[PoolText]:
        """Copies the texts of a pool one by one, the oldest first; the store may change meanwhile.

        Tokens that are evicted meanwhile are left out.
        """
        pool = self._pools.get(pool_id)
        if pool is None:
            return
        now_s = self._clock()
        fed_at_s = -math.inf
        for text in list(pool.texts):
            if self._pools.get(pool_id) is not pool:
                return  # the pool is gone; its blocks may hold other texts now
            # A text that waits may come to be as young as the one before it, see `_append_piece`.
            fed_at_s = max(fed_at_s, text.fed_at_s)
            token_ids = self._memory.copy(text)
            if text.waiting is not None:
                token_ids = np.concatenate((token_ids, text.waiting))
            if len(token_ids) >= MIN_TEXT_TOKENS:
                yield PoolText(
                    pool_id=pool_id,
                    token_ids=token_ids,
                    age_s=max(0.0, now_s - fed_at_s),
                    ngram_mask=pool.ngram_mask,
                    feed_key=text.feed_key,
                )

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert self.occupied_bytes <= self.limits.max_pools_bytes
        assert self.num_texts == sum(len(pool.texts) for pool in self._pools.values())
        self._memory.check_integrity(self._pools.values())
        assert self._waiting_bytes == sum(pool.waiting_bytes for pool in self._pools.values())
        assert self._waiting_bytes <= self.limits.max_waiting_bytes
        assert set(self._turns) == {pool for pool in self._pools.values() if pool.has_work}
        for pool in self._pools.values():
            assert pool.texts, "a pool without text is not there"
            assert pool.feed_keys == {text.feed_key for text in pool.texts if text.feed_key}
            assert pool.num_kept == sum(text in self._texts for text in pool.texts)
            waiting = [text for text in pool.texts if text.waiting is not None]
            assert waiting == list(pool.texts)[len(pool.texts) - pool.num_waiting :]
            assert pool.waiting_bytes == sum(text.waiting_bytes for text in waiting)
            assert all(text.waiting is None or len(text.waiting) > 0 for text in waiting)
        fed_at = [text.fed_at_s for text in self._texts]
        assert fed_at == sorted(fed_at)

    def _add(self, fed: PoolText) -> FeedOutcome:
        if len(fed.token_ids) < MIN_TEXT_TOKENS:
            return FeedOutcome.TOO_SHORT
        pool = self._pools.get(fed.pool_id)
        if pool is not None and fed.feed_key in pool.feed_keys:
            return FeedOutcome.DUPLICATE
        # A waiting text counts with its record and a pool's: nothing else limits their number.
        waiting_bytes = fed.token_ids.nbytes + TEXT_RECORD_BYTES + POOL_RECORD_BYTES
        free_bytes = self.limits.max_waiting_bytes - self._waiting_bytes - waiting_bytes
        # What a pool has waiting may take as much as it leaves free: others are fed, too.
        if free_bytes < (0 if pool is None else pool.waiting_bytes):
            return FeedOutcome.DROPPED
        waiting = fed.token_ids.copy()  # first of all: there may be no memory left
        if pool is None:
            pool = self._pools[fed.pool_id] = Pool(fed.pool_id, self._num_pools_made << 32)
            self._num_pools_made += 1
        text = Text(
            pool=pool,
            fed_at_s=self._clock() - fed.age_s,
            waiting=waiting,
            waiting_bytes=waiting_bytes,
            feed_key=fed.feed_key,
        )
        pool.add(text)
        self._num_texts += 1
        self._waiting_bytes += waiting_bytes
        pool.num_waiting += 1
        pool.waiting_bytes += waiting_bytes
        self._turns[pool] = None
        self._cover(pool, fed.ngram_mask)
        return FeedOutcome.KEPT

    def _end_wait(self, text: Text) -> None:
        """Nothing waits any more of the first of a pool's waiting texts."""
        pool = text.pool
        assert text is pool.texts[-pool.num_waiting]
        pool.num_waiting -= 1
        pool.waiting_bytes -= text.waiting_bytes
        self._waiting_bytes -= text.waiting_bytes
        text.waiting = None

    def _cover(self, pool: Pool, ngram_mask: int) -> None:
        if ngram_mask & ~pool.ngram_mask:
            pool.ngram_mask |= ngram_mask
            pool.version += 1
        if pool.block:
            self._memory.cover(pool)
            self._index_later(pool)

    def _index_later(self, pool: Pool) -> None:
        pool.is_unindexed = True
        self._turns[pool] = None

    def _index_piece(self, pool: Pool) -> None:
        """Indexes the next n-grams of a pool, or makes room for them."""
        num_indexed = self._memory.index(pool, POOL_NGRAMS_PER_PIECE)
        if num_indexed < 0:
            self._make_room(pool)
        elif num_indexed < POOL_NGRAMS_PER_PIECE:
            pool.is_unindexed = False

    def _append_piece(self, text: Text) -> None:
        """Appends the next tokens of a waiting text, or makes room for them."""
        pool = text.pool
        if text not in self._texts:
            self.generation += pool.block == 0
            if not self._memory.add(text):
                self._make_room(pool)
                return
            # Texts are forgotten in this order: while it waited, younger ones of other pools may
            # have come before it.
            if self._texts:
                text.fed_at_s = max(text.fed_at_s, next(reversed(self._texts)).fed_at_s)
            self._texts[text] = None
        assert text.waiting is not None
        num_appended = self._memory.append(text, text.waiting[:POOL_TOKENS_PER_PIECE])
        if num_appended == 0:
            self._make_room(pool)
            return
        text.waiting = text.waiting[num_appended:]
        self._index_later(pool)
        if len(text.waiting) == 0:
            self._end_wait(text)

    def _make_room(self, pool: Pool) -> None:
        """Evicts a piece of the oldest text: of the pool if that is at its bound, else of all."""
        is_of_pool = self._memory.is_at_bound(pool)
        candidates = pool.texts if is_of_pool else self._texts
        oldest = next((text for text in candidates if text.num_tokens > 0), None)
        if oldest is not None:
            reason = TextEviction.POOL_FULL if is_of_pool else TextEviction.POOLS_FULL
            self._evict_piece(oldest, reason)
        else:
            # There is nothing to evict: the text would wait for ever.
            text = pool.texts[-pool.num_waiting]
            self._end_wait(text)
            self._forget(text, TextEviction.POOLS_FULL)

    def _evict_piece(self, text: Text, reason: TextEviction) -> None:
        """Evicts the next tokens of the oldest text of its pool, and forgets it with the last."""
        if text.num_tokens > 0:
            num_sizes = text.pool.ngram_mask.bit_count()
            self._memory.evict(text, max(1, POOL_NGRAMS_PER_PIECE // num_sizes))
            text.pool.version += 1
        if text.num_tokens == 0 and text.waiting is not None and reason is TextEviction.EXPIRED:
            self._end_wait(text)
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
            self._turns.pop(pool, None)
            del self._pools[pool.pool_id]

    def _has_expired(self) -> bool:
        oldest = next(iter(self._texts), None)
        return oldest is not None and self._clock() - oldest.fed_at_s >= self.limits.pool_ttl_s
