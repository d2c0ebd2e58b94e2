"""Slots of recurrent states: which sequences and snapshots have them, and how much of a cached
prefix is of use.
"""

import random

import pytest

from tests.scripted_model import continue_by, hashed
from tests.verifier.scheduling.scheduled_world import ScheduledWorld, any_draft_wait, some_prompt
from tests.volume import cases

TEXT = random.Random(1).choices(range(3), k=80)


def run(world: ScheduledWorld, token_ids: list[int], num_output_tokens: int = 1) -> int:
    """How many tokens of a prompt are cached when it is opened now; it runs to its end."""
    sequence = world.open(token_ids, num_output_tokens)
    world.run_to_end()
    return sequence.num_cached_tokens


@pytest.mark.parametrize("num_extra_slots", [0, 1, 2, 6])
@pytest.mark.parametrize("seed", range(cases(6, 60)))
def test_any_mix_of_sequences_is_computed_right(seed: int, num_extra_slots: int) -> None:
    draw = random.Random(seed)
    max_num_seqs = draw.randint(1, 4)
    world = ScheduledWorld(
        num_blocks=draw.randint(6, 40),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw.randint(0, 16),
        num_state_slots=max_num_seqs + num_extra_slots,
    )
    prompts: dict[str, list[int]] = {}
    for _ in range(60):
        for _ in range(draw.choice([0, 0, 1, 3])):
            prompt = some_prompt(draw, min(40, world.longest - 1))
            most = min(12, world.longest - len(prompt))
            sequence = world.open(
                prompt,
                draw.randint(1, most),
                draft_wait=any_draft_wait(draw),
                priority=draw.choice([0, 0, 1]),
            )
            prompts[sequence.sequence_id] = prompt
        for sequence in world.open_sequences:
            if draw.random() < 0.5:
                world.hint(sequence, draw.randint(0, 7), draw.randint(0, 2))
        if world.open_sequences and draw.random() < 0.1:
            world.scheduler.finish(gone := draw.choice(world.open_sequences))
            del prompts[gone.sequence_id]
        world.step()
        world.check()
    world.run_to_end()
    world.check()
    for sequence_id, prompt in prompts.items():
        output = world.reported[sequence_id]
        assert output == continue_by(hashed, prompt, len(output))


class TestSnapshots:
    def test_a_prompt_is_found_up_to_its_last_whole_block(self) -> None:
        world = ScheduledWorld(num_blocks=30, num_state_slots=8)
        assert run(world, TEXT[:26]) == 0
        assert run(world, TEXT[:26]) == 24
        # No snapshot lies in it, though its K/V is cached.
        assert run(world, TEXT[:14]) == 0
        assert run(world, TEXT[:14]) == 12
        assert run(world, TEXT[:40]) == 24

    def test_texts_that_part_are_found_up_to_there_from_the_third_on(self) -> None:
        world = ScheduledWorld(num_blocks=60, num_state_slots=12)
        ends = [[i] * 9 for i in range(3)]
        assert [run(world, TEXT[:22] + end) for end in ends] == [0, 0, 20]

    def test_texts_that_come_together_compute_what_they_share_once(self) -> None:
        world = ScheduledWorld(num_blocks=60, num_state_slots=12, max_num_batched_tokens=8)
        sequences = [world.open(TEXT[:22] + [i] * 9, 1) for i in range(3)]
        world.run_to_end()
        assert [sequence.num_cached_tokens for sequence in sequences] == [0, 20, 20]

    @pytest.mark.parametrize("num_output_tokens", [1, 3, 4, 10, 12])
    def test_a_chat_goes_on_behind_its_last_answer(self, num_output_tokens: int) -> None:
        """The last token of an answer is decided, and not computed."""
        world = ScheduledWorld(num_blocks=60, num_state_slots=8)
        run(world, TEXT[:21], num_output_tokens)
        answer = continue_by(hashed, TEXT[:21], num_output_tokens)
        next_turn = [*TEXT[:21], *answer, 1, 2]
        num_computed = 21 + num_output_tokens - 1
        assert run(world, next_turn) == num_computed // 4 * 4
        # Another answer is found up to the prompt.
        assert run(world, [*TEXT[:21], 3, 3, 3, 3, 3]) == 20

    def test_one_snapshot_follows_an_answer(self) -> None:
        world = ScheduledWorld(num_blocks=60, max_num_seqs=2, num_state_slots=12)
        for i in range(2):
            world.open(TEXT[i:][:21], 30)
        states = world.scheduler._running.states
        assert states is not None
        most = 0
        while world.open_sequences:
            world.step()
            world.check()
            most = max(most, states.num_snapshots)
        # And one keeps each prompt.
        assert most == states.num_snapshots == 4

    def test_a_snapshot_that_others_begin_with_follows_no_longer(self) -> None:
        world = ScheduledWorld(num_blocks=60, max_num_seqs=2, num_state_slots=12)
        first = world.open(TEXT[:21], 30)
        while len(first.token_ids) < 32:
            world.step()
        # The step that it begins in completes a block of the first one.
        second = world.open([*first.token_ids[:28], 1, 1], 5)
        world.step()
        assert (first.num_computed_tokens, second.num_cached_tokens) == (32, 28)
        while world.open_sequences:
            world.step()
            world.check()
        for sequence, prompt in ((first, TEXT[:21]), (second, [*first.token_ids[:28], 1, 1])):
            output = world.reported[sequence.sequence_id]
            assert output == continue_by(hashed, prompt, len(output))

    @pytest.mark.parametrize("num_drafts", [1, 3, 4, 7])
    def test_it_follows_accepted_drafts(self, num_drafts: int) -> None:
        """Over several blocks at once, too; those that the last step's drafts complete are
        computed again.
        """
        world = ScheduledWorld(num_blocks=60, num_state_slots=8)
        sequence = world.open(TEXT[:21], 20)
        while world.open_sequences:
            world.hint(sequence, num_drafts, 0)
            world.step()
            world.check()
        answer = world.reported[sequence.sequence_id]
        found = run(world, [*TEXT[:21], *answer, 1])
        assert 40 - num_drafts - 4 < found <= 40
        assert found % 4 == 0

    def test_the_least_recently_used_goes(self) -> None:
        world = ScheduledWorld(num_blocks=60, max_num_seqs=1, num_state_slots=3)
        texts = [[i] * 5 for i in range(3)]
        for text in (texts[0], texts[1], texts[0], texts[2]):
            run(world, text)
        # One slot runs, two keep: of the first and of the third text.
        assert [run(world, text) for text in (texts[0], texts[2], texts[1])] == [4, 4, 0]

    def test_running_sequences_come_first(self) -> None:
        world = ScheduledWorld(num_blocks=60, max_num_seqs=2, num_state_slots=2)
        run(world, TEXT[:9])
        first, second = world.open(TEXT[:9], 9), world.open(TEXT[20:29], 9)
        # The only slot left is the snapshot's that the first one begins with.
        for expected in ([first], [first, second]):
            world.step()
            assert world.scheduler.running == expected
        assert first.num_cached_tokens == 8
        world.check()
        world.run_to_end()

    def test_a_preempted_sequence_goes_on_from_its_last_whole_block(self) -> None:
        world = ScheduledWorld(num_blocks=20, max_num_seqs=3, num_state_slots=9)
        sequence = world.open(TEXT[:9], 20)
        while len(sequence.token_ids) < 20:
            world.step()
        world.scheduler._running.preempt(sequence)
        world.step()
        assert sequence.states is not None
        assert sequence.states.length == 16
        world.run_to_end()
        assert world.reported[sequence.sequence_id] == continue_by(hashed, TEXT[:9], 20)

    def test_without_a_prefix_cache_there_are_none(self) -> None:
        world = ScheduledWorld(num_blocks=30, num_state_slots=8, has_prefix_cache=False)
        assert [run(world, TEXT[:26]) for _ in range(2)] == [0, 0]
        states = world.scheduler._running.states
        assert states is not None
        assert states.num_snapshots == 0

    def test_a_step_that_was_formed_in_vain_saves_later_what_it_would_have(self) -> None:
        """As after a fault of another sequence."""
        world = ScheduledWorld(num_blocks=30, num_state_slots=8, max_num_batched_tokens=30)
        sequence = world.open(TEXT[:26], 1)
        world.scheduler.admit()
        world.scheduler.max_num_batched_tokens = 25
        world.scheduler.schedule()
        other = world.open(TEXT[30:56], 1)
        world.scheduler.admit()
        world.scheduler.max_num_batched_tokens = 60
        assert any(item.sequence is other for item in world.scheduler.schedule())
        world.scheduler.finish(other)
        world.check()
        world.scheduler.max_num_batched_tokens = 7
        while sequence.is_running:
            world.step()
            world.check()
        assert run(world, TEXT[:26]) == 24
