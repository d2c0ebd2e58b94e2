"""The draft buffer: the latest hint for one sequence, kept by position.

A hint predicts the tokens after a sequence's first `base_length` tokens. It may arrive late or
cover several steps, so it is stored with its position and moved forward (realigned) to the
sequence's length when the next step is formed. How many drafts are verified is decided in
`draft_limits.py`, whether to wait in `draft_wait.py`.

Example: the hint (base_length 10, tokens 5 6 7 8), the sequence now 12 tokens long and ending in
5 6: the draft is 7 8. Had it ended in 5 9, the hint would be stale.

Where texts differ, they often agree again soon after, and the next hint is still to come. So a hint
that only the last token contradicts can be resumed behind it: after the same token, if it comes
soon (tokens are left out), else after the one that came in its place. In the example, 5 9: the
draft is 7 8. Had the sequence ended in 5 7, it would be 8. Any other hint takes its place.
"""

import enum
from typing import NamedTuple

from tandem.values import DraftSource


class Hint(NamedTuple):
    """A draft for one sequence, as received. One is made per sequence and step: a frozen dataclass
    takes three times as long.

    Attributes:
        is_indexing: empty only because the drafter is still indexing the sequence.
    """

    sequence_id: str
    base_length: int
    token_ids: list[int]
    matched_ngram_length: int
    is_indexing: bool = False
    source: DraftSource | None = None


# How far behind a contradiction a resumed hint may go on.
_MAX_LEFT_OUT = 16


class HintOutcome(enum.StrEnum):
    """The outcome of a hint, reported once per hint; the label of `tandem_draft_hints`."""

    USED = "used"  # first used at the length that it was made for
    REALIGNED = "realigned"  # first used at a later length
    STALE = "stale"  # contradicted by the sequence before it was used
    LATE = "late"  # passed by the sequence, or replaced by a newer hint, before it was used


class DraftBuffer:
    """Owned by the engine thread, one per sequence.

    Invariant after `offer` and `advance`: the buffer is empty, or it agrees with every token of
    the sequence that it covers and holds at least one beyond. A resumed hint covers none yet, and
    its match is 0.
    """

    __slots__ = (
        "_agreed_length",
        "_base_length",
        "_is_reported",
        "_matched_ngram_length",
        "_token_ids",
        "answered_length",
        "is_resumed",
        "source",
    )

    def __init__(self) -> None:
        self._base_length = 0
        # The sequence's length when the hint was last found to agree with it.
        self._agreed_length = 0
        self._token_ids: list[int] = []
        self._is_reported = True
        # Whether the hint goes on behind its contradiction.
        self.is_resumed = False
        self._matched_ngram_length = 0
        # Longest length that a hint, possibly an empty one, was received for.
        self.answered_length = -1
        # Where the hint that was accepted last comes from.
        self.source: DraftSource | None = None

    def __bool__(self) -> bool:
        """Whether there is a draft."""
        return bool(self._token_ids)

    def offer(
        self,
        base_length: int,
        token_ids: list[int],
        matched_ngram_length: int,
        known_token_ids: list[int],
        source: DraftSource | None = None,
        *,
        resumes: bool = False,
    ) -> HintOutcome | None:
        """Accepts a hint unless it is older than the buffered one, contradicted or passed.

        An empty hint only records that its length was answered. A contradicted one is resumed, if
        `resumes` and there is no other.

        Returns:
            The outcome of a hint that ends unused: this one, or the one it replaces.
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
            if resumes and not self._token_ids and token_ids[: skip - 1] == known[:-1]:
                self._resume(token_ids[skip - 1 :], known_token_ids, source)
            return HintOutcome.STALE
        is_older = base_length < self._base_length and not self.is_resumed
        if skip >= len(token_ids) or (self._token_ids and is_older):
            return HintOutcome.LATE
        replaced = self._retire(HintOutcome.LATE)
        self._base_length = base_length
        self._agreed_length = length
        self._token_ids = token_ids
        self._is_reported = self.is_resumed = False
        self._matched_ngram_length = matched_ngram_length
        self.source = source
        return replaced

    def advance(self, known_token_ids: list[int], *, resumes: bool = False) -> HintOutcome | None:
        """Drops the hint if the sequence, now longer, contradicts it or has passed its end; resumes
        a contradicted one if `resumes`.
        """
        if not self._token_ids:
            return None
        agreed, length = self._agreed_length, len(known_token_ids)
        predicted = self._token_ids[agreed - self._base_length : length - self._base_length]
        known = known_token_ids[agreed : agreed + len(predicted)]
        if predicted != known:
            contradicted = self._token_ids[length - self._base_length - 1 :]
            outcome = self._retire(HintOutcome.STALE)
            if resumes and contradicted and predicted[:-1] == known[:-1]:
                self._resume(contradicted, known_token_ids, self.source)
            return outcome
        if length - self._base_length >= len(self._token_ids):
            return self._retire(HintOutcome.LATE)
        self._agreed_length = length
        return None

    def match_length(self, length: int) -> int:
        """Matching tokens before the first draft, for a sequence of `length` tokens: the hint's own
        match, and the tokens decided since as it predicted.
        """
        return self._matched_ngram_length + length - self._base_length

    def ahead(self, length: int, num_tokens: int) -> list[int]:
        """Up to `num_tokens` drafts for a sequence of `length` tokens, the length of the last
        `offer` or `advance`.
        """
        skip = length - self._base_length
        return self._token_ids[skip : skip + num_tokens]

    def use(self, length: int) -> HintOutcome | None:
        """Notes that drafts are verified when the sequence has `length` tokens.

        Returns:
            The hint's outcome, when it is used for the first time.
        """
        if self._is_reported:
            return None
        self._is_reported = True
        return HintOutcome.REALIGNED if length > self._base_length else HintOutcome.USED

    def _resume(
        self, token_ids: list[int], known_token_ids: list[int], source: DraftSource | None
    ) -> None:
        """Buffers what follows in a hint whose first token is not the last one of the sequence."""
        left_out = token_ids[1 : 1 + _MAX_LEFT_OUT]
        last = known_token_ids[-1]
        self._token_ids = token_ids[2 + left_out.index(last) if last in left_out else 1 :]
        self._base_length = self._agreed_length = len(known_token_ids)
        self._is_reported = self.is_resumed = True
        self._matched_ngram_length = 0
        self.source = source

    def _retire(self, outcome: HintOutcome) -> HintOutcome | None:
        self._token_ids = []
        was_reported, self._is_reported = self._is_reported, True
        return None if was_reported else outcome
