"""The limits of K, how many drafts a sequence verifies in a step; and whether to ask for a hint.

K is at most: the drafts that the buffered hint holds, the number that the hint's match length
justifies, the drafts before one that can never be accepted, the sequence's limit, its remaining
output, and the step's token budget. The match length grows with every token that comes as the hint
predicted. So a hint can cover several steps, and a step that accepts all its drafts leaves drafts
for the next one without a wait. Within these limits `depth_policy.py` chooses by cost and gain.
"""

from collections.abc import Sequence as SequenceOf

STEPS_AHEAD = 4
USELESS_HINTS_BEFORE_PROBING = 6
DECLINED_STEPS_BEFORE_PROBING = 24
# Tokens between two requests for a sequence whose hints are of no use: at first, and at most.
PROBE_PERIOD_TOKENS = 16
LONGEST_PROBE_PERIOD_TOKENS = 64
# From so many useless hints in a row on, the period is the longest.
MOST_USELESS_HINTS = USELESS_HINTS_BEFORE_PROBING + 4


def num_drafts_to_verify(
    *, num_speculative_tokens: int, remaining: int, budget: int, num_sharing: int
) -> int:
    """The largest K that the limits allow.

    Args:
        num_speculative_tokens: the sequence's limit per step.
        remaining: output tokens still allowed; a draft needs room for itself and one more.
        budget: tokens left for drafts in this step.
        num_sharing: sequences that still share the budget, this one included. Later ones share
            whatever earlier ones leave.
    """
    share = -(-budget // num_sharing)
    return max(0, min(num_speculative_tokens, remaining - 1, share))


def num_drafts_trusted(*, tokens_per_match: int, match_length: int) -> int | None:
    """The largest K that a hint's match justifies; None: no limit.

    Args:
        tokens_per_match: drafts per matching token; 0 for no limit.
        match_length: tokens before the first draft that are known to match; 0 if unknown.
    """
    return tokens_per_match * max(1, match_length) if tokens_per_match else None


def num_drafts_possible(
    draft_token_ids: SequenceOf[int],
    *,
    stop_token_ids: frozenset[int],
    num_output_tokens: int,
    min_new_tokens: int,
) -> int:
    """How many drafts, from the first on, some logits could accept.

    Drafts after a stop token are never used. A stop token itself can be accepted, unless it would
    be among the first `min_new_tokens`, where it is masked. No other token can be excluded without
    the logits: biases and penalties are finite, and top-k, top-p and min-p depend on the logits.

    Args:
        num_output_tokens: the sequence's output tokens before the drafts.
    """
    if stop_token_ids.isdisjoint(draft_token_ids):
        return len(draft_token_ids)
    first = next(i for i, token_id in enumerate(draft_token_ids) if token_id in stop_token_ids)
    return first if num_output_tokens + first < min_new_tokens else first + 1


def num_wanted_draft_tokens(
    *,
    num_speculative_tokens: int,
    remaining: int,
    length: int,
    num_useless_hints: int,
    num_declined: int = 0,
) -> int:
    """How many tokens a hint for the next step should hold. 0: send none.

    Enough for several steps, so that after a fully accepted step the next drafts are already here.
    After several useless hints in a row (one may count as several: `useless_hints.py`), or many
    steps whose drafts were not worth their rows, a hint is requested only every
    `PROBE_PERIOD_TOKENS`, and then ever more seldom, while they go on to be useless: on text that
    does not repeat, and under load, hints cost messages and gain nothing.

    Args:
        num_speculative_tokens, remaining: as in `num_drafts_to_verify`.
        length: the sequence's length now.
        num_useless_hints: the last hints in a row that were empty or wrong from the start.
        num_declined: the last steps in a row that had drafts for the sequence and verified none.
    """
    num_useless_probes = num_useless_hints - USELESS_HINTS_BEFORE_PROBING
    if num_useless_probes >= 0 or num_declined >= DECLINED_STEPS_BEFORE_PROBING:
        # Each period serves two probes.
        period = PROBE_PERIOD_TOKENS << min(max(num_useless_probes, 0) // 2, 8)
        if length % min(period, LONGEST_PROBE_PERIOD_TOKENS):
            return 0
    return max(0, min(num_speculative_tokens * STEPS_AHEAD, remaining - 1))
