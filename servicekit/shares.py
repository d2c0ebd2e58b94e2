"""How much of a room one of several parties may take.

What a party holds is at most `_MAX_SHARE` times its weight times what is free afterwards. So one
alone gets four fifths of the room, two greedy ones four ninths each, twice the weight twice as
much, and one that holds nothing always finds some.
The share is that of dynamic thresholds for shared buffers (Choudhury and Hahne, 1998): it needs no
list of parties and leaves little unused. Pure.
"""

_MAX_SHARE = 4


def leaves_room(*, held: int, added: int, num_free: int, weight: int = 1) -> bool:
    """Whether a party that holds so much may hold more; whether there is room at all is not asked.

    Args:
        num_free: of the whole room, before.
    """
    return held == 0 or held + added <= _MAX_SHARE * weight * (num_free - added)
