"""The KV blocks: which are free, who holds which, and which could be had by forgetting.

Blocks are handed out so that a sequence's blocks lie one after another where possible: a
contiguous run of blocks can be attended over in place, without gathering it first. Knows no
tensor; the blocks' contents are `kv_cache.py`'s.

A block is in one of three states:
    held   in at least one block table; in several only if it is cached (`prefix_cache.py`)
    idle   cached, in no table: handed out again, least recently used first, when no block is free
    free   neither
"""

import collections

import numpy as np

from verifier.scheduling.prefix_cache import PrefixCache

# Room for a newcomer's run is made by evicting as long as no more than this part of all blocks is
# free then: attention in place is worth a little of the cache, not much of it.
_MOST_FREE_FOR_RUNS = 1 / 8


class OutOfBlocksError(Exception):
    """Fewer blocks are to be had than were asked for. Nothing was allocated."""

    def __init__(self, wanted_blocks: int, available_blocks: int) -> None:
        super().__init__(f"{wanted_blocks} blocks wanted, {available_blocks} available")
        self.wanted_blocks = wanted_blocks
        self.available_blocks = available_blocks


class BlockPool:
    """Owned by the engine thread; sole owner of the prefix cache.

    Invariants: every block is free, idle or held; a held block counts the tables that it is in,
    and is in several only if it is cached. `check_integrity` verifies them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.cache = PrefixCache()
        self._num_holders = [0] * num_blocks
        # With a block that isn't free at either end.
        self._is_free_padded = np.zeros(num_blocks + 2, dtype=np.bool_)
        self._is_free = self._is_free_padded[1:-1]
        self._is_free[:] = True

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return self.num_free + self.cache.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.num_blocks - self.num_available

    def extend(self, block_table: list[int], num_blocks: int, *, run_blocks: int = 0) -> None:
        """Appends blocks to `block_table` until it holds `num_blocks`, evicting idle ones if need
        be.

        Args:
            run_blocks: how many blocks, these included, the table is expected to grow by: if a
                new run has to begin, room for as many is looked for.

        Raises:
            OutOfBlocksError: fewer are available.
        """
        wanted = num_blocks - len(block_table)
        if wanted <= 0:
            return
        if wanted > self.num_available:
            raise OutOfBlocksError(wanted, self.num_available)
        while wanted > self.num_free:
            self._evict()
        for i in range(wanted):
            block = block_table[-1] + 1 if block_table else self.num_blocks
            if block >= self.num_blocks or not self._is_free[block]:
                block = self._start_of_run(max(wanted, run_blocks) - i)
            self._is_free[block] = False
            self.num_free -= 1
            self._num_holders[block] = 1
            block_table.append(block)

    def share(self, block_table: list[int], blocks: list[int]) -> None:
        """Appends cached blocks to a table; they are held by one more."""
        for block in blocks:
            if self._num_holders[block] == 0:
                self.cache.revive(block)
            self._num_holders[block] += 1
        block_table += blocks

    def release(self, block_table: list[int]) -> None:
        """Gives back all blocks of a table and empties it. Cached ones that nobody else holds
        become idle, the last first: without its beginning, a prefix is of no use.
        """
        for block in reversed(block_table):
            assert self._num_holders[block] > 0, f"block {block} freed twice"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self.cache:
                self.cache.retire(block)
            else:
                self._free(block)
        block_table.clear()

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Asserts the invariants; `block_tables` are all there are."""
        held = collections.Counter(block for table in block_tables for block in table)
        for block, num_holders in held.items():
            assert num_holders == 1 or block in self.cache, f"block {block} is in two tables"
            assert not self._is_free[block], "a held block is marked free"
        assert all(len(table) == len(set(table)) for table in block_tables), "twice in one table"
        assert len(held) == self.num_used, "a used block is in no table"
        for block, num_holders in enumerate(self._num_holders):
            assert held[block] == num_holders, f"block {block} miscounts its holders"
        self.cache.check_integrity(set(held))
        assert not any(block in self.cache for block in np.flatnonzero(self._is_free).tolist())
        assert int(self._is_free.sum()) == self.num_free, "the free count is wrong"

    def _free(self, block: int) -> None:
        self._is_free[block] = True
        self.num_free += 1

    def _evict(self) -> None:
        self._free(self.cache.evict())

    def _start_of_run(self, run_blocks: int) -> int:
        """Where a new run begins: in the longest free run, in its middle, to leave whoever holds
        the block before it room to grow; but with room for `run_blocks` if it has that.

        In a pool that is full of idle blocks, free ones are few and scattered. Blocks of one
        sequence grow old together, so evicting as many as the run wants tends to make one.
        """
        start, end = self._longest_free_run()
        num_free = self.num_free + run_blocks
        if end - start < run_blocks and num_free <= self.num_blocks * _MOST_FREE_FOR_RUNS:
            for _ in range(min(run_blocks, self.cache.num_idle)):
                self._evict()
            start, end = self._longest_free_run()
        return start if start == 0 else max(start, min((start + end) // 2, end - run_blocks))

    def _longest_free_run(self) -> tuple[int, int]:
        """[start, end) of the longest run of free blocks; there is a free block."""
        edges = np.flatnonzero(self._is_free_padded[1:] != self._is_free_padded[:-1])
        starts, ends = edges[::2], edges[1::2]
        longest = int(np.argmax(ends - starts))
        return int(starts[longest]), int(ends[longest])
