"""The limits of K, how many drafts a sequence verifies in a step.

K is at most: the drafts that the buffered hint holds, the number that the hint's match length
justifies, the drafts before a stop token, the sequence's limit, its remaining output, and the
step's token budget. The match length grows with every token that comes as the hint predicted. So a
hint can cover several steps, and a step that accepts all its drafts leaves drafts for the next one
without a wait. Within these limits `depth_policy.py` chooses by cost and gain.
"""

from collections.abc import Sequence as SequenceOf


def num_drafts_trusted(*, tokens_per_match: int, match_length: int) -> int | None:
    """The largest K that a hint's match justifies; None: no limit.

    Args:
        tokens_per_match: drafts per matching token; 0 for no limit.
        match_length: tokens before the first draft that are known to match; 0 if unknown.
    """
    return tokens_per_match * max(1, match_length) if tokens_per_match else None


def num_drafts_useful(draft_token_ids: SequenceOf[int], *, stop_token_ids: frozenset[int]) -> int:
    """How many drafts, from the first on, can bring a token more: those before a stop token.

    The row after the last draft gives the stop token by itself, where one is allowed, and nothing
    follows it. No other token can be excluded without the logits: biases and penalties are finite,
    and top-k, top-p and min-p depend on the logits.
    """
    if stop_token_ids.isdisjoint(draft_token_ids):
        return len(draft_token_ids)
    return next(i for i, token_id in enumerate(draft_token_ids) if token_id in stop_token_ids)
