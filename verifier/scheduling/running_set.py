"""The running sequences, in order, and the blocks that they hold and need.

A sequence begins to run with what the prefix cache has of it, and enters its whole blocks there;
when it is preempted or ends, its blocks are free or stay cached. Knows no step.
"""

import bisect
from dataclasses import dataclass, field

from verifier.drafts.draft_buffer import HintOutcome
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.prefix_cache import extend_digests
from verifier.scheduling.sequence import Sequence
from verifier.scheduling.states import StateSlots
from verifier.scheduling.turns import Turns, place

# Ids of block tables begin anew after this many admissions: they travel as int32.
_MAX_TABLE_ID = (1 << 31) - 1

# Digests of a waiting prompt's blocks that are computed before the cache is asked for them, so that
# no stream stands still for all of a long prompt.
_DIGESTS_AT_ONCE = 64


@dataclass(slots=True, kw_only=True)
class SchedulerCounts:
    """Totals since the start."""

    # Tokens of sequences looked up in the prefix cache, and those found.
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    # Hints that were used, or passed or contradicted by their sequences.
    hints: dict[HintOutcome, int] = field(default_factory=lambda: dict.fromkeys(HintOutcome, 0))


class RunningSet:
    """Owned by the scheduler.

    Invariants: `sequences` is in order; a waiting sequence holds no block and has no computed
    tokens.
    """

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        block_size: int,
        has_prefix_cache: bool,
        num_state_slots: int = 0,
    ) -> None:
        """Args: num_state_slots: 0: the model has no recurrent states."""
        self.block_pool = block_pool
        self.block_size = block_size
        self.has_prefix_cache = has_prefix_cache
        self.states = StateSlots(num_state_slots, block_size) if num_state_slots else None
        self.sequences: list[Sequence] = []
        # Those that wait, and who is next.
        self.turns = Turns()
        self.counts = SchedulerCounts()
        # The sequence that the scheduler works on, or failed with.
        self.current: Sequence | None = None
        self._last_table_id = 0

    def start(self, sequence: Sequence, found: list[int]) -> None:
        """Moves a waiting sequence to running, with the cached blocks of its prefix."""
        sequence.table_id = self._last_table_id = self._last_table_id % _MAX_TABLE_ID + 1
        self.block_pool.share(sequence.block_table, found)
        sequence.num_computed_tokens = len(found) * self.block_size
        sequence.num_entered_blocks = len(found)
        if self.states is not None:
            sequence.states = self.states.begin(
                sequence.block_digests, len(found), due=self._snapshots_due(sequence)
            )
        sequence.is_running = True
        self.turns.start(sequence)
        bisect.insort(self.sequences, sequence, key=place)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting, and frees its blocks."""
        if sequence.is_running:
            self.sequences.remove(sequence)
            self._stop(sequence)
        else:
            self.turns.leave(sequence)
        self.turns.end(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Returns a running sequence to its place among the waiting ones."""
        self.sequences.remove(sequence)
        self._stop(sequence)
        sequence.is_preempted = True
        sequence.num_tokens_before = max(sequence.num_tokens_before, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        self.turns.wait(sequence)
        self.counts.num_preemptions += 1

    def find_cached(self, sequence: Sequence) -> list[int]:
        """The cached blocks of a waiting sequence's prefix; they never cover a token whose logits
        are needed, as the last one's are.
        """
        if not self.has_prefix_cache:
            return []
        num_blocks = sequence.max_cached_tokens // self.block_size
        cache, digests = self.block_pool.cache, sequence.block_digests
        found = cache.find(digests[:num_blocks])
        while len(found) == len(digests) < num_blocks:
            self.extend_digests(sequence, min(len(digests) + _DIGESTS_AT_ONCE, num_blocks))
            found += cache.find(digests[len(found) :])
        if self.states is not None:
            del found[self.states.num_covered_blocks(digests[: len(found)]) :]
        return found

    def _snapshots_due(self, sequence: Sequence) -> list[int]:
        """After how many tokens: those that can be cached, and those whose K/V is cached already,
        so that others begin with the same.
        """
        if not self.has_prefix_cache:
            return []
        num_blocks = sequence.max_cached_tokens // self.block_size
        num_shared = len(self.block_pool.cache.find(sequence.block_digests[:num_blocks]))
        return [num_blocks * self.block_size, num_shared * self.block_size]

    def settle(self, sequence: Sequence) -> None:
        """Enters what a running sequence has computed into the prefix cache."""
        if sequence.num_computed_tokens // self.block_size > sequence.num_entered_blocks:
            self.enter_full_blocks(sequence)
        if self.states is not None and sequence.states is not None:
            self.states.settle(
                sequence.states, sequence.block_digests, sequence.num_computed_tokens
            )

    def num_common_blocks(self, first: Sequence, second: Sequence, limit: int) -> int:
        """How many whole blocks, up to `limit`, two sequences have in common."""
        limit = min(limit, len(first.token_ids) // self.block_size)
        for start in range(0, limit, _DIGESTS_AT_ONCE):
            end = min(start + _DIGESTS_AT_ONCE, limit)
            for sequence in (first, second):
                if len(sequence.block_digests) < end:
                    self.extend_digests(sequence, end)
            pairs = zip(
                first.block_digests[start:end], second.block_digests[start:end], strict=True
            )
            for i, (own, other) in enumerate(pairs, start):
                if own != other:
                    return i
        return limit

    def enter_full_blocks(self, sequence: Sequence) -> None:
        """Enters newly filled blocks into the prefix cache. Their tokens are verified, since K/V of
        a rejected draft is never counted as computed.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full == sequence.num_entered_blocks or not self.has_prefix_cache:
            return
        self.extend_digests(sequence, num_full)
        for i in range(sequence.num_entered_blocks, num_full):
            self.block_pool.cache.add(sequence.block_digests[i], sequence.block_table[i])
        sequence.num_entered_blocks = num_full

    def extend_digests(self, sequence: Sequence, num_blocks: int) -> None:
        extend_digests(
            sequence.block_digests,
            sequence.token_ids,
            num_blocks,
            block_size=self.block_size,
            cache_salt=sequence.cache_salt,
            uses_long_rope=sequence.uses_long_rope,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_with_next(self, sequence: Sequence) -> int:
        """Blocks that a running sequence needs to compute one more token."""
        num_held = len(sequence.block_table)
        return num_held + (sequence.num_computed_tokens == num_held * self.block_size)

    def num_blocks_for_next(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a running sequence lacks for its next `num_tokens`."""
        num_blocks = self.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        return num_blocks - len(sequence.block_table)

    def num_blocks_missing(self, running: Sequence, growth_tokens: int = 0) -> int:
        """Blocks that a running sequence lacks for its tokens, the next one, and growth."""
        num_blocks = self.num_blocks_with_growth(running, 1 + growth_tokens)
        return max(0, num_blocks - len(running.block_table))

    def num_blocks_with_growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks for a sequence's tokens and the next `num_tokens`, up to its maximum length."""
        length = min(len(sequence.token_ids) + num_tokens, sequence.max_length)
        return self.num_blocks_for(length)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives a running sequence the blocks that it lacks for so many tokens."""
        if num_tokens > len(sequence.block_table) * self.block_size:
            self.block_pool.extend(sequence.block_table, self.num_blocks_for(num_tokens))

    def check_integrity(self) -> None:
        """Asserts the invariants."""
        self.block_pool.check_integrity([s.block_table for s in self.sequences])
        self.turns.check_integrity(self.sequences)
        if self.states is not None:
            self.states.check_integrity([s.states for s in self.sequences if s.states is not None])
            assert all(s.states is not None for s in self.sequences)
        assert self.sequences == sorted(self.sequences, key=place), "out of order"
        assert all(sequence.is_running for sequence in self.sequences)
        assert not any(sequence.is_running for sequence in self.turns)
        assert not any(s.block_table or s.num_computed_tokens for s in self.turns)
        for sequence in self.sequences:
            covered = len(sequence.block_table) * self.block_size
            assert sequence.num_computed_tokens <= covered, "computed tokens without a block"
            assert sequence.num_computed_tokens < len(sequence.token_ids)
            assert sequence.num_entered_blocks * self.block_size <= sequence.num_computed_tokens

    def _stop(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks; whole ones stay cached."""
        self.settle(sequence)
        if self.states is not None and sequence.states is not None:
            self.states.end(sequence.states)
            sequence.states = None
        self.block_pool.release(sequence.block_table)
        sequence.num_entered_blocks = 0
        sequence.is_running = False
        self.turns.stop(sequence)


def num_held_blocks(sequence: Sequence) -> int:
    return len(sequence.block_table)
