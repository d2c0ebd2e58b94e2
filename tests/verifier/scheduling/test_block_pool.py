"""The block pool: holders of blocks, and which are allocated."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.volume import examples
from verifier.scheduling.block_pool import BlockPool, OutOfBlocksError


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables that grow, share cached blocks, are released and exhaust the pool."""

    tables = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 24))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[list[int]] = []
        self.num_digests = 0

    @rule(target=tables)
    def make_table(self) -> list[int]:
        table: list[int] = []
        self.held.append(table)
        return table

    @rule(table=tables, num_blocks=st.integers(0, 12))
    def extend(self, table: list[int], num_blocks: int) -> None:
        before = list(table)
        num_missing = max(0, num_blocks - len(table))
        num_available = self.pool.num_available
        if num_missing > num_available:
            with pytest.raises(OutOfBlocksError) as error:
                self.pool.extend(table, num_blocks)
            assert (error.value.missing_blocks, error.value.available_blocks) == (
                num_missing,
                num_available,
            )
            assert table == before
            assert self.pool.num_available == num_available
        else:
            self.pool.extend(table, num_blocks)
            assert table[: len(before)] == before
            assert len(table) == max(num_blocks, len(before))
            assert self.pool.num_available == num_available - num_missing
            assert not any(block in self.pool.cache for block in table[len(before) :])

    @rule(table=tables)
    def enter(self, table: list[int]) -> None:
        for block in table:
            if block not in self.pool.cache:
                self.num_digests += 1
                self.pool.cache.add(self.num_digests.to_bytes(32, "big"), block)

    @rule(target=tables, chosen=st.integers(0, 2**24 - 1))
    def share(self, chosen: int) -> list[int]:
        entries = list(self.pool.cache._digests.items())
        digests = [digest for i, (_, digest) in enumerate(entries) if chosen >> i & 1]
        blocks = self.pool.cache.find(digests)
        assert blocks == [block for i, (block, _) in enumerate(entries) if chosen >> i & 1]
        table: list[int] = []
        self.pool.share(table, blocks)
        assert table == blocks
        self.held.append(table)
        return table

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        num_available = self.pool.num_available
        others = {block for other in self.held if other is not table for block in other}
        num_freed = len(set(table) - others)
        self.pool.release(table)
        assert table == []
        assert self.pool.num_available == num_available + num_freed

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity(self.held)
            held = {block for table in self.held for block in table}
            assert all(0 <= block < self.pool.num_blocks for block in held)
            assert self.pool.num_used == len(held)


BlockPoolMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestIntegrity = BlockPoolMachine.TestCase


def test_blocks_that_were_used_are_allocated_before_others() -> None:
    pool, first, second = BlockPool(8), list[int](), list[int]()
    pool.extend(first, 3)
    used = set(first)
    pool.release(first)
    pool.extend(second, 3)
    assert set(second) == used
