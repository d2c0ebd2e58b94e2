"""Seeds of the choices of one request: what lets a client resume one choice alone.

Owns the client's copy of the mixing function, which is part of the contract (`GenerateRequest.n` in
gateway.proto); a test compares it with the gateway's. Source of the finaliser: SplitMix64 (Steele,
Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def seed_of_choice(seed: int, choice_index: int) -> int:
    """The seed of one choice: the request's own for choice 0, else SplitMix64's i-th output."""
    if choice_index == 0:
        return seed
    mixed = (seed + choice_index * _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
