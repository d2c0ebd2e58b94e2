"""The KV blocks: which are free, and who holds which.

Blocks are handed out so that a sequence's blocks lie one after another where possible: a
contiguous run of blocks can be attended over in place, without gathering it first. Knows no
tensor; the blocks' contents are `kv_cache.py`'s.
"""

import numpy as np


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were asked for. Nothing was allocated."""

    def __init__(self, wanted_blocks: int, free_blocks: int) -> None:
        super().__init__(f"{wanted_blocks} blocks wanted, {free_blocks} free")
        self.wanted_blocks = wanted_blocks
        self.free_blocks = free_blocks


class BlockPool:
    """Owned by the engine thread.

    Invariants: every block is either free or in exactly one block table; `num_free` counts the
    free ones. `check_integrity` verifies them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._is_free = np.ones(num_blocks, dtype=np.bool_)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def extend(self, block_table: list[int], num_blocks: int) -> None:
        """Appends free blocks to `block_table` until it holds `num_blocks`.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        wanted = num_blocks - len(block_table)
        if wanted <= 0:
            return
        if wanted > self.num_free:
            raise OutOfBlocksError(wanted, self.num_free)
        for _ in range(wanted):
            block = block_table[-1] + 1 if block_table else self.num_blocks
            if block >= self.num_blocks or not self._is_free[block]:
                block = self._start_of_run()
            self._is_free[block] = False
            block_table.append(block)
        self.num_free -= wanted

    def release(self, block_table: list[int]) -> None:
        """Frees all blocks of a table and empties it."""
        for block in block_table:
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = True
        self.num_free += len(block_table)
        block_table.clear()

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Asserts that `block_tables`, all there are, hold exactly the used blocks, each once."""
        held = [block for block_table in block_tables for block in block_table]
        assert len(held) == len(set(held)), "a block is in two tables"
        assert not self._is_free[held].any(), "a held block is marked free"
        assert len(held) == self.num_used, "a used block is in no table"
        assert int(self._is_free.sum()) == self.num_free, "the free count is wrong"

    def _start_of_run(self) -> int:
        """Where a new run begins: in the middle of the longest free run, to leave whoever holds
        the block before it room to grow; at its start when nobody does.
        """
        edges = np.diff(self._is_free.astype(np.int8), prepend=0, append=0)
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        longest = int(np.argmax(ends - starts))
        start, end = int(starts[longest]), int(ends[longest])
        return start if start == 0 else (start + end) // 2
