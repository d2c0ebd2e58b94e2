"""The number of useless hints that a new sequence starts with: a decaying mean over ended ones.

Only useless hints show that a text does not repeat itself, or that its drafter is too late. If the
number is high, the sequence requests its first hint as always, and further ones only in steps that
probe. A useful hint sets it to 0.

Example: the last sequences had no hint of use, and each ended with 10 useless ones. The next one
requests its first hint at once, and further ones in steps that probe, unless the first is of use.
"""

from verifier.drafts.draft_wait import HintRecord
from verifier.drafts.hint_requests import USELESS_HINTS_BEFORE_PROBING

# The most that one sequence counts.
MOST_USELESS_HINTS = 10
# A sequence with at least one useful hint in so many counts as one without useless hints.
_MOST_HINTS_PER_USEFUL_ONE = 8
# How much of the mean is left after the next sequence.
_DECAY = 0.8


class UselessHintsPrior:
    """Owned by the engine thread; one for all sequences."""

    def __init__(self) -> None:
        self._mean = 0.0

    def begin(self) -> HintRecord:
        """The record of a new sequence."""
        return HintRecord(num_useless_before=round(self._mean))

    def learn(self, record: HintRecord) -> None:
        """A sequence has ended."""
        if not record.num_hints:
            if record.num_requests < USELESS_HINTS_BEFORE_PROBING:
                # A short text ends before a drafter can answer.
                return
            num_useless = MOST_USELESS_HINTS
        elif record.num_useful_hints * _MOST_HINTS_PER_USEFUL_ONE >= record.num_hints:
            num_useless = 0
        else:
            num_useless = min(record.num_useless_hints, MOST_USELESS_HINTS)
        self._mean = _DECAY * self._mean + (1 - _DECAY) * num_useless
