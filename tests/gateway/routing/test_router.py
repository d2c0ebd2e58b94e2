"""Equal keys go together, no verifier is overloaded, and few keys move."""

import collections

from gateway.routing.drafters import Drafters
from gateway.routing.router import (
    LOAD_FACTOR,
    PREFIX_TOKENS,
    affinity_of,
    best,
    choose_drafter,
    choose_verifier,
)

NAMES = [f"verifier-{index}:50052" for index in range(5)]


IDLE = dict.fromkeys(NAMES, 0)


def test_prompts_with_one_beginning_go_to_one_verifier() -> None:
    beginning = list(range(PREFIX_TOKENS))
    chosen = {choose_verifier(affinity_of("", [*beginning, end]), IDLE, 1) for end in range(20)}
    assert len(chosen) == 1


def test_the_clients_key_overrides_the_prompt() -> None:
    chosen = {choose_verifier(affinity_of("session-7", [end]), IDLE, 1) for end in range(20)}
    assert len(chosen) == 1
    assert affinity_of("a", [1]) != affinity_of("b", [1])


def test_keys_spread_over_all_verifiers() -> None:
    counts = collections.Counter(
        choose_verifier(affinity_of(f"key {index}", []), IDLE, 1) for index in range(1000)
    )
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 2 * min(counts.values())


def test_when_one_goes_only_its_own_keys_move() -> None:
    for index in range(200):
        key = f"key {index}".encode()
        chosen, without_first = best(key, NAMES), best(key, NAMES[1:])
        assert chosen in (NAMES[0], without_first)


def test_loads_stay_near_the_mean_even_if_all_keys_are_equal() -> None:
    load = dict.fromkeys(NAMES, 0)
    for _ in range(100):
        load[choose_verifier(b"one key", load, 1)] += 1
    assert max(load.values()) <= LOAD_FACTOR * 100 / len(NAMES) + 1
    assert sum(load.values()) == 100


def test_verifiers_spread_over_drafters() -> None:
    drafters = [f"10.0.0.{index}:50051" for index in range(4)]
    verifiers = [f"10.0.1.{index}:50052" for index in range(200)]
    counts = collections.Counter(choose_drafter(each, drafters) for each in verifiers)
    assert set(counts) == set(drafters)
    assert max(counts.values()) < 2 * min(counts.values())
    assert choose_drafter(verifiers[0], []) == ""


def test_a_drafter_on_the_verifiers_host_is_preferred() -> None:
    drafters = [f"10.0.0.{index}:50051" for index in range(4)]
    for drafter in drafters:
        verifier = drafter.replace("50051", "50052")
        assert choose_drafter(verifier, drafters) == drafter
    near = "[fd00::1]:50051"
    assert choose_drafter("[fd00::1]:50052", [*drafters, near]) == near


def test_the_choice_follows_the_drafters_that_there_are() -> None:
    one, near = "10.0.0.1:50051", "10.0.0.2:50051"
    drafters = Drafters()
    chosen = []
    for addresses in ([], [one], [one, near], [one], []):
        drafters.set_addresses(addresses)
        chosen.append(drafters.choose("10.0.0.2:50052"))
    assert chosen == ["", one, near, one, ""]
