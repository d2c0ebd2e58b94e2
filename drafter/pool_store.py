"""All pools: which texts are kept, in which pool, for how long, within which bounds.

Owns feeding, the order of texts and every reason to forget one: the pool is full, all pools
together are, the text is too old. Does not know why a text is fed, nor who runs the work.

A text is fed at once, but taken in by `work`, piece by piece, so that nobody waits for it: appended
at the end of its pool, indexed, and drafted from up to where it is indexed. Where room is needed
the oldest text goes, from its beginning, piece by piece as well: that of the same pool where the
pool is at its bound, else the oldest of all.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from drafter.pool_arena import (
    BLOCK_BITS,
    BLOCK_BYTES,
    HEAD,
    MOST,
    NUM_TOKENS,
    POOL_BLOCKS,
    POOL_MOST,
    TAIL,
    USED,
    has_room,
    make_arena,
)
from drafter.pool_lookup import copy_from_pool
from drafter.pool_records import (
    POOL_RECORD_BYTES,
    TEXT_RECORD_BYTES,
    FeedOutcome,
    KeptText,
    Pool,
    PoolLimits,
    Text,
    TextEviction,
)
from drafter.pool_text import (
    NEW_POOL_BLOCKS,
    append_tokens,
    evict,
    free_pool,
    index,
    index_ngrams_of,
    make_pool,
    position_after,
)

MIN_TEXT_TOKENS = 2
"""A shorter text continues nothing."""

# What one call of `work` does at most: each about a hundred microseconds.
_NGRAMS_PER_PIECE = 256
_TOKENS_PER_PIECE = 960
# Fewer free blocks than this, and the arena counts as full.
_SPARE_BLOCKS = 8


class PoolStore:
    """Owned by the event loop: every method runs to its end without an await.

    Invariants (see `check_integrity`): `occupied_bytes` is never above `max_pools_bytes`, nor what
    a pool occupies above `max_pool_bytes`; texts are ordered by when they were fed, in each pool
    and over all; a pool without any text is not there.

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
        self._make_arena = partial(make_arena, limits.max_pools_bytes, seed=seed, key_bits=key_bits)
        self._clock = clock
        self._on_feed = on_feed
        self._on_eviction = on_eviction
        self.generation = 0
        self.forget_all()

    def forget_all(self) -> None:
        """Empties the store, whatever state it is in."""
        self.arena = self._make_arena()
        self.generation += 1
        self._pools: dict[str, Pool] = {}
        # Texts of which something is in a pool, in the order they were fed; the last may be partly
        # waiting. Then those of which nothing is.
        self._texts: OrderedDict[Text, None] = OrderedDict()
        self._waiting: deque[Text] = deque()
        self._waiting_bytes = 0
        self._unindexed: deque[Pool] = deque()
        self._record_bytes = 0
        self._count_records(None, 0)

    @property
    def num_pools(self) -> int:
        return len(self._pools)

    @property
    def num_texts(self) -> int:
        return len(self._texts) + len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens that are in pools, not those that wait."""
        return sum(self._header(pool, NUM_TOKENS) for pool in self._pools.values() if pool.block)

    @property
    def occupied_bytes(self) -> int:
        """What all pools occupy, their indexes, records and waiting texts included."""
        # The arena's own block is there without any pool.
        num_blocks = int(self.arena[USED]) - 1
        return num_blocks * BLOCK_BYTES + self._record_bytes + self._waiting_bytes

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
        feed_key = hashlib.blake2b(feed_id.encode(), digest_size=16).digest() if feed_id else b""
        outcome = self._feed(pool_id, token_ids, feed_key, ngram_mask, self._clock())
        self._on_feed(outcome)
        return outcome

    def restore(self, text: KeptText) -> FeedOutcome:
        """Keeps a text of a snapshot; the oldest first, and before any is fed."""
        if text.age_s >= self.limits.pool_ttl_s:
            return FeedOutcome.DROPPED
        return self._feed(
            text.pool_id,
            text.token_ids,
            text.feed_key,
            text.ngram_mask,
            self._clock() - text.age_s,
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
        return bool(self._unindexed or self._waiting or self._has_expired())

    def work(self) -> bool:
        """Does one small piece of what is to do; returns `has_work`."""
        if self._has_expired():
            self._evict_piece(next(iter(self._texts)), TextEviction.EXPIRED)
        elif self._unindexed:
            pool = self._unindexed[0]
            num_indexed = index(self.arena, pool.block, _NGRAMS_PER_PIECE)
            if num_indexed < 0:
                self._make_room(pool)
            elif num_indexed < _NGRAMS_PER_PIECE:
                self._unindexed.popleft()
        elif self._waiting:
            self._take_in_piece(self._waiting[0])
        return self.has_work

    def finish(self) -> None:
        """Does all work; for tests and benchmarks."""
        while self.has_work:
            self.work()

    def pool_ids(self) -> list[str]:
        """The pools that are there now."""
        return list(self._pools)

    def texts_of(self, pool_id: str) -> Iterator[KeptText]:
        """Copies the texts of a pool one by one, the oldest first; the store may change between.

        A text that is evicted meanwhile is left out, of one that is evicted in part the rest comes.
        """
        pool = self._pools.get(pool_id)
        if pool is None:
            return
        now_s = self._clock()
        for text in list(pool.texts):
            token_ids = self._copy(text)
            if len(token_ids) >= MIN_TEXT_TOKENS:
                yield KeptText(
                    pool_id=pool_id,
                    token_ids=token_ids,
                    feed_key=text.feed_key,
                    age_s=max(0.0, now_s - text.fed_at_s),
                    ngram_mask=pool.ngram_mask,
                )

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert self.occupied_bytes <= self.limits.max_pools_bytes
        blocks = 1
        for pool in self._pools.values():
            assert pool.texts, "a pool without text is not there"
            assert pool.feed_keys == {text.feed_key for text in pool.texts if text.feed_key}
            fed_at = [text.fed_at_s for text in pool.texts]
            assert fed_at == sorted(fed_at)
            if pool.block:
                blocks += self._header(pool, POOL_BLOCKS)
                assert self._pool_bytes(pool) <= self.limits.max_pool_bytes
                assert self._header(pool, NUM_TOKENS) == sum(t.num_tokens for t in pool.texts)
        assert int(self.arena[USED]) == blocks, "every block has one owner"
        assert all(text.waiting is not None for text in self._waiting)
        assert self._waiting_bytes == sum(text.waiting_bytes for text in self._waiting)
        made = [pool for pool in self._pools.values() if pool.block]
        records = TEXT_RECORD_BYTES * len(self._texts) + POOL_RECORD_BYTES * len(made)
        assert self._record_bytes == records
        fed_at = [text.fed_at_s for text in (*self._texts, *self._waiting)]
        assert fed_at == sorted(fed_at)

    def _feed(
        self,
        pool_id: str,
        token_ids: npt.NDArray[np.uint32],
        feed_key: bytes,
        ngram_mask: int,
        fed_at_s: float,
    ) -> FeedOutcome:
        if len(token_ids) < MIN_TEXT_TOKENS:
            return FeedOutcome.TOO_SHORT
        pool = self._pools.get(pool_id)
        if pool is not None and feed_key in pool.feed_keys:
            return FeedOutcome.DUPLICATE
        # What waits is counted with its record and a pool's: neither is bounded otherwise.
        waiting_bytes = token_ids.nbytes + TEXT_RECORD_BYTES + POOL_RECORD_BYTES
        if self._waiting_bytes + waiting_bytes > self.limits.max_waiting_bytes:
            return FeedOutcome.DROPPED
        if pool is None:
            pool = self._pools[pool_id] = Pool(pool_id)
        text = Text(pool, token_ids.copy(), feed_key, fed_at_s)
        text.waiting_bytes = waiting_bytes
        pool.texts.append(text)
        if feed_key:
            pool.feed_keys.add(feed_key)
        self._waiting.append(text)
        self._waiting_bytes += waiting_bytes
        self._cover(pool, ngram_mask)
        return FeedOutcome.KEPT

    def _cover(self, pool: Pool, ngram_mask: int) -> None:
        pool.ngram_mask |= ngram_mask
        if pool.block:
            index_ngrams_of(self.arena, pool.block, pool.ngram_mask)
            self._index_later(pool)

    def _index_later(self, pool: Pool) -> None:
        if pool not in self._unindexed:
            self._unindexed.append(pool)

    def _take_in_piece(self, text: Text) -> None:
        """Appends the next tokens of a text that waits, if there is room."""
        pool = text.pool
        if text not in self._texts and not self._make_record(text):
            return
        assert text.waiting is not None
        piece = text.waiting[:_TOKENS_PER_PIECE]
        tail, was_empty = self._header(pool, TAIL), self._header(pool, NUM_TOKENS) == 0
        num_appended = append_tokens(self.arena, pool.block, piece, text.num_tokens == 0)
        if num_appended == 0:
            self._make_room(pool)
            return
        if text.num_tokens == 0:
            text.start = (
                self._header(pool, HEAD) if was_empty else position_after(self.arena, tail - 1)
            )
        text.num_tokens += num_appended
        text.waiting = text.waiting[num_appended:]
        self._index_later(pool)
        if len(text.waiting) == 0:
            self._end_waiting(text)

    def _make_record(self, text: Text) -> bool:
        """Counts a text, and its pool if it is the first, among what is kept, if there is room."""
        pool = text.pool
        needed = TEXT_RECORD_BYTES + (0 if pool.block else POOL_RECORD_BYTES)
        needed_blocks = 1 - (-needed // BLOCK_BYTES) + (0 if pool.block else NEW_POOL_BLOCKS)
        if not has_room(self.arena, pool.block, needed_blocks):
            self._make_room(pool)
            return False
        if pool.block == 0:
            pool.block = make_pool(self.arena, self.limits.max_pool_bytes // BLOCK_BYTES)
            self.generation += 1
            index_ngrams_of(self.arena, pool.block, pool.ngram_mask)
        self._texts[text] = None
        pool.num_kept += 1
        self._count_records(pool, needed)
        return True

    def _make_room(self, pool: Pool) -> None:
        """Evicts a piece of the oldest text: of the pool if that is at its bound, else of all."""
        is_pool_full = pool.block != 0 and (
            not has_room(self.arena, pool.block, 2)
            and self._header(pool, POOL_BLOCKS) + 2 > self._header(pool, POOL_MOST)
        )
        is_arena_full = int(self.arena[USED]) + _SPARE_BLOCKS > int(self.arena[MOST])
        # Neither: one table has come to its end, and its own texts are what fills it.
        is_of_pool = is_pool_full or (pool.block != 0 and not is_arena_full)
        candidates = pool.texts if is_of_pool else self._texts
        oldest = next((text for text in candidates if text.num_tokens > 0), None)
        if oldest is not None:
            reason = TextEviction.POOL_FULL if is_of_pool else TextEviction.POOLS_FULL
            self._evict_piece(oldest, reason)
        else:
            # Nothing is left to go: the text would wait for ever.
            text = self._waiting[0]
            self._end_waiting(text)
            self._forget(text, TextEviction.POOLS_FULL)

    def _evict_piece(self, text: Text, reason: TextEviction) -> None:
        """Evicts the next tokens of the oldest text of its pool, and forgets it with the last."""
        if text.num_tokens > 0:
            num_sizes = text.pool.ngram_mask.bit_count()
            most = max(1, _NGRAMS_PER_PIECE // num_sizes)
            text.num_tokens -= evict(self.arena, text.pool.block, text.num_tokens, most)
        if text.num_tokens == 0 and text.waiting is not None and reason is TextEviction.EXPIRED:
            self._end_waiting(text)
        if text.num_tokens == 0 and text.waiting is None:
            self._forget(text, reason)

    def _end_waiting(self, text: Text) -> None:
        assert self._waiting[0] is text
        self._waiting.popleft()
        self._waiting_bytes -= text.waiting_bytes
        text.waiting = None

    def _forget(self, text: Text, reason: TextEviction) -> None:
        """Removes the record of a text that has no tokens any more."""
        pool = text.pool
        pool.texts.remove(text)
        pool.feed_keys.discard(text.feed_key)
        if text in self._texts:
            del self._texts[text]
            pool.num_kept -= 1
            self._count_records(pool, -TEXT_RECORD_BYTES)
        self._on_eviction(reason)
        if not pool.texts:
            if pool.block:
                free_pool(self.arena, pool.block)
                pool.block = 0
                self.generation += 1
                self._count_records(pool, -POOL_RECORD_BYTES)
            if pool in self._unindexed:
                self._unindexed.remove(pool)
            del self._pools[pool.pool_id]

    def _count_records(self, pool: Pool | None, num_bytes: int) -> None:
        """Leaves to blocks what records do not take, in the arena and in the pool."""
        limits = self.limits
        self._record_bytes += num_bytes
        for_blocks = limits.max_pools_bytes - limits.max_waiting_bytes - self._record_bytes
        self.arena[MOST] = for_blocks // BLOCK_BYTES
        if pool is not None and pool.block:
            of_pool = POOL_RECORD_BYTES + pool.num_kept * TEXT_RECORD_BYTES
            header = pool.block << BLOCK_BITS
            self.arena[header + POOL_MOST] = (limits.max_pool_bytes - of_pool) // BLOCK_BYTES

    def _copy(self, text: Text) -> npt.NDArray[np.uint32]:
        """The tokens of a text, those that wait included."""
        pool = text.pool
        parts = []
        if text.num_tokens > 0:
            start = self._header(pool, HEAD) if pool.texts[0] is text else text.start
            out = np.empty(text.num_tokens, dtype=np.uint32)
            num_copied = copy_from_pool(self.arena, pool.block, start, out, len(out))
            assert num_copied == len(out), "a text lies between its bounds"
            parts.append(out)
        if text.waiting is not None:
            parts.append(text.waiting)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def _has_expired(self) -> bool:
        oldest = next(iter(self._texts), None)
        return oldest is not None and self._clock() - oldest.fed_at_s >= self.limits.pool_ttl_s

    def _pool_bytes(self, pool: Pool) -> int:
        records = POOL_RECORD_BYTES + pool.num_kept * TEXT_RECORD_BYTES
        return self._header(pool, POOL_BLOCKS) * BLOCK_BYTES + records

    def _header(self, pool: Pool, word: int) -> int:
        return int(self.arena[(pool.block << BLOCK_BITS) + word])
