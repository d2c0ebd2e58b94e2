"""The scheduler under random events, checked after each: a Hypothesis state machine."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scripted_model import continue_by, hashed
from tests.verifier.scheduling.scheduled_world import ScheduledWorld, any_draft_wait, some_prompt
from tests.volume import examples
from verifier.scheduling.sequence import Sequence

seeds = st.integers(0, 2**32 - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """Opens (some only scored), right and wrong hints, steps, cancels, and the preemptions of a
    tiny pool. `ScheduledWorld` asserts in every step that no sequence waits for ever.
    """

    @initialize(
        num_blocks=st.integers(3, 14),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 20),
        has_prefix_cache=st.sampled_from([True, True, True, False]),
        max_scored_rows=st.sampled_from([1, 3, 256]),
        growth_tokens=st.sampled_from([0, 8, 16, 64]),
        # Of recurrent states, beyond those of running sequences. None: there are no states.
        extra_slots=st.sampled_from([None, 0, 1, 3, 9]),
    )
    def begin(
        self,
        num_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        has_prefix_cache: bool,
        max_scored_rows: int,
        growth_tokens: int,
        extra_slots: int | None,
    ) -> None:
        self.world = ScheduledWorld(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            has_prefix_cache=has_prefix_cache,
            max_scored_rows=max_scored_rows,
            growth_tokens=growth_tokens,
            num_state_slots=0 if extra_slots is None else max_num_seqs + extra_slots,
        )
        self.prompts: dict[str, list[int]] = {}
        self.rows_to_score: dict[str, list[int]] = {}
        self.cancelled: set[str] = set()

    @rule(seed=seeds, priority=st.integers(-1, 1), salt=st.sampled_from(["", "", "a", "b"]))
    def open(self, seed: int, priority: int, salt: str) -> None:
        draw = random.Random(seed)
        prompt = some_prompt(draw, self.world.longest - 1)
        most = self.world.longest - len(prompt)
        num_rows = draw.choice([0, 0, 0, 0, 1, len(prompt) - 1])
        sequence = self.world.open(
            prompt,
            draw.choice([draw.randint(1, min(24, most)), most]),
            draft_wait=any_draft_wait(draw),
            priority=priority,
            cache_salt=salt,
            tenant_weight=2 if salt == "b" else 1,
            rows_to_score=range(num_rows),
        )
        self.prompts[sequence.sequence_id] = prompt
        self.rows_to_score[sequence.sequence_id] = list(range(num_rows))

    @rule(seed=seeds, priority=st.integers(-1, 1), salt=st.sampled_from(["", "", "a", "b"]))
    def score(self, seed: int, priority: int, salt: str) -> None:
        draw = random.Random(seed)
        token_ids = some_prompt(draw, self.world.longest)
        sequence = self.world.open_scored(
            token_ids,
            draw.randrange(min(12, len(token_ids))),
            priority=priority,
            cache_salt=salt,
            tenant_weight=2 if salt == "b" else 1,
        )
        self.prompts[sequence.sequence_id] = token_ids
        self.rows_to_score[sequence.sequence_id] = list(sequence.rows_to_score)

    @precondition(lambda self: self.world.open_sequences)
    @rule(seed=seeds, num_right=st.integers(0, 9), num_wrong=st.integers(0, 3))
    def hint(self, seed: int, num_right: int, num_wrong: int) -> None:
        sequence = random.Random(seed).choice(self.world.open_sequences)
        self.world.hint(sequence, num_right, num_wrong)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()
            self.world.scheduler.check_integrity()

    @precondition(lambda self: self.world.open_sequences)
    @rule(seed=seeds)
    def cancel(self, seed: int) -> None:
        sequence = random.Random(seed).choice(self.world.open_sequences)
        self.world.scheduler.finish(sequence)
        self.cancelled.add(sequence.sequence_id)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Every sequence ends, with the text of an undisturbed run, and its rows scored once."""
        if not hasattr(self, "world"):
            return
        self.world.run_to_end()
        for sequence_id, output in self.world.reported.items():
            prompt = self.prompts[sequence_id]
            assert output == continue_by(hashed, prompt, len(output))
        for sequence_id in self.prompts.keys() - self.cancelled:
            assert self.world.scored[sequence_id] == self.rows_to_score[sequence_id]
        assert len({s.sequence_id for s in self.world.opened}) == len(self.world.opened)
        assert self.world.scheduler.block_pool.num_used == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestScheduler = SchedulerMachine.TestCase


def stepped(world: ScheduledWorld, num_steps: int) -> list[list[str]]:
    """The sequences that took part in each step."""
    return [[item.sequence.sequence_id for item in world.step()] for _ in range(num_steps)]


def outputs(world: ScheduledWorld, sequences: list[Sequence]) -> list[list[int]]:
    return [world.reported[sequence.sequence_id] for sequence in sequences]


class TestPreemption:
    def test_the_latest_is_preempted_keeps_its_tokens_and_repeats_no_event(self) -> None:
        world = ScheduledWorld(num_blocks=8, max_num_seqs=3)
        first = world.open([0] * 9, 20)
        second = world.open([1] * 9, 20)
        while not second.is_preempted:
            world.step()
            world.check()
        assert not first.is_preempted
        assert world.scheduler.waiting == [second]
        assert second.token_ids == [1] * 9 + world.reported[second.sequence_id]
        assert len(second.token_ids) > 10, "it had not even begun"
        world.run_to_end()
        assert outputs(world, [first, second]) == [
            continue_by(hashed, [0] * 9, 20),
            continue_by(hashed, [1] * 9, 20),
        ]
        assert world.opened == [first, second], "opened again after preemption"
        assert world.scheduler.counts.num_preemptions > 0

    def test_a_preempted_one_is_before_all_later_ones_of_its_priority(self) -> None:
        world = ScheduledWorld(num_blocks=8, max_num_seqs=3)
        world.open([0] * 9, 20)
        second = world.open([1] * 9, 20)
        while second.is_running or not second.token_ids[9:]:
            world.step()
            if second.is_running and len(world.scheduler.waiting) < 2:
                late = world.open([2] * 30, 1)
                urgent = world.open([2] * 31, 1, priority=1)
        assert world.scheduler.waiting[-1] is not second
        order = world.scheduler.waiting
        assert order.index(urgent) < order.index(second) < order.index(late)

    def test_idle_blocks_are_evicted_before_drafts_are_cut_before_sequences_are_preempted(
        self,
    ) -> None:
        world = ScheduledWorld(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=32)
        world.open([2] * 12, 1)
        world.step()
        cache = world.scheduler.block_pool.cache
        assert cache.num_idle == 3
        first = world.open([0] * 13, 15)
        second = world.open([1] * 13, 15)
        world.step()  # 4 blocks each: all there are
        assert cache.num_idle == 0, "what nobody holds was not evicted"
        assert world.scheduler.counts.num_preemptions == 0
        for sequence in (first, second):
            world.hint(sequence, 9, 0)
        scheduled = world.scheduler.schedule()
        assert [len(item.draft_token_ids) for item in scheduled] == [2, 2], "cut to their blocks"
        assert world.scheduler.counts.num_preemptions == 0

    def test_it_is_readmitted_only_when_there_is_room_for_all_of_it(self) -> None:
        world = ScheduledWorld(
            num_blocks=14, max_num_seqs=2, max_num_batched_tokens=8, has_prefix_cache=False
        )
        first = world.open([0] * 9, 46)
        second = world.open([1] * 21, 30)
        world.run_to_end()
        assert not first.is_preempted
        assert second.is_preempted
        assert world.scheduler.counts.num_preemptions == 1, "computed again for nothing"


class TestFairness:
    def test_every_decode_is_in_every_step_under_a_stream_of_long_prompts(self) -> None:
        world = ScheduledWorld(num_blocks=400, max_num_seqs=6, max_num_batched_tokens=16)
        decodes = [world.open([i], 60) for i in range(3)]
        world.step()
        ids = [s.sequence_id for s in decodes]
        prompts: list[Sequence] = []
        for i in range(55):
            if len(world.scheduler.waiting) < 2:
                prompts.append(world.open([i % 3, *([2] * 99)], 2, rows_to_score=range(1)))
            [step] = stepped(world, 1)
            assert step[:3] == ids, "a decode sat out"
        assert [len(o) for o in outputs(world, decodes)] == [56] * 3, "one token per step"
        ended = [p for p in prompts if p.remaining == 0]
        assert len(ended) >= 5, "the prompts did not get on"

    def test_a_long_prompt_progresses_whatever_is_drafted(self) -> None:
        world = ScheduledWorld(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=12)
        decodes = [world.open([i], 200) for i in range(3)]
        world.step()
        prompt = world.open([2] * 80, 4)
        num_steps = 0
        while not world.reported[prompt.sequence_id]:
            for sequence in decodes:
                world.hint(sequence, 7, 0)
            world.step()
            num_steps += 1
        assert num_steps <= 80 / ((12 - 3) / 2) + 2

    def test_long_prompts_end_under_a_stream_of_short_ones_which_wait_for_none(self) -> None:
        world = ScheduledWorld(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=16)
        # Each is there twice: the second one waits until the first is computed.
        long = [world.open([i] * 128, 1) for i in range(3) for _ in range(2)]
        shorts: list[Sequence] = []
        num_steps = num_ended = 0
        while not world.reported[long[-1].sequence_id]:
            shorts.append(world.open([num_steps % 3, 0, 1, num_steps % 2], 1))
            world.step()
            assert world.reported[shorts[-1].sequence_id], "it waited"
            ended = [bool(world.reported[sequence.sequence_id]) for sequence in long]
            assert ended == sorted(ended, reverse=True)
            num_ended = sum(ended)
            num_steps += 1
        assert num_ended == 6
        assert num_steps <= 2 * (3 * 128 + 6) / 16 + 1, "they got less than half"
