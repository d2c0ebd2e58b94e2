"""A scheduler and its block pool, driven step by step, over a memory that stands in for K/V, and
another one for recurrent states.

The value "computed" for a token is a fold over the value of the token before it, read back through
the block table, and the token itself. So a slot's value depends on the whole prefix that it was
computed from. A block shared with the wrong sequence, allocated while it was held, or cached with a
rejected draft in it shows as a wrong value.
"""

import random
from typing import Any

from tandem.values import DraftWait
from tests.scripted_model import hashed
from tests.verifier.sequences import make_sequence
from verifier.engine.step_batch import state_use
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.prefix_cache import extend_digests
from verifier.scheduling.scheduler import ScheduledSequence, Scheduler
from verifier.scheduling.sequence import Scoring, ScoringMethod, Sequence

BLOCK_SIZE = 4
# Drafts that `make_sequence` lets a sequence verify in one step.
MAX_DRAFTS = 7
# Between two sequences that make way.
STEPS_PER_WAY = 8


def fold(before: int, token_id: int) -> int:
    return hash((before, token_id))


def values_of(token_ids: list[int]) -> list[int]:
    """The expected K/V values of these tokens."""
    values, value = [], 0
    for token_id in token_ids:
        value = fold(value, token_id)
        values.append(value)
    return values


class ScheduledWorld:
    """`hashed` gives the text of every sequence.

    Every step asserts the conditions under which no sequence waits for ever, while none arrives:

    - If a sequence waits, another one runs.
    - The first running sequence is never preempted, and computes at least one token unless it
      waits for its client. So it ends within as many steps as it may have tokens, and then the
      next one is the first.
    - The first running prompt, or another tenant's first one, gets half of the prompts' budget, as
      far as it has tokens and there are blocks. So each prompt becomes the first one.
    - A readmitted sequence is preempted again only after it, or one before it in order, has grown
      by the tokens that the scheduler keeps room for. If tenants share the blocks: only after all
      have, those admitted since included.
    - No sequence but the first one's followers makes way for another tenant's, one in some steps,
      and its own tenant keeps its share of the places or of the blocks.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        has_prefix_cache: bool = True,
        max_scored_rows: int = 256,
        growth_tokens: int = 8,
        num_state_slots: int = 0,
    ) -> None:
        self.scheduler = Scheduler(
            block_pool=BlockPool(num_blocks),
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            has_prefix_cache=has_prefix_cache,
            max_scored_rows=max_scored_rows,
            growth_tokens=growth_tokens,
            num_state_slots=num_state_slots,
        )
        # Of each slot of states: after how many tokens they are, their value, and its drafts.
        self.states: list[tuple[int, int, list[int]]] = [(-1, 0, [])] * num_state_slots
        self._read_slots: set[int] = set()
        self._written_slots: set[int] = set()
        self.growth_tokens = growth_tokens
        self.longest = num_blocks * BLOCK_SIZE
        self.memory = [0] * self.longest
        # Emitted output by sequence: appended to, never changed.
        self.reported: dict[str, list[int]] = {}
        # Positions of the rows that were scored, by sequence.
        self.scored: dict[str, list[int]] = {}
        self.opened: list[Sequence] = []
        # The value of the last token of every whole block that ever existed, by digest.
        self.last_values: dict[bytes, int] = {}
        # By preempted sequence: the lengths of running sequences at its readmission.
        self._lengths_at_readmission: dict[str, dict[str, int]] = {}
        self._num_steps = 0
        # Steps in which a sequence made way.
        self.made_way: list[int] = []

    @property
    def open_sequences(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def open(self, token_ids: list[int], num_output_tokens: int, **fields: Any) -> Sequence:
        sequence = make_sequence(
            token_ids=list(token_ids), num_output_tokens=num_output_tokens, **fields
        )
        self.scheduler.add(sequence)
        self.reported[sequence.sequence_id] = []
        self.scored[sequence.sequence_id] = []
        return sequence

    def open_scored(self, token_ids: list[int], num_drafts: int, **fields: Any) -> Sequence:
        """A sequence whose last prompt row and draft rows are scored. As from `SequenceTable`, it
        never grows.
        """
        return self.open(
            token_ids,
            0,
            prompt_length=len(token_ids) - num_drafts,
            scoring=Scoring(method=ScoringMethod.SINGLE_PASS, num_top=0),
            rows_to_score=range(len(token_ids) - num_drafts - 1, len(token_ids)),
            num_speculative_tokens=0,
            drafting=False,
            **fields,
        )

    def hint(self, sequence: Sequence, num_right: int, num_wrong: int) -> None:
        """A hint for the current length; empty if both are 0."""
        known = list(sequence.token_ids)
        for i in range(num_right + num_wrong):
            right = hashed(known)
            known.append(right if i < num_right else (right + 1) % 3)
        length = len(sequence.token_ids)
        sequence.draft_buffer.offer(length, known[length:], 2, sequence.token_ids)

    def step(self) -> list[ScheduledSequence]:
        """Admits, schedules, computes, commits."""
        self._admit()
        running = list(self.scheduler.running)
        scheduled = self.scheduler.schedule()
        self._check_progress(running, scheduled)
        self._read_slots, self._written_slots = set(), set()
        for item in scheduled:
            self._compute(item)
            self._compute_states(item)
        assert self._read_slots.isdisjoint(self._written_slots), "states are read and overwritten"
        for item in scheduled:
            self._commit(item)
        return scheduled

    def check(self) -> None:
        """Asserts the invariants between two steps."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        for sequence in self.open_sequences:
            self._remember(sequence)
            computed = sequence.token_ids[: sequence.num_computed_tokens]
            slots = self._slots(sequence, 0, len(computed))
            assert [self.memory[slot] for slot in slots] == values_of(computed), "wrong K/V"
        for block, digest in scheduler.block_pool.cache._digests.items():
            last = self.memory[(block + 1) * BLOCK_SIZE - 1]
            assert self.last_values[digest] == last, "a cached block holds something else"

    def run_to_end(self) -> int:
        """Steps until nothing is open, and answers sequences that wait for a hint. Returns the
        number of steps, at most the tokens that all of them may have: see the class.
        """
        max_num_steps = sum(sequence.max_length for sequence in self.open_sequences)
        num_steps = 0
        while self.open_sequences:
            for sequence in self.open_sequences:
                if sequence.must_await_hint:
                    self.hint(sequence, 0, 0)
            self.step()
            num_steps += 1
            if num_steps % 8 == 0:
                self.check()
            assert num_steps <= max_num_steps, "it does not end"
        return num_steps

    def _admit(self) -> None:
        before = list(self.scheduler.running)
        held = [len(sequence.block_table) for sequence in before]
        self._num_steps += 1
        self.opened += self.scheduler.admit()
        self._check_way(before, held)
        assert self.scheduler.running or not self.scheduler.waiting, "who waits, waits for ever"
        shares = len({s.cache_salt for s in self.open_sequences}) > 1
        for sequence in self.scheduler.running:
            if sequence not in before and sequence.is_preempted:
                known = [*before, sequence] if shares else self.scheduler.running
                lengths = {s.sequence_id: len(s.token_ids) for s in known}
                self._lengths_at_readmission[sequence.sequence_id] = lengths

    def _check_progress(self, running: list[Sequence], scheduled: list[ScheduledSequence]) -> None:
        """Asserts the class's conditions; `running`: the sequences that ran before the step."""
        if not running:
            return
        first = running[0]
        assert first.is_running, "the first was preempted"
        if not first.must_await_hint:
            assert any(
                item.sequence is first
                or (first.is_prefilling and item.sequence.cache_salt != first.cache_salt)
                for item in scheduled
            ), "the first stood still"
        self._check_first_prompt(running, scheduled)
        for sequence in running:
            lengths = self._lengths_at_readmission.get(sequence.sequence_id)
            if sequence.is_running or lengths is None:
                continue
            if len({each.cache_salt for each in self.open_sequences}) > 1:
                grown = sum(len(s.token_ids) - lengths.get(s.sequence_id, 0) for s in running)
                assert grown + MAX_DRAFTS >= self.growth_tokens, "preempted again for nothing"
                continue
            before = running[: running.index(sequence) + 1]
            if all(s.sequence_id in lengths for s in before):
                growth = max(len(s.token_ids) - lengths[s.sequence_id] for s in before)
                assert growth + MAX_DRAFTS >= self.growth_tokens, "preempted again for nothing"

    def _check_way(self, before: list[Sequence], held: list[int]) -> None:
        """Asserts what is said of sequences that make way; `before` ran and had so many blocks."""
        gone = [sequence for sequence in before if not sequence.is_running]
        if not gone:
            return
        [sequence] = gone
        assert sequence is not before[0], "the first made way"
        weights = {s.cache_salt: s.tenant_weight for s in self.open_sequences}
        share = sequence.tenant_weight / sum(weights.values())
        left = [s for s in before if s.cache_salt == sequence.cache_salt and s is not sequence]
        num_left_blocks = sum(held[before.index(s)] for s in left)
        assert (
            len(left) >= share * self.scheduler.max_num_seqs
            or num_left_blocks >= share * self.scheduler.block_pool.num_blocks
        ), "its tenant has less than its share"
        if self.made_way:
            assert self._num_steps - self.made_way[-1] >= STEPS_PER_WAY
        self.made_way.append(self._num_steps)

    def _check_first_prompt(
        self, running: list[Sequence], scheduled: list[ScheduledSequence]
    ) -> None:
        prompts = [s for s in running if s.is_running and s.is_prefilling]
        if not prompts or not self.scheduler.block_pool.num_available:
            return
        budget, num_tokens = self.scheduler.max_num_batched_tokens, dict.fromkeys(prompts, 0)
        for item in scheduled:
            if item.sequence in num_tokens:
                num_tokens[item.sequence] = item.num_new_tokens
            else:
                budget -= item.num_new_tokens + len(item.draft_token_ids)

        def has_half(prompt: Sequence) -> bool:
            return num_tokens[prompt] >= min(
                len(prompt.token_ids) - prompt.num_computed_tokens - prompt.steps_only_with_hint,
                prompt.longest_chunk(self.scheduler._max_scored_rows),
                -(-budget // 2),
            )

        firsts = {p.cache_salt: p for p in reversed(prompts) if p.priority == prompts[0].priority}
        assert any(map(has_half, firsts.values())), "no first prompt got its half"

    def _compute(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        start = sequence.num_computed_tokens
        token_ids = sequence.token_ids[start : start + item.num_new_tokens] + item.draft_token_ids
        value = self.memory[self._slots(sequence, start - 1, start)[0]] if start else 0
        slots = self._slots(sequence, start, start + len(token_ids))
        for slot, token_id in zip(slots, token_ids, strict=True):
            value = self.memory[slot] = fold(value, token_id)

    def _compute_states(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        if sequence.states is None:
            return
        start = sequence.num_computed_tokens
        end = start + item.num_new_tokens
        use = state_use(sequence.states, end)
        # After the tokens that the states have so far, and after each further one.
        values, length = [0], 0
        if start:
            slot = use.slot if use.source < 0 else use.source
            length, value, drafts = self.states[slot]
            if use.source >= 0:
                self._read_slots.add(slot)
                drafts = []
            assert 0 <= start - length <= len(drafts), "states of another length"
            values = [value, *drafts[: start - length]]
        assert values[-1] == [0, *values_of(sequence.token_ids[:start])][-1], "wrong states"
        for token_id in sequence.token_ids[start:end] + item.draft_token_ids:
            values.append(fold(values[-1], token_id))
        written = [use.slot, *(slot for _, slot in use.saves)]
        assert self._written_slots.isdisjoint(written), "two write to one slot"
        lengths = [saved for saved, _ in use.saves]
        assert lengths == sorted(set(lengths)), "states are saved twice"
        assert all(length < saved <= end for saved in lengths), "states that the step does not pass"
        self._written_slots.update(written)
        for saved, slot in use.saves:
            self.states[slot] = (saved, values[saved - length], [])
        self.states[use.slot] = (end, values[end - length], values[end - length + 1 :])

    def _commit(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        rows = sequence.scored_rows(item.num_new_tokens)
        sequence.num_computed_tokens += item.num_new_tokens
        if rows:
            self.scored[sequence.sequence_id] += rows
            sequence.rows_to_score = range(rows.stop, sequence.rows_to_score.stop)
        if sequence.scoring is not None:
            if not sequence.rows_to_score:
                self._remember(sequence)
                self.scheduler.finish(sequence)
            return
        if not item.is_sampled:
            assert not item.draft_token_ids
            return
        for draft_token_id in [*item.draft_token_ids, None]:
            token_id = hashed(sequence.token_ids)
            sequence.token_ids.append(token_id)
            self.reported[sequence.sequence_id].append(token_id)
            if token_id != draft_token_id:
                break
            sequence.num_computed_tokens += 1
        assert sequence.remaining >= 0
        sequence.draft_buffer.advance(sequence.token_ids)
        sequence.num_wanted_draft_tokens = max(0, sequence.remaining - 1)
        if sequence.remaining == 0:
            self._remember(sequence)
            self.scheduler.finish(sequence)

    def _slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        table = sequence.block_table
        return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]

    def _remember(self, sequence: Sequence) -> None:
        digests: list[bytes] = []
        num_full = len(sequence.token_ids) // BLOCK_SIZE
        extend_digests(
            digests,
            sequence.token_ids,
            num_full,
            block_size=BLOCK_SIZE,
            cache_salt=sequence.cache_salt,
        )
        values = values_of(sequence.token_ids)
        for i, digest in enumerate(digests):
            self.last_values[digest] = values[(i + 1) * BLOCK_SIZE - 1]


def some_prompt(draw: random.Random, longest: int) -> list[int]:
    """One of a few beginnings, then some tokens of its own, so that prefixes are shared."""
    beginning = [(draw.randrange(3) + i) % 3 for i in range(3)] * longest
    end = [draw.randrange(3) for _ in range(draw.randrange(4))]
    return (beginning[: draw.randint(1, longest)] + end)[-longest:]


def any_draft_wait(draw: random.Random) -> DraftWait:
    return draw.choice([DraftWait.NEVER, DraftWait.NEVER, DraftWait.ADAPTIVE, DraftWait.ALWAYS])
