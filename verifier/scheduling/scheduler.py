"""Which sequences take part in a step, with how many tokens: continuous batching.

One token budget per step covers decodes, drafts and prefill chunks alike. Decodes come first, so
that a long prompt never stops a running stream; prompts are cut into chunks to fit the rest. All
sequences stand in one order: priority, then turns of tenants (`turns.py`), then arrival. Prompts
are computed in this order, except that short ones overtake: up to half of the prompts' budget goes
to those that the step can finish, the shortest first. The rest goes in order, so long prompts are
computed one after the other, and none starves; of several tenants, the first prompt of the one that
was served least. A sequence is admitted when there are blocks for its
next chunk beside the blocks that running sequences need now; nothing is reserved for later growth.
While one before it computes the same prompt, it waits, to share the blocks; those behind it are
admitted as far as they leave it its place and its blocks. When blocks run short, idle cached blocks
are evicted, then drafts are cut, then the last running sequence in order of the tenant that holds
most is preempted: it frees its blocks, keeps its tokens, and computes them again when there is room
for them and for all running sequences to grow (`growth_tokens`). So it is preempted again only
after it, or one before it in order, has grown by about as much. A sequence of a tenant that holds
more than its share is preempted, too, when it is another's turn who holds less, one in some steps.

Every sequence ends, unless others keep arriving with a higher priority. No sequence needs more
blocks than the pool has (`add` asserts it), so:

- When nothing runs, the first waiting sequence is admitted.
- The first running sequence is never preempted. It computes at least one token in every step,
  except while it waits for a draft, which the engine bounds. It ends, and the next one is first.

Knows no tensor and no clock.
"""

import bisect
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from verifier.drafts.depth_policy import DepthPolicy, DraftCandidate
from verifier.drafts.draft_buffer import HintOutcome
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.draft_selection import SelectedDraft, choose_depths, draft_within_limits
from verifier.scheduling.prefix_cache import extend_digests
from verifier.scheduling.sequence import OpenSequence, Sequence
from verifier.scheduling.turns import Line, Turns, place, waiting_place

# Ids of block tables begin anew after this many admissions: they travel as int32.
_MAX_TABLE_ID = (1 << 31) - 1

# Digests of a waiting prompt's blocks that are computed before the cache is asked for them. All of
# a long prompt take 16 ms, in which no stream runs.
_DIGESTS_AT_ONCE = 64

# Blocks of waiting sequences after which the cache is asked for no more of them in one call of
# `admit`: they take 10 ms, and 128 copies of 32,000 tokens 255 ms, in which no stream runs.
_MAX_LOOKED_UP_BLOCKS = 8192

# While a waiting sequence has no room, one in so many calls of `admit` asks the cache for its
# prefix, which others may have computed meanwhile. For a long prompt, asking takes 1 ms.
_CALLS_PER_LOOK_UP = 16


# Between two sequences that make way for others' turns.
_STEPS_PER_WAY = 8


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


@dataclass(slots=True)
class _LookUp:
    """A waiting sequence, and what the cache has of it.

    Attributes:
        num_found: the cached blocks of its prefix.
        num_idle: those of them that no sequence holds.
        leader: the running sequence that computes its prefix for it. None: there is none.
        num_calls: of `admit` since they were looked up.
    """

    sequence: Sequence
    num_found: int
    num_idle: int
    leader: Sequence | None
    num_calls: int = 0


@dataclass(slots=True, kw_only=True)
class SchedulerCounts:
    """Totals since the start."""

    # Tokens of sequences looked up in the prefix cache, and those found.
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    # Hints that were used, or passed or contradicted by their sequences.
    hints: dict[HintOutcome, int] = field(default_factory=lambda: dict.fromkeys(HintOutcome, 0))


class Scheduler:
    """Owned by the engine thread; sole owner of all waiting and running sequences and the block
    pool.

    Invariants: `running` is in order; a waiting sequence holds no block and has no computed
    tokens.
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
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every decode must fit into a step"
        self.block_pool = block_pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.has_prefix_cache = has_prefix_cache
        self.running: list[Sequence] = []
        self.counts = SchedulerCounts()
        # None: a step verifies as many drafts as there is room for.
        self.depth_policy = depth_policy
        # The sequence that `admit` or `schedule` works on, or failed with.
        self.current: Sequence | None = None
        # Limit of a step's scored rows.
        self._max_scored_rows = max_scored_rows
        # Tokens that each running sequence must have room for when a preempted one is readmitted.
        self._growth_tokens = growth_tokens
        self._last_table_id = 0
        self._max_blocks_in_step = max_num_batched_tokens // block_size + 1
        self._num_arrivals = 0
        # The waiting sequences that the last `admit` has looked up: those that wait for a leader,
        # and the one that had no room.
        self._look_ups: dict[Sequence, _LookUp] = {}
        # Sequences that `admit` will return; kept here in case it raises and is called again.
        self._opened: list[Sequence] = []
        self._turns = Turns()
        # Steps, and the first one in which a running sequence may make way again.
        self._num_steps = 0
        self._next_way = 0

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
            len(sequence.token_ids),
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
        """Moves waiting sequences to running, in order, while there is room for them and for those
        before them that wait for a leader.

        Returns:
            Sequences that run for the first time.
        """
        for sequence in self.running:
            num_entered_tokens = sequence.num_entered_blocks * self.block_size
            if sequence.num_computed_tokens - num_entered_tokens >= self.block_size:
                self.current = sequence
                self._enter_full_blocks(sequence)
        known, self._look_ups = self._look_ups, {}
        # Those that wait for a leader; others were next while they did.
        led: list[_LookUp] = []
        num_needed = num_looked_up = 0
        if self.num_waiting and len(self.running) < self.max_num_seqs:
            # By the running ones and by `led`. Counted for each that is admitted, it would take
            # 15 ms where 256 are.
            num_needed = self._num_blocks_needed(led)
        may_start = len(self.running) < self.max_num_seqs or self._turns.has_several
        line = self._turns.line() if self.num_waiting and may_start else Line(())
        made_way = False
        while (first := line.first()) is not None:
            sequence = self.current = first
            sequence.turn = self._turns.next_turn(sequence)
            if len(led) >= self.max_num_seqs - len(self.running):
                if made_way or not self._make_way(sequence, self.max_num_seqs, _one_place):
                    break
                made_way = True
                num_needed = self._num_blocks_needed(led)
            look_up = known.get(sequence)
            if look_up is None or not self._is_known_to_wait(look_up, led, num_needed):
                if num_looked_up >= _MAX_LOOKED_UP_BLOCKS:
                    break
                found = self._find_cached(sequence)
                num_looked_up += len(sequence.block_digests)
                look_up = _LookUp(
                    sequence,
                    len(found),
                    sum(map(self.block_pool.cache.is_idle, found)),
                    self._find_leader(sequence, len(found)),
                )
                if look_up.leader is None and self._has_room(look_up, led, num_needed):
                    self._start(sequence, found)
                    num_needed += self._num_blocks_missing(sequence)
                    if not sequence.is_preempted:
                        self._count_lookup(sequence)
                        self._opened.append(sequence)
                    if made_way:
                        break
                    line.go_on(has_started=True)
                    continue
            self._look_ups[sequence] = known[sequence] = look_up
            if look_up.leader is None:
                num_blocks = self.block_pool.num_blocks
                if made_way or not self._make_way(sequence, num_blocks, _num_held_blocks):
                    break
                made_way = True
                num_needed = self._num_blocks_needed(led)
                continue
            led.append(look_up)
            num_needed += self._num_blocks_to_start(look_up)
            if made_way:
                break
            line.go_on(has_started=False)
        self.current = None
        opened, self._opened = self._opened, []
        return opened

    def schedule(self) -> list[ScheduledSequence]:
        """Forms a step: decodes with their drafts first, then prefill chunks.

        Raises:
            DepthPolicyError: nothing is scheduled.
        """
        decoding, prefilling, num_spare_blocks = self._make_room()
        budget = self.max_num_batched_tokens - len(decoding)
        # Prompts get at least half of the budget that drafts could use.
        draft_budget = budget // 2 if prefilling else budget
        num_draft_blocks = num_spare_blocks // 2 if prefilling else num_spare_blocks
        in_prefill_order = self._in_prefill_order(prefilling, budget, num_spare_blocks)
        drafts = self._drafts(decoding, in_prefill_order, budget, draft_budget)
        num_drafting = sum(bool(draft.token_ids) for draft in drafts)
        # What the policy chose fits into the budget, unless others verify all that they have.
        is_shared = any(draft.token_ids and draft.depth is None for draft in drafts)
        scheduled = []
        for sequence, draft in zip(decoding, drafts, strict=True):
            self.current = sequence
            num_blocks = self._num_blocks_with_next(sequence)
            draft_token_ids: list[int] = []
            if draft.token_ids:
                room = (num_blocks + num_draft_blocks) * self.block_size
                room -= sequence.num_computed_tokens + 1
                num_sharing = num_drafting if is_shared else 1
                draft_token_ids = self._draft_of(sequence, draft, draft_budget, num_sharing, room)
                num_drafting -= 1
                draft_budget -= len(draft_token_ids)
                budget -= len(draft_token_ids)
            scheduled.append(
                self._scheduled(sequence, 1, draft_token_ids, draft.candidate, draft.is_forced)
            )
            num_more_blocks = len(sequence.block_table) - num_blocks
            num_draft_blocks -= num_more_blocks
            num_spare_blocks -= num_more_blocks
        scored_rows = self._max_scored_rows
        for sequence in self._in_prefill_order(prefilling, budget, num_spare_blocks):
            self.current = sequence
            num_blocks = len(sequence.block_table)
            if sequence is prefilling[0]:
                # Its next block is reserved.
                num_blocks = self._num_blocks_with_next(sequence)
            room = (num_blocks + num_spare_blocks) * self.block_size
            room -= sequence.num_computed_tokens
            num_missing = min(_num_missing_tokens(sequence), sequence.longest_chunk(scored_rows))
            num_tokens = min(num_missing, budget, room)
            if num_tokens <= 0:
                continue
            scored_rows -= len(sequence.scored_rows(num_tokens))
            budget -= num_tokens
            scheduled.append(self._scheduled(sequence, num_tokens, []))
            num_spare_blocks -= len(sequence.block_table) - num_blocks
        self.current = None
        self._num_steps += 1
        if self._turns.has_several and self._turns.compete(prefilling):
            for item in scheduled:
                self._charge(item)
        return scheduled

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting, and frees its blocks."""
        if sequence.is_running:
            self.running.remove(sequence)
            self._stop(sequence)
        else:
            self._turns.leave(sequence)
        self._turns.end(sequence)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests and idle moments."""
        self.block_pool.check_integrity([s.block_table for s in self.running])
        self._turns.check_integrity(self.running)
        assert self.running == sorted(self.running, key=place), "out of order"
        assert all(sequence.is_running for sequence in self.running)
        assert not any(sequence.is_running for sequence in self.waiting)
        assert not any(s.block_table or s.num_computed_tokens for s in self.waiting)
        for sequence in self.running:
            covered = len(sequence.block_table) * self.block_size
            assert sequence.num_computed_tokens <= covered, "computed tokens without a block"
            assert sequence.num_computed_tokens < len(sequence.token_ids)
            assert sequence.num_entered_blocks * self.block_size <= sequence.num_computed_tokens

    # Admission

    def _make_way(self, waiting: Sequence, room: int, size: Callable[[Sequence], int]) -> bool:
        """Preempts a sequence for one that is next but has no place or no blocks, if its tenant
        holds less than its share and another more. Not again in the next steps: whoever makes way
        is computed again, as far as its blocks do not stay cached.
        """
        if not self._turns.has_several or self._num_steps < self._next_way:
            return False
        sequence = self._turns.find_over_share(waiting, self.running, room=room, size=size)
        if sequence is None:
            return False
        self._next_way = self._num_steps + _STEPS_PER_WAY
        self._preempt(sequence)
        return True

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """The cached blocks of a waiting sequence's prefix; they never cover a token whose logits
        are needed, as the last one's are.
        """
        if not self.has_prefix_cache:
            return []
        num_blocks = sequence.max_cached_tokens // self.block_size
        cache, digests = self.block_pool.cache, sequence.block_digests
        found = cache.find(digests[:num_blocks])
        while len(found) == len(digests) < num_blocks:
            self._extend_digests(sequence, min(len(digests) + _DIGESTS_AT_ONCE, num_blocks))
            found += cache.find(digests[len(found) :])
        return found

    def _find_leader(self, sequence: Sequence, num_found: int) -> Sequence | None:
        """The running sequence before a waiting one in order that will compute the first block of
        its prefix that is not cached. What both have in common would otherwise be computed twice,
        and take twice the blocks.

        Of two prompts, the leader's is computed first, so the waiting one loses a part of a step at
        most; a short one, which could overtake, some steps in which the first prompt of its
        priority computes what both have in common. Where a long prompt is not that first one, a
        short one does not wait for it, and computes that itself. A sequence with rows to score is
        no leader: it may leave budget to those behind it in every step.
        """
        if not self.has_prefix_cache or num_found >= sequence.max_cached_tokens // self.block_size:
            return None
        digest = sequence.block_digests[num_found]
        may_overtake = self._may_overtake(sequence, num_found)
        first: Sequence | None = None
        num_before = bisect.bisect(self.running, place(sequence), key=place)
        for running in itertools.islice(self.running, num_before):
            if not running.is_prefilling:
                continue
            if running.priority == sequence.priority:
                first = first or running
            digests = running.block_digests
            if len(digests) == num_found < len(running.token_ids) // self.block_size:
                self._extend_digests(running, num_found + 1)
            is_ahead = running.num_entered_blocks <= num_found < len(digests)
            if not is_ahead or digests[num_found] != digest or running.rows_to_score:
                continue
            is_long = _num_missing_tokens(running) > self.max_num_batched_tokens // 2
            is_behind = running.priority == sequence.priority and running is not first
            if not (may_overtake and is_long and is_behind):
                return running
        return None

    def _may_overtake(self, sequence: Sequence, num_found: int) -> bool:
        """Whether a waiting sequence, of whose blocks so many are cached, is short enough to
        overtake prompts of its priority.
        """
        num_missing = len(sequence.token_ids) - num_found * self.block_size
        return num_missing <= self.max_num_batched_tokens // 2

    def _is_known_to_wait(self, look_up: _LookUp, led: list[_LookUp], num_needed: int) -> bool:
        """Whether a waiting sequence has no room by what was found in the cache last; that is found
        anew now and then. Or whether its leader still computes what it waits for.
        """
        if (leader := look_up.leader) is not None:
            if not (leader.is_running and leader.is_prefilling):
                return False
            # A long prompt is not looked up in every step: that takes 1 ms.
            is_passed = leader.num_entered_blocks > look_up.num_found
            return not (is_passed and self._may_overtake(look_up.sequence, look_up.num_found))
        look_up.num_calls += 1
        if look_up.num_calls % _CALLS_PER_LOOK_UP == 0:
            return False
        return not self._has_room(look_up, led, num_needed)

    def _has_room(self, look_up: _LookUp, led: list[_LookUp], num_needed: int) -> bool:
        """Whether there are blocks for a waiting sequence's next chunk, beside those that running
        sequences need now, and those before it that wait for a leader: `num_needed`.

        A preempted one needs room for all sequences to grow, so that it makes progress before it is
        preempted again.
        """
        growth_tokens = 0
        if look_up.sequence.is_preempted:
            num_missing = len(look_up.sequence.token_ids) - look_up.num_found * self.block_size
            # While it is recomputed, the others grow by one token per step.
            growth_tokens = self._growth_tokens + num_missing // self.max_num_batched_tokens
            num_needed = self._num_blocks_needed(led, growth_tokens)
        num_needed += self._num_blocks_to_start(look_up, growth_tokens)
        return num_needed <= self.block_pool.num_available

    def _num_blocks_needed(self, led: list[_LookUp], growth_tokens: int = 0) -> int:
        """Available blocks that running sequences, and those that wait for a leader, need now."""
        num_blocks = sum(self._num_blocks_to_start(each, growth_tokens) for each in led)
        return num_blocks + sum(
            self._num_blocks_missing(running, growth_tokens) for running in self.running
        )

    def _num_blocks_missing(self, running: Sequence, growth_tokens: int = 0) -> int:
        """Blocks that a running sequence lacks for its tokens, the next one, and growth."""
        num_blocks = self._num_blocks_with_growth(running, 1 + growth_tokens)
        return max(0, num_blocks - len(running.block_table))

    def _num_blocks_to_start(self, look_up: _LookUp, growth_tokens: int = 0) -> int:
        """Available blocks that a waiting sequence takes: for its next chunk, or for all its tokens
        and growth, if it was preempted.
        """
        num_blocks = self._num_blocks_with_growth(look_up.sequence, 1 + growth_tokens)
        if not look_up.sequence.is_preempted:
            chunk_end = look_up.num_found * self.block_size + self.max_num_batched_tokens
            num_blocks = min(num_blocks, self.num_blocks_for(chunk_end))
        return num_blocks + look_up.num_idle - look_up.num_found

    def _num_blocks_with_growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks for a sequence's tokens and the next `num_tokens`, up to its maximum length."""
        length = min(len(sequence.token_ids) + num_tokens, sequence.max_length)
        return self.num_blocks_for(length)

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        sequence.table_id = self._last_table_id = self._last_table_id % _MAX_TABLE_ID + 1
        self.block_pool.share(sequence.block_table, found)
        sequence.num_computed_tokens = len(found) * self.block_size
        sequence.num_entered_blocks = len(found)
        sequence.is_running = True
        self._turns.start(sequence)
        bisect.insort(self.running, sequence, key=place)

    def _count_lookup(self, sequence: Sequence) -> None:
        sequence.num_cached_tokens = sequence.num_computed_tokens
        if self.has_prefix_cache and sequence.max_cached_tokens:
            self.counts.num_prefix_cache_queries += len(sequence.token_ids)
            self.counts.num_prefix_cache_hits += sequence.num_cached_tokens

    # Blocks

    def _make_room(self) -> tuple[list[Sequence], list[Sequence], int]:
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
                    self._num_blocks_with_next(s) - len(s.block_table)
                    for s in (*decoding, *prefilling[:1])
                )
            if num_spare >= 0:
                return decoding, prefilling, num_spare
            last = self.running[-1]
            if self._turns.has_several:
                last = self._turns.find_largest(self.running, _num_held_blocks)
            self._preempt(last)

    def _preempt(self, sequence: Sequence) -> None:
        """Returns a running sequence to its place among the waiting ones."""
        self.running.remove(sequence)
        self._stop(sequence)
        sequence.is_preempted = True
        sequence.num_tokens_before = max(sequence.num_tokens_before, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        self._turns.wait(sequence)
        self.counts.num_preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks; whole ones stay cached."""
        self._enter_full_blocks(sequence)
        self.block_pool.release(sequence.block_table)
        sequence.num_entered_blocks = 0
        sequence.is_running = False
        self._turns.stop(sequence)

    def _enter_full_blocks(self, sequence: Sequence) -> None:
        """Enters newly filled blocks into the prefix cache. Their tokens are verified, since K/V of
        a rejected draft is never counted as computed.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full == sequence.num_entered_blocks or not self.has_prefix_cache:
            return
        self._extend_digests(sequence, num_full)
        for i in range(sequence.num_entered_blocks, num_full):
            self.block_pool.cache.add(sequence.block_digests[i], sequence.block_table[i])
        sequence.num_entered_blocks = num_full

    def _extend_digests(self, sequence: Sequence, num_blocks: int) -> None:
        extend_digests(
            sequence.block_digests,
            sequence.token_ids,
            num_blocks,
            block_size=self.block_size,
            cache_salt=sequence.cache_salt,
        )

    def _num_blocks_with_next(self, sequence: Sequence) -> int:
        """Blocks that a running sequence needs to compute one more token."""
        num_held = len(sequence.block_table)
        return num_held + (sequence.num_computed_tokens == num_held * self.block_size)

    # The step

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
        """The prompts in the order in which they get the step's budget: by priority. Within each,
        short ones overtake, by what higher priorities leave.
        """
        if len(prefilling) < 2:
            return prefilling
        first = prefilling[0]
        # Its next block is reserved.
        num_spare_blocks += self._num_blocks_with_next(first) - len(first.block_table)
        scored_rows = self._max_scored_rows
        in_order: list[Sequence] = []
        for _, equals in itertools.groupby(prefilling, key=operator.attrgetter("priority")):
            prompts = list(equals)
            if len(prompts) > 1 and budget > 0:
                prompts = self._overtaking(prompts, budget, num_spare_blocks, scored_rows)
            in_order += prompts
            if len(in_order) == len(prefilling):
                break
            for sequence in prompts:
                if budget <= 0:
                    break
                num_missing = _num_missing_tokens(sequence)
                num_tokens = min(num_missing, sequence.longest_chunk(scored_rows))
                budget -= num_tokens
                num_spare_blocks -= self._num_blocks_for_next(sequence, num_tokens)
                scored_rows -= len(sequence.scored_rows(num_tokens))
        return in_order

    def _overtaking(
        self, prompts: list[Sequence], budget: int, num_spare_blocks: int, scored_rows: int
    ) -> list[Sequence]:
        """Prompts of one priority in the order in which they get the budget.

        Those that half of the budget can finish overtake the first one, those with the fewest
        missing tokens first. They leave it the blocks and the scored rows for its own half.
        """
        first = prompts[0]
        num_kept = min(
            _num_missing_tokens(first), first.longest_chunk(scored_rows), budget - budget // 2
        )
        num_spare_blocks -= self._num_blocks_for_next(first, num_kept)
        scored_rows -= len(first.scored_rows(num_kept))
        budget //= 2
        overtaking = []
        for sequence in sorted(prompts[1:], key=_num_missing_tokens):
            num_tokens = _num_missing_tokens(sequence)
            if num_tokens > budget:
                break
            num_blocks = self._num_blocks_for_next(sequence, num_tokens)
            if num_blocks > num_spare_blocks or num_tokens > sequence.longest_chunk(scored_rows):
                continue
            overtaking.append(sequence)
            budget -= num_tokens
            num_spare_blocks -= num_blocks
            scored_rows -= len(sequence.scored_rows(num_tokens))
        overtakes = set(overtaking)
        return [*overtaking, *(s for s in prompts if s not in overtakes)]

    def _num_blocks_for_next(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a running sequence lacks for its next `num_tokens`."""
        num_blocks = self.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        return num_blocks - len(sequence.block_table)

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
            self.current = sequence
            drafts.append(draft_within_limits(sequence))
        self.current = None
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
        if num_tokens > len(sequence.block_table) * self.block_size:
            self.block_pool.extend(sequence.block_table, self.num_blocks_for(num_tokens))
        is_sampled = sequence.scoring is None and end == len(sequence.token_ids)
        return ScheduledSequence(
            sequence, num_new_tokens, draft_token_ids, is_sampled, candidate, is_forced
        )


def _one_place(sequence: Sequence) -> int:
    """What a running sequence holds of `max_num_seqs`."""
    return 1


def _num_held_blocks(sequence: Sequence) -> int:
    return len(sequence.block_table)


def _num_missing_tokens(sequence: Sequence) -> int:
    """Known tokens that a prefilling sequence may compute. One whose next token is decided only
    together with a hint leaves its last token to that step.
    """
    num_missing = len(sequence.token_ids) - sequence.num_computed_tokens
    return num_missing - 1 if sequence.steps_only_with_hint else num_missing
