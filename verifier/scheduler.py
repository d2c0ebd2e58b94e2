"""Which sequences take part in a step, with how many tokens: continuous batching.

One token budget per step covers decodes, drafts and prefill chunks alike. Decodes come first, so
that a long prompt never stops a running stream; prompts are cut into chunks to fit what is left;
waiting sequences are admitted first come, first served. A sequence is admitted only when the
blocks for its longest possible course can be set aside, so a running one never waits for a block
and there is no deadlock. (Preemption will replace the reservation, here.)

Knows no tensor and no clock.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass

from verifier.block_pool import BlockPool
from verifier.draft_buffer import HintOutcome
from verifier.sequence import Sequence
from verifier.speculation_policy import num_drafts_to_verify


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """A sequence's part in one step."""

    sequence: Sequence
    # Known tokens to run, from num_computed_tokens on.
    num_new_tokens: int
    draft_token_ids: list[int]
    # False for a prefill chunk that does not end what is known: its sample is discarded.
    samples: bool


class Scheduler:
    """Owned by the engine thread; sole owner of `waiting`, `running` and the block pool.

    Invariant: the blocks held by running sequences and those still reserved for them never
    exceed the pool.
    """

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        count_hint: Callable[[HintOutcome], None],
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every decode must fit into a step"
        self.block_pool = block_pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self._count_hint = count_hint
        self._num_reserved_blocks = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose longest course fits the pool (see `num_blocks_for`)."""
        assert self.num_blocks_for(sequence.max_length) <= self.block_pool.num_blocks
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to running, in order, while there is room; returns them."""
        admitted = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            needed = self.num_blocks_for(self.waiting[0].max_length)
            if self._num_reserved_blocks + needed > self.block_pool.num_blocks:
                break
            sequence = self.waiting.popleft()
            sequence.num_reserved_blocks = needed
            self._num_reserved_blocks += needed
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> list[ScheduledSequence]:
        """Forms a step: decodes with their drafts first, then prefill chunks."""
        decoding = [s for s in self.running if not s.is_prefilling and not s.lacks_awaited_draft]
        prefilling = [s for s in self.running if s.is_prefilling]
        budget = self.max_num_batched_tokens - len(decoding)
        # Prompts waiting for their first token get at least half of what drafts could take.
        draft_budget = budget // 2 if prefilling else budget
        num_drafting = sum(s.has_draft for s in decoding)
        scheduled = []
        for sequence in decoding:
            draft_token_ids = self._draft_of(sequence, draft_budget, num_drafting)
            num_drafting -= sequence.has_draft
            draft_budget -= len(draft_token_ids)
            budget -= len(draft_token_ids)
            scheduled.append(self._scheduled(sequence, 1, draft_token_ids))
        for sequence in prefilling:
            if budget <= 0:
                break
            num_missing = len(sequence.token_ids) - sequence.num_computed_tokens
            num_new_tokens = min(num_missing, budget)
            budget -= num_new_tokens
            scheduled.append(self._scheduled(sequence, num_new_tokens, []))
        return scheduled

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, running or waiting, and frees its blocks."""
        if sequence.num_reserved_blocks:
            self.running.remove(sequence)
            self.block_pool.release(sequence.block_table)
            self._num_reserved_blocks -= sequence.num_reserved_blocks
            sequence.num_reserved_blocks = 0
        else:
            self.waiting.remove(sequence)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests and idle moments."""
        self.block_pool.check_integrity([s.block_table for s in self.running])
        assert self._num_reserved_blocks == sum(s.num_reserved_blocks for s in self.running)
        assert self._num_reserved_blocks <= self.block_pool.num_blocks
        assert not any(s.block_table or s.num_reserved_blocks for s in self.waiting)

    def _draft_of(self, sequence: Sequence, budget: int, num_sharing: int) -> list[int]:
        if not sequence.has_draft:
            return []
        num_drafts = num_drafts_to_verify(
            num_speculative_tokens=sequence.num_speculative_tokens,
            remaining=sequence.remaining,
            budget=budget,
            num_sharing=num_sharing,
        )
        draft_token_ids, outcome = sequence.draft_buffer.draft(len(sequence.token_ids), num_drafts)
        if outcome is not None:
            self._count_hint(outcome)
        return draft_token_ids

    def _scheduled(
        self, sequence: Sequence, num_new_tokens: int, draft_token_ids: list[int]
    ) -> ScheduledSequence:
        num_tokens = sequence.num_computed_tokens + num_new_tokens + len(draft_token_ids)
        self.block_pool.extend(sequence.block_table, self.num_blocks_for(num_tokens))
        return ScheduledSequence(
            sequence=sequence,
            num_new_tokens=num_new_tokens,
            draft_token_ids=draft_token_ids,
            samples=sequence.num_computed_tokens + num_new_tokens == len(sequence.token_ids),
        )
