"""Whether a step should wait for hints under way, and for how long.

Waiting delays every sequence of the step and helps those without a draft. The rule compares the
two, both in seconds of step time summed over sequences:

    sum of p1 over the sequences without a draft * step  >  remaining hop * sequences in the step

p1 is a sequence's running probability that a hint's first token is right. The expected length does
not count: a late hint is realigned, so not waiting costs at most one step without drafts. Hints
come whether awaited or not, so p1 is learned without waiting, and a step never waits for text that
never repeats.

Pure arithmetic on durations; knows no clock and no sequence.
"""

import collections
import enum
from dataclasses import dataclass, field

from verifier.drafts.hint_requests import is_gain_unlikely

FIRST_TOKEN_DECAY = 0.8
DURATION_DECAY = 0.9
# The reported quantiles are of so many last hops.
HOPS_KEPT = 256


@dataclass(slots=True)
class RunningMean:
    """An exponentially decaying mean; the first observation counts in full."""

    decay: float
    value: float | None = None

    def observe(self, value: float) -> None:
        if self.value is None:
            self.value = value
        else:
            self.value = self.decay * self.value + (1 - self.decay) * value


class WaitOutcome(enum.StrEnum):
    """What a wait for hints brought; the label of `tandem_draft_waits`."""

    PAID = "paid"  # at least one draft
    VAIN = "vain"


@dataclass(slots=True)
class DraftWaitEstimates:
    """Running means of one verifier: a step's duration, and the hop, from sending a sequence's
    tokens to the arrival of the hint that continues them.

    A hint that travels while a step is computed is delayed by it, and delays nothing. So its hop
    counts only where it is shorter than the mean, or the first.
    """

    step_s: RunningMean = field(default_factory=lambda: RunningMean(DURATION_DECAY))
    hop_s: RunningMean = field(default_factory=lambda: RunningMean(DURATION_DECAY))
    _recent_hops_s: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=HOPS_KEPT)
    )

    def observe_hop(self, duration_s: float, *, was_under_step: bool) -> None:
        """Observes a hop; `was_under_step`: a step was computed while the hint travelled."""
        mean_s = self.hop_s.value
        if not was_under_step:
            self._recent_hops_s.append(duration_s)
        elif mean_s is not None and duration_s >= mean_s:
            return
        self.hop_s.observe(duration_s)

    def observe_vain_wait(self, elapsed_s: float) -> None:
        """Observes that a hint did not come for so long: its hop is longer than that."""
        if self.hop_s.value is None or elapsed_s > self.hop_s.value:
            self.hop_s.observe(elapsed_s)

    def hop_quantile_s(self, quantile: float) -> float:
        """The quantile of the hops that no step delayed; 0 before the first. For any thread."""
        # A copy, made without letting another thread run.
        hops_s = sorted(self._recent_hops_s.copy())
        return hops_s[min(len(hops_s) - 1, int(quantile * len(hops_s)))] if hops_s else 0.0

    def longest_wait_s(
        self, *, first_token_probabilities: list[float], num_sequences: int, elapsed_s: float
    ) -> float:
        """How long the step may wait for the missing hints; 0 when waiting does not pay.

        Never longer than the expected gain, which bounds the loss by an overdue hint.

        Args:
            first_token_probabilities: p1 of each sequence without a draft.
            num_sequences: sequences that the wait would delay, these included.
            elapsed_s: time since the last of the missing hints was requested.
        """
        if not first_token_probabilities or self.step_s.value is None or self.hop_s.value is None:
            return 0.0
        gain_s = sum(first_token_probabilities) * self.step_s.value / num_sequences
        remaining_s = self.hop_s.value - elapsed_s
        return gain_s if gain_s > remaining_s else 0.0


class HintRecord:
    """p1 of one sequence, learned from every hint, used or not; and how many hints were useless.

    A hint's first token is compared with the sequence's token at that position, when that is
    known. A hint without tokens counts as wrong. A hint is useless if it is wrong, or comes when
    the sequence has passed its end: a drafter that is so late costs messages and gains nothing. The
    caller leaves out empty hints of a drafter that is still indexing.
    """

    __slots__ = (
        "_num_useless_before",
        "_pending",
        "first_token_probability",
        "num_hints",
        "num_requests",
        "num_useful_hints",
        "num_useless_hints",
    )

    def __init__(self, num_useless_before: int = 0) -> None:
        """`num_useless_before`: how many useless hints the sequence starts with."""
        self.first_token_probability = 0.0
        self.num_hints = 0
        self.num_useful_hints = 0
        # Useless hints in a row, up to the last hint. The first request sets it to
        # `num_useless_before`.
        self.num_useless_hints = 0
        self._num_useless_before = num_useless_before
        self.num_requests = 0
        self._pending: tuple[int, int] | None = None

    @property
    def expects_useless_hints(self) -> bool:
        """Whether the record begins with so many that hints after the first are only probes."""
        return is_gain_unlikely(num_useless_hints=self._num_useless_before)

    def record_request(self) -> None:
        """A hint is requested; one may be under way."""
        self.num_requests += 1
        if self.num_requests == 1:
            self.num_useless_hints = self._num_useless_before

    def record_hint(
        self, base_length: int, token_ids: list[int], known_token_ids: list[int]
    ) -> None:
        """Records a hint as it arrives."""
        if not token_ids:
            self._observe(False)
        elif base_length < len(known_token_ids):
            is_passed = base_length + len(token_ids) <= len(known_token_ids)
            self._observe(known_token_ids[base_length] == token_ids[0], is_passed=is_passed)
        else:
            self._pending = (base_length, token_ids[0])

    def settle(self, known_token_ids: list[int]) -> None:
        """Compares the pending hint once its position is decided."""
        if self._pending is not None and self._pending[0] < len(known_token_ids):
            position, token_id = self._pending
            self._pending = None
            self._observe(known_token_ids[position] == token_id)

    def _observe(self, right: bool, *, is_passed: bool = False) -> None:
        is_useful = right and not is_passed
        self.num_useless_hints = 0 if is_useful else self.num_useless_hints + 1
        self.num_hints += 1
        self.num_useful_hints += is_useful
        self.first_token_probability *= FIRST_TOKEN_DECAY
        self.first_token_probability += (1 - FIRST_TOKEN_DECAY) * right
