"""The draft buffer: the latest hint for one sequence, kept by position.

A hint says what may come after a sequence's first `base_length` tokens. It may arrive late or
hold more than one step's worth, so it is stored with its position and moved forward (realigned)
to wherever the sequence stands when the next step is formed. Nothing here decides how many
drafts are verified (`speculation_policy.py`) or whether to wait (`draft_wait.py`).

Example: the hint (base_length 10, tokens 5 6 7 8), the sequence now 12 tokens long and ending in
5 6: the draft is 7 8. Had it ended in 5 9, the hint would be stale.
"""

import enum


class Source(enum.IntEnum):
    """Where a hint was copied from; the wire's numbers."""

    # And every number that this verifier does not know.
    UNSPECIFIED = 0
    SEQUENCE = 1
    POOL = 2


class HintOutcome(enum.StrEnum):
    """What became of a hint, told once per hint; the label of `tandem_draft_hints`."""

    USED = "used"  # drafted from at the length that it was made for
    REALIGNED = "realigned"  # first drafted from after the sequence had moved on
    STALE = "stale"  # contradicted by the sequence before it was used
    LATE = "late"  # every token of it was decided, or a newer hint was here, before it was used


class DraftBuffer:
    """Owned by the engine thread, one per sequence.

    Invariant after `offer` and `advance`: the buffer is empty, or it agrees with every token of
    the sequence that it covers and holds at least one beyond.
    """

    __slots__ = (
        "_base_length",
        "_is_reported",
        "_matched_ngram_length",
        "_token_ids",
        "answered_length",
        "source",
    )

    def __init__(self) -> None:
        self._base_length = 0
        self._token_ids: list[int] = []
        self._is_reported = True
        self._matched_ngram_length = 0
        # Longest length that a hint, possibly an empty one, was received for.
        self.answered_length = -1
        # Of the hint that was taken last.
        self.source = Source.UNSPECIFIED

    def __bool__(self) -> bool:
        """Whether there is a draft."""
        return bool(self._token_ids)

    def offer(
        self,
        base_length: int,
        token_ids: list[int],
        matched_ngram_length: int,
        known_token_ids: list[int],
        source: Source = Source.UNSPECIFIED,
    ) -> HintOutcome | None:
        """Takes a hint unless it is older than the buffered one, contradicted or overtaken.

        An empty hint only records that its length was answered.

        Returns:
            What became of a hint that is of no more use: this one, or the one it replaced.
        """
        length = len(known_token_ids)
        if base_length > length:
            return HintOutcome.STALE if token_ids else None
        self.answered_length = max(self.answered_length, base_length)
        if not token_ids:
            return None
        skip = length - base_length
        known = known_token_ids[base_length : base_length + len(token_ids)]
        if token_ids[:skip] != known:
            return HintOutcome.STALE
        if skip >= len(token_ids) or (self._token_ids and base_length < self._base_length):
            return HintOutcome.LATE
        replaced = self._retire(HintOutcome.LATE)
        self._base_length = base_length
        self._token_ids = token_ids
        self._is_reported = False
        self._matched_ngram_length = matched_ngram_length
        self.source = source
        return replaced

    def advance(self, known_token_ids: list[int]) -> HintOutcome | None:
        """Drops the hint if the sequence, having grown, contradicts it or has passed its end."""
        if not self._token_ids:
            return None
        skip = len(known_token_ids) - self._base_length
        known = known_token_ids[self._base_length : self._base_length + len(self._token_ids)]
        if self._token_ids[:skip] != known:
            return self._retire(HintOutcome.STALE)
        if skip >= len(self._token_ids):
            return self._retire(HintOutcome.LATE)
        return None

    def match_length(self, length: int) -> int:
        """How many tokens before the first draft match, for a sequence of `length` tokens: those
        that the hint came with, and those that were decided as it said.
        """
        return self._matched_ngram_length + length - self._base_length

    def ahead(self, length: int, num_tokens: int) -> list[int]:
        """What `draft` would give; to look at only."""
        skip = length - self._base_length
        return self._token_ids[skip : skip + num_tokens]

    def draft(self, length: int, num_tokens: int) -> tuple[list[int], HintOutcome | None]:
        """Up to `num_tokens` drafts for a sequence of `length` tokens, the length of the last
        `offer` or `advance`; and what became of the hint, the first time that it is used.
        """
        token_ids = self.ahead(length, num_tokens)
        if not token_ids or self._is_reported:
            return token_ids, None
        self._is_reported = True
        is_realigned = length > self._base_length
        return token_ids, HintOutcome.REALIGNED if is_realigned else HintOutcome.USED

    def _retire(self, outcome: HintOutcome) -> HintOutcome | None:
        self._token_ids = []
        was_told, self._is_reported = self._is_reported, True
        return None if was_told else outcome
