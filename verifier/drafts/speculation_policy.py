"""How many drafts a sequence verifies in a step: the one place for K.

As many as its hint holds and is trusted with and as could be accepted, up to the sequence's limit,
the room it has left and its share of the step's token budget. Trust follows how far the hint's
match reaches, and grows with what comes as the hint said; so a hint can hold more than one step's
worth, and a step whose drafts were all accepted leaves the next one its drafts, without any wait. K
does not go by what a step costs, nor by what was accepted lately: that only decides whether hints
are asked for.
"""

from collections.abc import Sequence as SequenceOf

STEPS_AHEAD = 4
USELESS_HINTS_BEFORE_PROBING = 6
PROBE_PERIOD_TOKENS = 16


def num_drafts_to_verify(
    *, num_speculative_tokens: int, remaining: int, budget: int, num_sharing: int
) -> int:
    """Most drafts of one step, if the hint holds as many.

    Args:
        num_speculative_tokens: most drafts per step for this sequence.
        remaining: output tokens still allowed; a draft needs room for itself and one more.
        budget: tokens left for drafts in this step.
        num_sharing: sequences with drafts that are still to get theirs of it, this one included.
            What one does not use of its share goes to those after it.
    """
    share = -(-budget // num_sharing)
    return max(0, min(num_speculative_tokens, remaining - 1, share))


def num_drafts_trusted(*, tokens_per_match: int, reach: int) -> int | None:
    """Most drafts that a hint is trusted with; None: with all that it holds.

    Args:
        tokens_per_match: drafts per token of the reach; 0 for no such limit.
        reach: how many tokens before the draft's first are known to match, 0 if nobody said.
    """
    return tokens_per_match * max(1, reach) if tokens_per_match else None


def num_drafts_possible(
    draft_token_ids: SequenceOf[int],
    *,
    stop_token_ids: frozenset[int],
    num_output_tokens: int,
    min_new_tokens: int,
) -> int:
    """How many drafts, from the first on, could be accepted whatever the model says.

    Nothing behind a stop token is ever used. A stop token itself may stand, unless it would be
    among the first `min_new_tokens`, where it is masked. No other token is known to be out of the
    question beforehand: biases and penalties are finite, and what top-k, top-p and min-p cut off
    is up to the logits.

    Args:
        num_output_tokens: of the sequence, before the drafts.
    """
    if stop_token_ids.isdisjoint(draft_token_ids):
        return len(draft_token_ids)
    first = next(i for i, token_id in enumerate(draft_token_ids) if token_id in stop_token_ids)
    return first if num_output_tokens + first < min_new_tokens else first + 1


def num_drafts_wanted(
    *, num_speculative_tokens: int, remaining: int, length: int, num_useless_hints: int
) -> int:
    """How long a hint is useful for the next step. 0: send none.

    A few steps' worth, so that after a fully accepted step the next draft is already here. After
    many useless hints in a row, one is only asked for every so often: on text that does not
    repeat, exchanging hints would cost more than it should.

    Args:
        num_speculative_tokens, remaining: as in `num_drafts_to_verify`.
        length: of the sequence now.
        num_useless_hints: the last hints in a row that were empty or wrong from the start.
    """
    if num_useless_hints >= USELESS_HINTS_BEFORE_PROBING and length % PROBE_PERIOD_TOKENS:
        return 0
    return max(0, min(num_speculative_tokens * STEPS_AHEAD, remaining - 1))
