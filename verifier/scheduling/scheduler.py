"""Which sequences take part in a step, with how many tokens: continuous batching.

One token budget per step covers decodes, drafts and prefill chunks alike. Decodes come first, so
that a long prompt never stops a running stream; prompts are cut into chunks to fit the rest. All
sequences stand in one order: priority, then turns of tenants (`turns.py`), then arrival. In it
waiting sequences begin to run (`admission.py`) and prompts are computed, except that short ones
overtake (`prefill_order.py`): long prompts are computed one after the other, and none starves; of
several tenants, the first prompt of the one that was served least. When blocks run short, idle
cached blocks are evicted, then drafts are cut, then the last running sequence in order of the
tenant that holds most is preempted: it frees its blocks, keeps its tokens, and computes them again
when there is room for them and for all running sequences to grow (`growth_tokens`). So it is
preempted again only after it, or one before it in order, has grown by about as much.

Every sequence ends, unless others keep arriving with a higher priority. No sequence needs more
blocks than the pool has (`add` asserts it), so:

- When nothing runs, the first waiting sequence is admitted.
- The first running sequence is never preempted. It computes at least one token in every step,
  except while it waits for a draft, which the engine bounds. It ends, and the next one is first.

Knows no tensor and no clock.
"""

from typing import NamedTuple

from verifier.drafts.depth_policy import DepthPolicy, DraftCandidate
from verifier.scheduling.admission import Admission
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.draft_selection import (
    SelectedDraft,
    choose_depths,
    draft_within_limits,
    why_undrafted,
)
from verifier.scheduling.prefill_order import in_prefill_order, num_missing_tokens
from verifier.scheduling.running_set import RunningSet, num_held_blocks
from verifier.scheduling.sequence import OpenSequence, Sequence
from verifier.scheduling.turns import waiting_place


class DepthPolicyError(Exception):
    """The depth policy raised the cause of this."""


class ScheduledSequence(NamedTuple):
    """A sequence's part in one step. One is made per sequence and step."""

    sequence: Sequence
    # Known tokens to run, from num_computed_tokens on.
    num_new_tokens: int
    draft_token_ids: list[int]
    # False for a prefill chunk that ends before the last known token, and where it is only scored.
    is_sampled: bool
    # What the depth policy chose from; None: it had no choice.
    candidate: DraftCandidate | None = None
    # Whether its drafts are those that a grammar forces, not a hint's.
    is_forced: bool = False


class Scheduler:
    """Owned by the engine thread; sole owner of all waiting and running sequences and the block
    pool.

    Admission, the running sequences' blocks and the prompts' order are parts of it.
    """

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        has_prefix_cache: bool = True,
        max_scored_rows: int = 256,
        growth_tokens: int = 64,
        depth_policy: DepthPolicy | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """Args: num_state_slots: of recurrent states, at least `max_num_seqs`; 0: it has none."""
        assert max_num_batched_tokens >= max_num_seqs, "every decode must fit into a step"
        assert num_state_slots >= max_num_seqs or not num_state_slots
        self.block_pool = block_pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._running = RunningSet(
            block_pool=block_pool,
            block_size=block_size,
            has_prefix_cache=has_prefix_cache,
            num_state_slots=num_state_slots,
        )
        self._turns = self._running.turns
        self._admission = Admission(
            self._running,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            growth_tokens=growth_tokens,
        )
        # In order.
        self.running = self._running.sequences
        self.counts = self._running.counts
        # None: a step verifies as many drafts as there is room for.
        self.depth_policy = depth_policy
        # Limit of a step's scored rows.
        self._max_scored_rows = max_scored_rows
        self._max_blocks_in_step = max_num_batched_tokens // block_size + 1
        self._num_arrivals = 0

    @property
    def current(self) -> Sequence | None:
        """The sequence that `admit` or `schedule` works on, or failed with."""
        return self._running.current

    @property
    def waiting(self) -> list[Sequence]:
        """By priority and arrival; for tests and checks."""
        return sorted(self._turns, key=waiting_place)

    @property
    def num_waiting(self) -> int:
        return self._turns.num_sequences

    @property
    def num_waiting_tokens(self) -> int:
        return self._turns.num_tokens

    def is_within_share(
        self, sequence: OpenSequence, *, max_sequences: int, max_tokens: int
    ) -> bool:
        """`Turns.is_within_share`, of a sequence that would wait."""
        return self._turns.is_within_share(
            sequence.cache_salt,
            sequence.tenant_weight,
            sequence.num_held_tokens,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
        )

    def fits(self, max_length: int) -> bool:
        """Whether the pool has blocks for a sequence of `max_length` tokens."""
        return self.num_blocks_for(max_length) <= self.block_pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that `fits`, after all of its priority."""
        assert self.fits(sequence.max_length)
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        self._turns.wait(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to running, in order, while there is room for them.

        Returns:
            Sequences that run for the first time.
        """
        return self._admission.admit()

    def schedule(self) -> list[ScheduledSequence]:
        """Forms a step: decodes with their drafts first, then prefill chunks.

        Raises:
            DepthPolicyError: nothing is scheduled.
        """
        decoding, prefilling, num_spare_blocks = self._preempt_for_room()
        budget = self.max_num_batched_tokens - len(decoding)
        # Prompts get at least half of the budget that drafts could use.
        draft_budget = budget // 2 if prefilling else budget
        num_draft_blocks = num_spare_blocks // 2 if prefilling else num_spare_blocks
        drafts = self._drafts(decoding, prefilling, budget, draft_budget)
        num_drafting = sum(bool(draft.token_ids) for draft in drafts)
        # What the policy chose fits into the budget, unless others verify all that they have.
        is_shared = any(draft.token_ids and draft.depth is None for draft in drafts)
        scheduled = []
        for sequence, draft in zip(decoding, drafts, strict=True):
            self._running.current = sequence
            num_blocks = self._running.num_blocks_with_next(sequence)
            draft_token_ids: list[int] = []
            if draft.token_ids:
                room = (num_blocks + num_draft_blocks) * self.block_size
                room -= sequence.num_computed_tokens + 1
                num_sharing = num_drafting if is_shared else 1
                draft_token_ids = self._draft_of(sequence, draft, draft_budget, num_sharing, room)
                num_drafting -= 1
                draft_budget -= len(draft_token_ids)
                budget -= len(draft_token_ids)
            if not draft_token_ids and sequence.num_speculative_tokens:
                sequence.undrafted[why_undrafted(sequence, draft)] += 1
            scheduled.append(
                self._scheduled(sequence, 1, draft_token_ids, draft.candidate, draft.is_forced)
            )
            num_more_blocks = len(sequence.block_table) - num_blocks
            num_draft_blocks -= num_more_blocks
            num_spare_blocks -= num_more_blocks
        scored_rows = self._max_scored_rows
        for sequence in self._in_prefill_order(prefilling, budget, num_spare_blocks):
            self._running.current = sequence
            num_blocks = len(sequence.block_table)
            if sequence is prefilling[0]:
                # Its next block is reserved.
                num_blocks = self._running.num_blocks_with_next(sequence)
            room = (num_blocks + num_spare_blocks) * self.block_size
            room -= sequence.num_computed_tokens
            num_missing = min(num_missing_tokens(sequence), sequence.longest_chunk(scored_rows))
            num_tokens = min(num_missing, budget, room)
            if num_tokens <= 0:
                continue
            scored_rows -= len(sequence.scored_rows(num_tokens))
            budget -= num_tokens
            scheduled.append(self._scheduled(sequence, num_tokens, []))
            num_spare_blocks -= len(sequence.block_table) - num_blocks
        self._running.current = None
        self._admission.num_steps += 1
        if self._turns.has_several and self._turns.compete(prefilling):
            for item in scheduled:
                self._charge(item)
        return scheduled

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting, and frees its blocks."""
        self._running.finish(sequence)

    def num_blocks_for(self, num_tokens: int) -> int:
        return self._running.num_blocks_for(num_tokens)

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests and idle moments."""
        self._running.check_integrity()

    def _preempt_for_room(self) -> tuple[list[Sequence], list[Sequence], int]:
        """Preempts until every decode, and the first prompt, has a block for its next token.

        Returns:
            The decoding and the prefilling sequences, and the number of blocks left for drafts and
            longer chunks.
        """
        while True:
            decoding, prefilling = [], []
            for sequence in self.running:
                if sequence.is_prefilling:
                    prefilling.append(sequence)
                elif not sequence.must_await_hint:
                    decoding.append(sequence)
            if len(prefilling) > 1 and self._turns.has_several:
                prefilling = self._turns.by_turns(prefilling)
            # Each needs one block at most. Counted exactly only if the step could use more.
            num_spare = self.block_pool.num_available - len(self.running)
            if num_spare <= self._max_blocks_in_step:
                num_spare = self.block_pool.num_available - sum(
                    self._running.num_blocks_with_next(s) - len(s.block_table)
                    for s in (*decoding, *prefilling[:1])
                )
            if num_spare >= 0:
                return decoding, prefilling, num_spare
            last = self.running[-1]
            if self._turns.has_several:
                last = self._turns.find_largest(self.running, num_held_blocks)
            self._running.preempt(last)

    def _charge(self, item: ScheduledSequence) -> None:
        """Counts what a step computes for a tenant; not what it computes again."""
        sequence = item.sequence
        end = sequence.num_computed_tokens + item.num_new_tokens
        num_again = max(0, min(end, sequence.num_tokens_before) - sequence.num_computed_tokens)
        num_tokens = item.num_new_tokens - num_again + len(item.draft_token_ids)
        self._turns.charge(sequence, num_tokens)

    def _in_prefill_order(
        self, prefilling: list[Sequence], budget: int, num_spare_blocks: int
    ) -> list[Sequence]:
        return in_prefill_order(
            self._running,
            prefilling,
            budget=budget,
            num_spare_blocks=num_spare_blocks,
            scored_rows=self._max_scored_rows,
        )

    def _drafts(
        self,
        decoding: list[Sequence],
        prefilling: list[Sequence],
        budget: int,
        draft_budget: int,
    ) -> list[SelectedDraft]:
        """The drafts of the decoding sequences, and how many of each to verify."""
        drafts = []
        for sequence in decoding:
            self._running.current = sequence
            drafts.append(draft_within_limits(sequence))
        self._running.current = None
        if self.depth_policy is not None:
            try:
                choose_depths(
                    self.depth_policy,
                    decoding,
                    drafts,
                    prefilling,
                    budget=budget,
                    draft_budget=draft_budget,
                )
            except Exception as error:
                raise DepthPolicyError from error
        return drafts

    def _draft_of(
        self,
        sequence: Sequence,
        draft: SelectedDraft,
        budget: int,
        num_sharing: int,
        room: int,
    ) -> list[int]:
        """The first drafts of `draft`, which has at least one, for which this step has room and
        budget, within its depth.
        """
        # Rounded up: later sequences share what this one leaves.
        num_drafts = min(len(draft.token_ids), room, -(-budget // num_sharing))
        if draft.depth is not None:
            num_drafts = min(num_drafts, draft.depth)
        if sequence.grammar is not None:
            num_drafts = sequence.grammar.num_verifiable(draft.token_ids[:num_drafts])
        if num_drafts and not draft.is_forced:
            outcome = sequence.draft_buffer.use(len(sequence.token_ids))
            if outcome is not None:
                self.counts.hints[outcome] += 1
        return draft.token_ids[:num_drafts]

    def _scheduled(
        self,
        sequence: Sequence,
        num_new_tokens: int,
        draft_token_ids: list[int],
        candidate: DraftCandidate | None = None,
        is_forced: bool = False,
    ) -> ScheduledSequence:
        end = sequence.num_computed_tokens + num_new_tokens
        num_tokens = end + len(draft_token_ids)
        self._running.extend(sequence, num_tokens)
        is_sampled = sequence.scoring is None and end == len(sequence.token_ids)
        if self._running.states is not None and sequence.states is not None:
            follows = is_sampled and self._running.has_prefix_cache
            self._running.states.plan(sequence.states, end, follows=follows)
        return ScheduledSequence(
            sequence, num_new_tokens, draft_token_ids, is_sampled, candidate, is_forced
        )
