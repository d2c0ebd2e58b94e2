"""The KV blocks: which are free, which are held, and which cached ones can be evicted.

Knows no tensor: the model owns the contents. Blocks that were used before are allocated first, so
no more of the cache's memory is ever written to than is needed at the same time.

A block is in one of three states:
    held   in at least one block table; in several only if it is cached (`prefix_cache.py`)
    idle   cached, in no table; evicted, least recently used first, when no block is free
    free   neither
"""

import collections
from collections.abc import MutableSequence
from collections.abc import Sequence as SequenceOf

from verifier.scheduling.prefix_cache import PrefixCache


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
        self.cache = PrefixCache()
        self._num_holders = [0] * num_blocks
        # The next one to be allocated is the last.
        self._free = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_free + self.cache.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.num_blocks - self.num_available

    def extend(self, block_table: MutableSequence[int], num_blocks: int) -> None:
        """Appends blocks to `block_table` until it holds `num_blocks`, evicting idle ones if need
        be.

        Raises:
            OutOfBlocksError: fewer are available.
        """
        num_missing = num_blocks - len(block_table)
        if num_missing <= 0:
            return
        if num_missing > self.num_available:
            raise OutOfBlocksError(num_missing, self.num_available)
        while num_missing > self.num_free:
            self._free.append(self.cache.evict())
        for _ in range(num_missing):
            block = self._free.pop()
            self._num_holders[block] = 1
            block_table.append(block)

    def share(self, block_table: MutableSequence[int], blocks: list[int]) -> None:
        """Appends cached blocks to a table, which holds them from now on."""
        for block in blocks:
            if self._num_holders[block] == 0:
                self.cache.revive(block)
            self._num_holders[block] += 1
        block_table.extend(blocks)

    def release(self, block_table: MutableSequence[int]) -> None:
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
                self._free.append(block)
        del block_table[:]

    def check_integrity(self, block_tables: SequenceOf[SequenceOf[int]]) -> None:
        """Asserts the invariants; `block_tables` are all existing tables."""
        held = collections.Counter(block for table in block_tables for block in table)
        for block, num_holders in held.items():
            assert num_holders == 1 or block in self.cache, f"block {block} is in two tables"
        assert all(len(table) == len(set(table)) for table in block_tables), "twice in one table"
        assert len(held) == self.num_used, "a used block is in no table"
        for block, num_holders in enumerate(self._num_holders):
            assert held[block] == num_holders, f"block {block} miscounts its holders"
        self.cache.check_integrity(set(held))
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not any(block in held or block in self.cache for block in free)
