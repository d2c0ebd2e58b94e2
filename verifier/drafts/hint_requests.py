"""Whether a step requests a hint for a sequence, and of how many tokens.

After several useless hints in a row, or many steps whose drafts were not worth their rows, a hint
is requested only in steps that probe: on text that does not repeat, from a drafter that is too
late, and under load, hints cost messages and gain nothing.

A message to a drafter and its answer cost some 0.7 ms and 0.02 ms per sequence, and delay the whole
batch. So steps probe by the clock, for all such sequences at once: a batch of a small model's short
steps is slowed down by 1 %, and one of a large model's long steps probes nearly always.

Pure arithmetic; knows no clock and no sequence.
"""

import math

STEPS_AHEAD = 4
USELESS_HINTS_BEFORE_PROBING = 6
DECLINED_STEPS_BEFORE_PROBING = 24
# Seconds until the next step that probes: so many for a probe's message, and so many more for each
# sequence in it.
PROBE_PERIOD_S = 0.05
PROBE_PERIOD_PER_SEQUENCE_S = 0.0025


def num_wanted_draft_tokens(*, num_speculative_tokens: int, remaining: int) -> int:
    """How many tokens a hint for the next step should hold. 0: send none.

    Enough for several steps, so that after a fully accepted step the next drafts are already here.

    Args:
        num_speculative_tokens: the sequence's limit per step.
        remaining: output tokens still allowed; a draft needs room for itself and one more.
    """
    return max(0, min(num_speculative_tokens * STEPS_AHEAD, remaining - 1))


def is_gain_unlikely(*, num_useless_hints: int, num_declined: int = 0) -> bool:
    """Whether a hint for the sequence would probably gain nothing.

    Args:
        num_useless_hints: `HintRecord.num_useless_hints`.
        num_declined: the last steps in a row that had drafts for the sequence and verified none.
    """
    return (
        num_useless_hints >= USELESS_HINTS_BEFORE_PROBING
        or num_declined >= DECLINED_STEPS_BEFORE_PROBING
    )


class ProbePace:
    """Which steps probe; one for all sequences."""

    def __init__(self) -> None:
        self._now_s = self._due_s = -math.inf
        self._may_probe = False

    def begin_step(self, now_s: float) -> None:
        """Must come before the requests of each step."""
        self._now_s = now_s
        self._may_probe = now_s >= self._due_s

    def count_probe(self) -> bool:
        """Counts a sequence that would have a probe, which delays the next step that probes.

        Returns:
            Whether this step probes.
        """
        if self._may_probe:
            self._due_s = max(self._due_s, self._now_s + PROBE_PERIOD_S)
            self._due_s += PROBE_PERIOD_PER_SEQUENCE_S
        return self._may_probe
