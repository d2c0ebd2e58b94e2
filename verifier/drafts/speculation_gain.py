"""What speculation gains: the time of decode steps against an estimate of plain decoding's.

Pure arithmetic; knows no clock, no sequence and no metric.

For steps over about the same number of sequences, a step's cost is taken as a straight line over
its tokens, `cost(tokens)`, fitted to those of late by least squares with decaying weights. Plain
steps are not needed for it: on text that repeats there are hardly any. With it, a step over n
sequences that ran over m tokens, drafts included, gave e tokens and took t seconds, weighs

    took     t, and the time that it waited for hints
    plain    e / n * t * cost(n) / cost(m)      e / n steps of one token per sequence

and the gain over any time is the sum of `plain` over the sum of `took`. Only the line's shape
counts, so a machine that is slower for a while is so on both sides. It says what the same verifier
would do without drafts, so it is an estimate: 1 is no gain, below 1 a loss.

Example: 2 sequences, 7 drafts each, 10 of them accepted, so e = 12; a step of 16 tokens takes 6 ms
and one of 2 tokens 5 ms. Plain decoding needs 6 steps of 5 ms for what 6 ms gave: a gain of 5.
"""

from dataclasses import dataclass, field

_DECAY = 0.995  # the last few hundred steps count
# Variance of steps' tokens below which nothing is known of the slope.
_LEAST_VARIANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """Seconds of one decode step, and the estimate of plain decoding for the same tokens."""

    took_s: float
    plain_s: float


@dataclass(slots=True)
class StepCost:
    """The line: weighted sums over the steps that were observed."""

    weight: float = 0.0
    tokens: float = 0.0
    tokens_squared: float = 0.0
    duration_s: float = 0.0
    tokens_duration_s: float = 0.0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        self.weight = _DECAY * self.weight + 1
        self.tokens = _DECAY * self.tokens + num_tokens
        self.tokens_squared = _DECAY * self.tokens_squared + num_tokens**2
        self.duration_s = _DECAY * self.duration_s + duration_s
        self.tokens_duration_s = _DECAY * self.tokens_duration_s + num_tokens * duration_s

    def ratio(self, num_tokens: int, reference: int) -> float | None:
        """cost(num_tokens) / cost(reference); None until steps of different sizes were observed.

        More tokens are taken to be no faster, and no slower than in proportion, whatever noise
        makes of the fit.
        """
        if not self.weight:
            return None
        mean_tokens = self.tokens / self.weight
        variance = self.tokens_squared / self.weight - mean_tokens**2
        if variance < _LEAST_VARIANCE:
            return None
        mean_s = self.duration_s / self.weight
        covariance = self.tokens_duration_s / self.weight - mean_tokens * mean_s
        slope_s = min(max(covariance / variance, 0.0), mean_s / mean_tokens)
        fixed_s = mean_s - slope_s * mean_tokens
        return (fixed_s + slope_s * num_tokens) / (fixed_s + slope_s * reference)


@dataclass(slots=True)
class DecodeCosts:
    """A line for each size of batch: of 1 sequence, 2 to 3, 4 to 7, and so on."""

    _by_size: dict[int, StepCost] = field(default_factory=dict)

    def weigh(
        self,
        *,
        num_sequences: int,
        num_scheduled_tokens: int,
        num_output_tokens: int,
        duration_s: float,
        draft_wait_s: float,
    ) -> DecodeTime | None:
        """Learns from a decode step and weighs it; None while too little is known.

        Args:
            num_sequences: n, all of which decoded.
            num_scheduled_tokens: m, that the model ran over, drafts included.
            num_output_tokens: e, over all sequences.
            duration_s: t, of the step.
            draft_wait_s: that the step waited for hints.
        """
        cost = self._by_size.setdefault(num_sequences.bit_length(), StepCost())
        cost.observe(num_scheduled_tokens, duration_s)
        ratio = cost.ratio(num_sequences, num_scheduled_tokens)
        if ratio is None:
            return None
        return DecodeTime(
            took_s=duration_s + draft_wait_s,
            plain_s=num_output_tokens / num_sequences * duration_s * ratio,
        )
