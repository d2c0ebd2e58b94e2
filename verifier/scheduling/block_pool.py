"""The KV blocks: which are free, which are held, and which cached ones can be evicted.

A sequence's blocks are allocated one after another where possible: attention can read a contiguous
run of blocks in place, without gathering. Knows no tensor; `kv_cache.py` owns the contents.

A block is in one of three states:
    held   in at least one block table; in several only if it is cached (`prefix_cache.py`)
    idle   cached, in no table; evicted, least recently used first, when no block is free
    free   neither
"""

import collections

import numpy as np

from verifier.scheduling.prefix_cache import PrefixCache

# Idle blocks are evicted to make room for a contiguous run only while at most this part of all
# blocks is free: a contiguous run is worth a small part of the cache only.
_MAX_FREE_FOR_RUNS = 1 / 8


class OutOfBlocksError(Exception):
    """Fewer blocks are available than requested. Nothing was allocated."""

    def __init__(self, missing_blocks: int, available_blocks: int) -> None:
        super().__init__(f"{missing_blocks} blocks missing, {available_blocks} available")
        self.missing_blocks = missing_blocks
        self.available_blocks = available_blocks


class BlockPool:
    """Owned by the engine thread; sole owner of the prefix cache.

    Invariants: every block is free, idle or held; a held block counts the tables that hold it, and
    several tables hold it only if it is cached. `check_integrity` verifies them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.cache = PrefixCache()
        self._num_holders = [0] * num_blocks
        # With a block that is not free at either end.
        self._is_free_padded = np.zeros(num_blocks + 2, dtype=np.bool_)
        self._is_free = self._is_free_padded[1:-1]
        self._is_free[:] = True

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_free + self.cache.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.num_blocks - self.num_available

    def extend(self, block_table: list[int], num_blocks: int, *, run_blocks: int = 0) -> None:
        """Appends blocks to `block_table` until it holds `num_blocks`, evicting idle ones if need
        be.

        Args:
            run_blocks: how many blocks, these included, the table is expected to grow by; a new
                run starts where there is room for as many, if possible.

        Raises:
            OutOfBlocksError: fewer are available.
        """
        num_missing = num_blocks - len(block_table)
        if num_missing <= 0:
            return
        if num_missing > self.num_available:
            raise OutOfBlocksError(num_missing, self.num_available)
        while num_missing > self.num_free:
            self._evict()
        for i in range(num_missing):
            block = block_table[-1] + 1 if block_table else self.num_blocks
            if block >= self.num_blocks or not self._is_free[block]:
                block = self._start_of_run(max(num_missing, run_blocks) - i)
            self._is_free[block] = False
            self.num_free -= 1
            self._num_holders[block] = 1
            block_table.append(block)

    def share(self, block_table: list[int], blocks: list[int]) -> None:
        """Appends cached blocks to a table, which holds them from now on."""
        for block in blocks:
            if self._num_holders[block] == 0:
                self.cache.revive(block)
            self._num_holders[block] += 1
        block_table += blocks

    def release(self, block_table: list[int]) -> None:
        """Releases all blocks of a table and empties it. Cached ones that no other table holds
        become idle, the last first, so that a prefix is evicted from its end.
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
        """Asserts the invariants; `block_tables` are all existing tables."""
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
        """The first block of a new run: the middle of the longest free run, so that the sequence
        before it can grow, or earlier where the run would have no room for `run_blocks`.

        In a pool full of idle blocks, free ones are few and scattered. Blocks of one sequence are
        evicted together, so evicting `run_blocks` of them tends to free a contiguous run.
        """
        start, end = self._longest_free_run()
        num_free = self.num_free + run_blocks
        if end - start < run_blocks and num_free <= self.num_blocks * _MAX_FREE_FOR_RUNS:
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
