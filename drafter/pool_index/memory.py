"""The bytes of all pools: blocks of tokens and indexes in the arena, and records of texts.

Owns the arena and the count of records, and holds their sum under the bounds: blocks may use what
records leave. Does not know which text is evicted when there is no room, nor why one is fed
(`drafter.pools`).
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from drafter.pool_index.arena import (
    BLOCK_BITS,
    BLOCK_BYTES,
    HEAD,
    MAX_BLOCKS,
    MAX_POOL_BLOCKS,
    POOL_BLOCKS,
    POOL_TOKENS,
    TAIL,
    USED,
    has_room,
    make_arena,
)
from drafter.pool_index.index import index, index_ngrams_of
from drafter.pool_index.propose import copy_from_pool
from drafter.pool_index.records import (
    POOL_RECORD_BYTES,
    TEXT_RECORD_BYTES,
    Pool,
    PoolLimits,
    Text,
)
from drafter.pool_index.text import NEW_POOL_BLOCKS, append_tokens, evict, free_pool, make_pool
from drafter.pool_index.tokens import position_after

# With fewer free blocks the arena counts as full.
_SPARE_BLOCKS = 8


class PoolMemory:
    """Owned by the event loop, through the store.

    Alone changes a pool's `block` and `num_kept`, and a text's `start` and `num_tokens`. Invariants
    (see `check_integrity`): `occupied_bytes` is never above `max_pools_bytes - max_waiting_bytes`,
    nor are a pool's bytes above `max_pool_bytes`; every block but the arena's first belongs to a
    pool.

    Attributes:
        arena: the memory of all pools, for kernels.
    """

    def __init__(self, limits: PoolLimits, *, seed: int, key_bits: int) -> None:
        """Makes it empty; `seed` and `key_bits` as in `make_arena`."""
        self._limits = limits
        self.arena = make_arena(limits.max_pools_bytes, seed=seed, key_bits=key_bits)
        self._record_bytes = 0
        self._count_records(None, 0)

    @property
    def occupied_bytes(self) -> int:
        """Memory of all pools, their indexes and records included."""
        # The arena's first block belongs to no pool.
        num_blocks = int(self.arena[USED]) - 1
        return num_blocks * BLOCK_BYTES + self._record_bytes

    def num_tokens(self, pool: Pool) -> int:
        """How many tokens are in the pool."""
        return self._header(pool, POOL_TOKENS) if pool.block else 0

    def add(self, text: Text) -> bool:
        """Adds a text, and its pool if it is the first; False: there is no room."""
        pool = text.pool
        needed = TEXT_RECORD_BYTES + (0 if pool.block else POOL_RECORD_BYTES)
        needed_blocks = 1 - (-needed // BLOCK_BYTES) + (0 if pool.block else NEW_POOL_BLOCKS)
        if not has_room(self.arena, pool.block, needed_blocks):
            return False
        if pool.block == 0:
            pool.block = make_pool(self.arena, self._limits.max_pool_bytes // BLOCK_BYTES)
            index_ngrams_of(self.arena, pool.block, pool.ngram_mask)
        pool.num_kept += 1
        self._count_records(pool, needed)
        return True

    def append(self, text: Text, token_ids: npt.NDArray[np.uint32]) -> int:
        """Appends tokens, [n] uint32, to the text added last to its pool; returns how many fit."""
        pool = text.pool
        tail, was_empty = self._header(pool, TAIL), self._header(pool, POOL_TOKENS) == 0
        begins = text.num_tokens == 0
        num_appended = append_tokens(self.arena, pool.block, token_ids, begins)
        if begins and num_appended > 0:
            text.start = (
                self._header(pool, HEAD) if was_empty else position_after(self.arena, tail - 1)
            )
        text.num_tokens += num_appended
        return num_appended

    def copy(self, text: Text) -> npt.NDArray[np.uint32]:
        """Returns the tokens of a text that are in its pool, [num_tokens] uint32."""
        out = np.empty(text.num_tokens, dtype=np.uint32)
        if text.num_tokens > 0:
            pool = text.pool
            start = self._header(pool, HEAD) if pool.texts[0] is text else text.start
            num_copied = copy_from_pool(self.arena, pool.block, start, out, len(out))
            assert num_copied == len(out), "a text lies between its bounds"
        return out

    def cover(self, pool: Pool) -> None:
        """Makes the pool's index cover its n-gram sizes; `index` does the work later."""
        index_ngrams_of(self.arena, pool.block, pool.ngram_mask)

    def index(self, pool: Pool, max_ngrams: int) -> int:
        """Indexes n-grams of a pool; returns as `index` does."""
        return index(self.arena, pool.block, max_ngrams)

    def is_at_bound(self, pool: Pool) -> bool:
        """Whether a pool without room must evict its own text, not that of other pools."""
        if pool.block == 0:
            return False
        if not has_room(self.arena, pool.block, 2) and self._header(
            pool, POOL_BLOCKS
        ) + 2 > self._header(pool, MAX_POOL_BLOCKS):
            return True
        # If the arena is not full either, the pool's table cannot grow.
        return int(self.arena[USED]) + _SPARE_BLOCKS <= int(self.arena[MAX_BLOCKS])

    def evict(self, text: Text, max_tokens: int) -> None:
        """Evicts up to so many tokens of the oldest text of its pool, from its beginning."""
        text.num_tokens -= evict(self.arena, text.pool.block, text.num_tokens, max_tokens)

    def remove(self, text: Text) -> None:
        """Removes the record of an added text that has no tokens any more."""
        text.pool.num_kept -= 1
        self._count_records(text.pool, -TEXT_RECORD_BYTES)

    def free(self, pool: Pool) -> None:
        """Frees the blocks of a pool without texts."""
        if pool.block:
            free_pool(self.arena, pool.block)
            pool.block = 0
            self._count_records(pool, -POOL_RECORD_BYTES)

    def check_integrity(self, pools: Iterable[Pool]) -> None:
        """Asserts the invariants, given all pools; for tests."""
        blocks, record_bytes = 1, 0
        for pool in pools:
            if pool.block:
                of_pool = POOL_RECORD_BYTES + pool.num_kept * TEXT_RECORD_BYTES
                num_blocks = self._header(pool, POOL_BLOCKS)
                assert num_blocks * BLOCK_BYTES + of_pool <= self._limits.max_pool_bytes
                assert self.num_tokens(pool) == sum(text.num_tokens for text in pool.texts)
                blocks += num_blocks
                record_bytes += of_pool
        assert int(self.arena[USED]) == blocks, "every block has one owner"
        assert self._record_bytes == record_bytes
        assert self.occupied_bytes <= self._limits.max_pools_bytes - self._limits.max_waiting_bytes

    def _count_records(self, pool: Pool | None, num_bytes: int) -> None:
        """Counts bytes of records, and bounds the blocks of the arena and the pool by the rest."""
        limits = self._limits
        self._record_bytes += num_bytes
        for_blocks = limits.max_pools_bytes - limits.max_waiting_bytes - self._record_bytes
        self.arena[MAX_BLOCKS] = for_blocks // BLOCK_BYTES
        if pool is not None and pool.block:
            of_pool = POOL_RECORD_BYTES + pool.num_kept * TEXT_RECORD_BYTES
            header = pool.block << BLOCK_BITS
            self.arena[header + MAX_POOL_BLOCKS] = (limits.max_pool_bytes - of_pool) // BLOCK_BYTES

    def _header(self, pool: Pool, word: int) -> int:
        return int(self.arena[(pool.block << BLOCK_BITS) + word])
