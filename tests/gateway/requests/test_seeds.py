"""Seeds of choices: part of the contract, so their values are fixed."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.requests.seeds import seed_of_choice

# The first outputs of SplitMix64 seeded with 0, as in its authors' reference implementation.
SPLITMIX64_OF_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)


def test_the_first_choice_has_the_requests_seed() -> None:
    assert seed_of_choice(1234, 0) == 1234


def test_the_other_choices_have_the_outputs_of_splitmix64() -> None:
    assert tuple(seed_of_choice(0, index) for index in (1, 2, 3)) == SPLITMIX64_OF_0


@given(seed=st.integers(0, 2**64 - 1))
def test_no_two_choices_share_a_seed(seed: int) -> None:
    seeds = [seed_of_choice(seed, index) for index in range(16)]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
