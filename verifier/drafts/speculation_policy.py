"""The limits of K, how many drafts a sequence verifies in a step.

K is at most: the drafts that the buffered hint holds, the number that the hint's match length
justifies, the drafts before one that can never be accepted, the sequence's limit, its remaining
output, and the step's token budget. The match length grows with every token that comes as the hint
predicted. So a hint can cover several steps, and a step that accepts all its drafts leaves drafts
for the next one without a wait. Within these limits `depth_policy.py` chooses by cost and gain.
"""

from collections.abc import Sequence as SequenceOf


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
