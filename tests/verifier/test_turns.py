"""Tenants take turns: who is served how much, who waits how long, and what texts do not show."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted_model import continue_by, hashed
from tests.verifier.scheduled_world import STEPS_PER_WAY, ScheduledWorld
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


@pytest.mark.parametrize("weight", [1, 4])
def test_a_newcomers_long_prompt_waits_for_none_of_those_that_are_computed(weight: int) -> None:
    world = ScheduledWorld(num_blocks=4000, max_num_seqs=16, max_num_batched_tokens=16)
    for i in range(8):
        world.open([i % 3] * 399 + [i % 2], 8, cache_salt="a")
    world.step()
    for _ in range(3):
        newcomer = world.open([1] * 80, 4, cache_salt="b", tenant_weight=weight)
        # Its own 80 tokens, and as many of others' for its weight, beside what it begins with.
        assert steps_until_first_token(world, newcomer) <= (80 + 80 / weight + 64) / 16 + 2
        while newcomer.remaining:
            world.step()
    assert sum(s.is_prefilling for s in world.open_sequences) >= 6, "they were done anyway"
    world.run_to_end()


def test_texts_do_not_show_who_made_way() -> None:
    draw = random.Random(7)
    world = ScheduledWorld(num_blocks=80, max_num_seqs=4, has_prefix_cache=False)
    opened: list[tuple[Sequence, list[int]]] = []

    def open_one(name: str, num_output_tokens: int) -> None:
        prompt = [draw.randrange(3) for _ in range(draw.randint(1, 20))]
        opened.append((world.open(prompt, num_output_tokens, cache_salt=name), prompt))

    for _ in range(12):
        open_one("a", 60)
    for step in range(300):
        if step % 20 == 0:
            open_one("b", 5)
        world.step()
        world.check()
    world.run_to_end()
    assert len(world.made_way) > 5
    for sequence, prompt in opened:
        output = world.reported[sequence.sequence_id]
        assert output == continue_by(hashed, prompt, len(output))
        assert not sequence.remaining


def test_nobody_makes_way_where_each_tenant_has_its_share() -> None:
    world = ScheduledWorld(num_blocks=400, max_num_seqs=4)
    for name in "abab" * 4:
        world.open([1] * 4, 50, cache_salt=name)
    world.run_to_end()
    assert not world.made_way


def test_nobody_makes_way_for_a_lower_priority() -> None:
    world = ScheduledWorld(num_blocks=400, max_num_seqs=2)
    for _ in range(2):
        world.open([1] * 4, 50, cache_salt="a", priority=1)
    world.step()
    newcomer = world.open([1] * 4, 2, cache_salt="b")
    assert steps_until_first_token(world, newcomer) >= 49
    assert not world.made_way


def admitted(sequences: list[Sequence]) -> str:
    return "".join(sequence.cache_salt for sequence in sequences)


def test_a_higher_priority_is_first_whosever_turn_it_is() -> None:
    world = ScheduledWorld(num_blocks=100, max_num_seqs=1)
    for name, priority in (("a", 0), ("a", 1), ("b", 0), ("a", 1), ("b", 0), ("a", 0)):
        world.open([1] * 4, 8, cache_salt=name, priority=priority)
    world.run_to_end()
    assert admitted(world.opened) == "aabbaa"


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


def test_who_was_served_more_and_went_away_pays_it_back() -> None:
    world = ScheduledWorld(num_blocks=100, max_num_seqs=1)
    world.open([0] * 4, 10, cache_salt="a")
    for _ in range(2):
        world.open([0] * 4, 1, cache_salt="a")
    world.step()
    # It is its turn once, and it takes a long one.
    world.open([0] * 4, 150, cache_salt="b")
    while len(world.opened) < 2 or world.opened[-1].remaining:
        world.step()
    for _ in range(30):
        world.open([0] * 4, 2, cache_salt="a")
    world.open([0] * 4, 2, cache_salt="b")
    world.run_to_end()
    assert admitted(world.opened)[:2] == "ab"
    assert "b" not in admitted(world.opened)[2:12]


def test_with_one_tenant_the_order_is_priority_and_arrival() -> None:
    orders = []
    for salt, weight in (("", 1), ("6:tenant/", 7)):
        draw = random.Random(3)
        world = ScheduledWorld(num_blocks=12, max_num_seqs=3)
        opened = []
        for _ in range(20):
            opened.append(
                world.open(
                    [draw.randrange(3)] * draw.randint(1, 9),
                    draw.randint(1, 30),
                    priority=draw.randint(0, 1),
                    cache_salt=salt,
                    tenant_weight=weight,
                )
            )
            world.step()
        world.run_to_end()
        orders.append([opened.index(sequence) for sequence in world.opened])
        assert world.scheduler.counts.num_preemptions > 0
        assert not world.made_way
    assert orders[0] == orders[1]


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
