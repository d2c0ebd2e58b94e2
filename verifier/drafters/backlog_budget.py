"""How many tokens of prompts and replays may go to a drafter now.

Owns a token bucket, so that a drafter that needs every history again does not starve live traffic.
"""

from verifier.drafters.batches import MAX_DELTA_TOKENS

#: Tokens that may be sent per second, and at once, before prompts and replays wait. Writing and
#: indexing them takes a few percent of a core at most.
TOKENS_PER_S = 1_000_000
BURST_TOKENS = 65_536

# No batch is cut shorter than this for lack of budget.
_MIN_TOKENS = 1_024


class BacklogBudget:
    """Begins full; times are of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._num_tokens = float(BURST_TOKENS)
        self._at_s = 0.0

    def take(self, num_tokens: int) -> None:
        """So many tokens are sent, live ones too: those are never held back."""
        self._num_tokens -= num_tokens

    def room(self, now_s: float) -> int:
        """How many tokens the next batch of prompts and replays may hold: few, because it delays a
        live batch that follows at once.
        """
        self._refill(now_s)
        room_tokens = min(MAX_DELTA_TOKENS, int(self._num_tokens))
        return room_tokens if room_tokens >= _MIN_TOKENS else 0

    def due_s(self, now_s: float) -> float:
        """How long until there is room."""
        self._refill(now_s)
        return max(0.0, (_MIN_TOKENS - self._num_tokens) / TOKENS_PER_S)

    def _refill(self, now_s: float) -> None:
        refill = (now_s - self._at_s) * TOKENS_PER_S
        self._num_tokens = min(BURST_TOKENS, max(self._num_tokens, -BURST_TOKENS) + refill)
        self._at_s = now_s
