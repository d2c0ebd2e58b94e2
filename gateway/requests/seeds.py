"""Seeds of the choices of one request.

Owns the mixing function, which is part of the contract: a client that repeats a seed repeats every
choice. Source of the finaliser: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, OOPSLA 2014; constants as in java.util.SplittableRandom).
"""

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def seed_of_choice(seed: int, choice_index: int) -> int:
    """The seed of one choice: the request's own for choice 0.

    Choice i > 0 gets the i-th output of SplitMix64 started at `seed`: a bijection of the seed for
    every i, and no two choices of a request share their noise.
    """
    if choice_index == 0:
        return seed
    mixed = (seed + choice_index * _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
