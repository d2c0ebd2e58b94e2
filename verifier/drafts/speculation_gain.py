"""The gain of speculation: the time of decode steps against an estimate for plain decoding.

Pure arithmetic; knows no clock, no sequence and no metric.

For steps over about the same number of sequences, a step's cost is modelled as a straight line over
its tokens, `cost(tokens)`, fitted to recent steps by least squares with decaying weights. The fit
needs no plain steps, of which repeating text has hardly any. A step over n sequences that computed
m tokens, drafts included, produced e tokens and took t seconds, counts as

    took     t plus its wait for hints
    plain    e / n * t * cost(n) / cost(m)      e / n steps of one token per sequence

The gain over any period is the sum of `plain` divided by the sum of `took`: 1 is no gain, below 1 a
loss. Only the line's shape counts, so a machine that slows down affects both sides alike.

Example: 2 sequences, 7 drafts each, 10 of them accepted, so e = 12; a step of 16 tokens takes 6 ms
and one of 2 tokens 5 ms. Plain decoding needs 6 steps of 5 ms for what 6 ms gave: a gain of 5.
"""

from dataclasses import dataclass, field

_DECAY = 0.995  # the last few hundred steps count
# Variance of steps' tokens below which the slope is unknown.
_MIN_VARIANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """Seconds of one decode step, and the estimate for plain decoding of the same tokens."""

    took_s: float
    plain_s: float


@dataclass(slots=True)
class StepCost:
    """The line: weighted sums over the observed steps."""

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

        The slope is clamped, against noise: more tokens take no less time, and no more than
        proportionally more.
        """
        if not self.weight:
            return None
        mean_tokens = self.tokens / self.weight
        variance = self.tokens_squared / self.weight - mean_tokens**2
        if variance < _MIN_VARIANCE:
            return None
        mean_s = self.duration_s / self.weight
        covariance = self.tokens_duration_s / self.weight - mean_tokens * mean_s
        slope_s = min(max(covariance / variance, 0.0), mean_s / mean_tokens)
        fixed_s = mean_s - slope_s * mean_tokens
        return (fixed_s + slope_s * num_tokens) / (fixed_s + slope_s * reference)


@dataclass(slots=True)
class DecodeCosts:
    """A line for each batch size: 1 sequence, 2 to 3, 4 to 7, and so on."""

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
        """Observes a decode step and returns its times; None while too little is known.

        Args:
            num_sequences: n; all of them decoded.
            num_scheduled_tokens: m, drafts included.
            num_output_tokens: e, of all sequences.
            duration_s: t.
            draft_wait_s: the step's wait for hints.
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
