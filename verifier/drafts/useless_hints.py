"""How many useless hints a new sequence has behind it, by what became of recent sequences.

Only useless hints show that a text does not repeat itself. Where recent texts did not, the first
useless hint of a new one counts as many, so that the next ones are requested seldom from then on.
One right hint ends that.

Example: the last sequences had no right hint, and each ended with 10 useless ones. The next one's
first hint is useless: it counts as the tenth, and further hints are requested at every 64th length.
"""

from verifier.drafts.draft_wait import FirstTokenRecord
from verifier.drafts.speculation_policy import MOST_USELESS_HINTS

# A sequence with at least one right hint in so many counts as one without useless hints.
_MOST_HINTS_PER_RIGHT_ONE = 8
# How much of the mean is left after the next sequence.
_DECAY = 0.8


class UselessHintsPrior:
    """Owned by the engine thread; one for all sequences."""

    def __init__(self) -> None:
        self._mean = 0.0

    def begin(self) -> FirstTokenRecord:
        """The record of a new sequence."""
        num_useless = min(round(self._mean), MOST_USELESS_HINTS - 1)
        return FirstTokenRecord(num_useless_before=num_useless)

    def learn(self, record: FirstTokenRecord) -> None:
        """A sequence has ended."""
        if not record.num_hints:
            return
        is_of_use = record.num_right_hints * _MOST_HINTS_PER_RIGHT_ONE >= record.num_hints
        num_useless = 0 if is_of_use else min(record.num_useless_hints, MOST_USELESS_HINTS)
        self._mean = _DECAY * self._mean + (1 - _DECAY) * num_useless
