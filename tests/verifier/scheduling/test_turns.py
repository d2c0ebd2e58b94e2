"""Tenants take turns: who is served how much, who waits how long, and what texts do not show."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verifier.scheduling.scheduled_world import STEPS_PER_WAY, ScheduledWorld
from tests.verifier.sequences import make_sequence
from tests.volume import examples
from verifier.scheduling.sequence import Sequence
from verifier.scheduling.turns import Turns, place

LONGEST = 48  # tokens of a request, prompt and output


class Crowd:
    """Two tenants who always have requests waiting, and what each step computed for them."""

    def __init__(
        self, world: ScheduledWorld, weights: dict[str, int], sizes: dict[str, Iterator[int]]
    ) -> None:
        self.world = world
        self.weights = weights
        self.sizes = sizes
        # Differences of what was served by weight, after each step.
        self.leads = [0.0]
        self.served = dict.fromkeys(weights, 0)
        self.first_tokens: dict[str, list[int]] = {name: [] for name in weights}

    def step(self) -> None:
        scheduler = self.world.scheduler
        for name, weight in self.weights.items():
            # More than may start in a step.
            num_missing = scheduler.max_num_seqs + 1
            num_missing -= sum(each.cache_salt == name for each in scheduler.waiting)
            for _ in range(num_missing):
                size = next(self.sizes[name])
                self.world.open([size % 3] * 2, size, cache_salt=name, tenant_weight=weight)
        for item in self.world.step():
            sequence = item.sequence
            # Of a sequence that is computed again, once.
            end = sequence.num_computed_tokens
            num_new = max(0, end - max(sequence.num_tokens_before, end - item.num_new_tokens))
            self.served[sequence.cache_salt] += min(num_new, item.num_new_tokens)
        first, second = self.weights
        self.leads.append(
            self.served[first] / self.weights[first] - self.served[second] / self.weights[second]
        )


def endless(*sizes: int) -> Iterator[int]:
    return itertools.cycle(sizes)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("weights", "sizes"),
    [
        ((1, 1), ((40,), (2,))),
        ((1, 1), ((2, 40), (40, 2, 2))),
        ((2, 1), ((40,), (3,))),
        ((2, 1), ((3,), (40,))),
        ((1, 5), ((9,), (40, 1))),
    ],
)
def test_what_tenants_are_served_while_both_wait_differs_by_what_runs_at_a_time(
    max_num_seqs: int, weights: tuple[int, int], sizes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    world = ScheduledWorld(num_blocks=13 * max_num_seqs, max_num_seqs=max_num_seqs)
    names = ("a", "b")
    crowd = Crowd(
        world,
        dict(zip(names, weights, strict=True)),
        {name: endless(*each) for name, each in zip(names, sizes, strict=True)},
    )
    for _ in range(600):
        crowd.step()
    # Over any stretch: every step begins one, and every step ends one.
    widest = max(crowd.leads) - min(crowd.leads)
    assert widest <= 2 * max_num_seqs * LONGEST / min(weights)
    assert widest < max(crowd.served.values()) / 2, "too short a run to tell"


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    max_num_seqs=st.integers(1, 5),
    num_blocks=st.integers(13, 40),
    weights=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_any_two_tenants_are_served_by_their_weights_also_where_blocks_are_short(
    seed: int, max_num_seqs: int, num_blocks: int, weights: tuple[int, int]
) -> None:
    draw = random.Random(seed)
    longest = {name: draw.choice([3, 10, LONGEST - 2]) for name in "ab"}

    def sizes(name: str) -> Iterator[int]:
        while True:
            yield draw.randint(1, longest[name])

    world = ScheduledWorld(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    crowd = Crowd(world, dict(zip("ab", weights, strict=True)), {n: sizes(n) for n in "ab"})
    for _ in range(300):
        crowd.step()
    world.check()
    assert max(crowd.leads) - min(crowd.leads) <= 2 * max_num_seqs * LONGEST / min(weights)


def steps_until_first_token(world: ScheduledWorld, sequence: Sequence) -> int:
    for num_steps in itertools.count(1):
        world.step()
        if world.reported[sequence.sequence_id]:
            return num_steps
    raise AssertionError


@pytest.mark.parametrize("num_blocks", [4000, 300], ids=["places", "blocks"])
def test_a_newcomer_waits_for_none_of_the_long_requests_that_hold_all(num_blocks: int) -> None:
    world = ScheduledWorld(num_blocks=num_blocks, max_num_seqs=4)
    for i in range(64):
        world.open([i % 3] * 5, 290, cache_salt="a")
    # They hold all places; or all blocks, when they have grown.
    for _ in range(40 if num_blocks == 4000 else 280):
        world.step()
    for _ in range(3):
        newcomer = world.open([1] * 4, 8, cache_salt="b")
        assert steps_until_first_token(world, newcomer) <= STEPS_PER_WAY + 2
        while newcomer.remaining:
            world.step()
        world.check()
    ends = [s.sequence_id for s in world.open_sequences if s.cache_salt == "a"]
    assert len(ends) >= 60, "they were done anyway"


def admitted(sequences: list[Sequence]) -> str:
    return "".join(sequence.cache_salt for sequence in sequences)


def test_who_did_not_wait_has_saved_nothing_up() -> None:
    world = ScheduledWorld(num_blocks=100, max_num_seqs=2)
    for _ in range(30):
        world.open([1] * 4, 20, cache_salt="a")
    world.open([1] * 4, 200, cache_salt="b")
    for _ in range(150):
        world.step()
    num_before = len(world.opened)
    for _ in range(20):
        world.open([1] * 4, 8, cache_salt="b")
    while len(world.opened) < num_before + 12:
        world.step()
    assert admitted(world.opened[num_before:]).count("a") >= 2


def test_tenants_without_sequences_are_forgotten() -> None:
    world = ScheduledWorld(num_blocks=100, max_num_seqs=2)
    for i in range(3000):
        world.open([0], 1, cache_salt=f"{i}")
        if i % 2:
            world.step()
    world.run_to_end()
    assert not world.scheduler._turns._tenants


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_line_is_in_order_of_priority_of_what_tenants_were_served_and_of_arrival(
    seed: int,
) -> None:
    draw = random.Random(seed)
    turns = Turns()
    names = "abcd"[: draw.randint(1, 4)]
    num_arrivals = itertools.count(1)

    def open_one() -> Sequence:
        sequence = make_sequence(
            draw.randint(1, 5),
            cache_salt=draw.choice(names),
            priority=draw.randint(-1, 1),
            tenant_weight=draw.randint(1, 3),
        )
        sequence.arrival = next(num_arrivals)
        turns.wait(sequence)
        return sequence

    running = []
    for _ in range(draw.randint(0, 6)):
        sequence = open_one()
        turns.start(sequence)
        turns.charge(sequence, draw.randint(0, 300))
        running.append(sequence)
    waiting = [open_one() for _ in range(draw.randint(1, 12))]

    def due(sequence: Sequence) -> float:
        return turns._tenants[sequence.cache_salt].num_due_tokens

    line = turns.line()
    while waiting:
        expected = min(waiting, key=lambda s: (-s.priority, due(s), s.arrival))
        assert line.first() is expected
        waiting.remove(expected)
        has_started = draw.random() < 0.5
        if has_started:
            turns.start(expected)
            running.append(expected)
        line.go_on(has_started=has_started)
    assert line.first() is None
    turns.check_integrity(sorted(running, key=place))
