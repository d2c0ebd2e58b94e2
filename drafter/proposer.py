"""A draft, and how far a match is followed to say how good it is.

Knows nothing of how drafts are found (`proposal_kernel.py`, `pool_drafts.py`).
"""

from dataclasses import dataclass

from drafter.messages import Source

MAX_REACH_TOKENS = 64
"""How far back a match is followed to say how good it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What may come next; never empty."""

    token_ids: list[int]
    matched_ngram_length: int
    """How many tokens before the draft agree with those before the place it was copied from,
    counted up to `MAX_REACH_TOKENS`."""
    source: Source = Source.SEQUENCE
