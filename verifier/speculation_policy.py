"""How many drafts a sequence verifies in a step: the one place for K.

Now: as many as the hint holds, up to the sequence's limit and the room it has left. A cost model
of the step and recent acceptance will join in here.
"""

STEPS_AHEAD = 4
USELESS_HINTS_BEFORE_PROBING = 6
PROBE_PERIOD_TOKENS = 16


def num_drafts_to_verify(*, num_speculative_tokens: int, remaining: int) -> int:
    """Most drafts of one step, if the hint holds as many.

    Args:
        num_speculative_tokens: most drafts per step for this sequence.
        remaining: output tokens still allowed; a draft needs room for itself and one more.
    """
    return max(0, min(num_speculative_tokens, remaining - 1))


def num_drafts_wanted(
    *, num_speculative_tokens: int, remaining: int, length: int, num_useless_hints: int
) -> int:
    """How long a hint is useful for the next step. 0: send none.

    A few steps' worth, so that after a fully accepted step the next draft is already here. After
    many useless hints in a row, one is only asked for every so often: on text that does not
    repeat, exchanging hints would cost more than it should.

    Args:
        num_speculative_tokens, remaining: as above.
        length: of the sequence now.
        num_useless_hints: the last hints in a row that were empty or wrong from the start.
    """
    if num_useless_hints >= USELESS_HINTS_BEFORE_PROBING and length % PROBE_PERIOD_TOKENS:
        return 0
    return max(0, min(num_speculative_tokens * STEPS_AHEAD, remaining - 1))
