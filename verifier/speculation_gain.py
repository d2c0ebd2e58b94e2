"""What speculation gains: the time of decode steps against an estimate of plain decoding's.

Pure arithmetic; knows no clock, no sequence and no metric.

A step's cost is taken as a straight line over its tokens, `fixed + slope * tokens`, fitted to the
decode steps of late by least squares with decaying weights. Steps without drafts are not needed:
on text that repeats there are hardly any. With it, a step over n sequences that gave them e tokens
in t seconds, waits for hints included,

    took     t
    plain    e / n * (fixed + slope * n)      e / n steps of one token per sequence

and the gain over any time is the sum of `plain` over the sum of `took`. It says what the same
verifier would do without drafts, so it is an estimate: 1 is no gain, below 1 a loss.

Example: 2 sequences, 8 tokens each, 5 of them accepted, so e = 12; a step of 16 tokens takes 6 ms
and one of 2 tokens 5 ms. Plain decoding needs 6 steps of 5 ms for what 6 ms gave: a gain of 5.
"""

from dataclasses import dataclass

_DECAY = 0.995  # the last few hundred steps count
# Variance of steps' tokens below which nothing is known of the slope.
_LEAST_VARIANCE = 0.25


@dataclass(slots=True)
class StepCost:
    """The fit: weighted sums over the decode steps that were observed."""

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

    def estimate_s(self, num_tokens: int) -> float | None:
        """A step's seconds; None until steps of different sizes were observed.

        Never below what a step would cost whose time is all per token, nor above the mean step:
        fewer tokens are no slower, and no cheaper than in proportion.
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
        return mean_s + slope_s * (num_tokens - mean_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """Seconds of one decode step, and the estimate of plain decoding for the same tokens."""

    took_s: float
    plain_s: float


def decode_time(
    cost: StepCost,
    *,
    num_sequences: int,
    num_scheduled_tokens: int,
    num_output_tokens: int,
    duration_s: float,
    draft_wait_s: float,
) -> DecodeTime | None:
    """Observes a decode step and weighs it; None while the cost of plain steps is not known.

    Args:
        cost: the verifier's one; it learns from the step.
        num_sequences: n, all of which decoded.
        num_scheduled_tokens: tokens that the model ran over, drafts included.
        num_output_tokens: e, over all sequences.
        duration_s: of the step.
        draft_wait_s: that the step waited for hints.
    """
    cost.observe(num_scheduled_tokens, duration_s)
    plain_step_s = cost.estimate_s(num_sequences)
    if plain_step_s is None:
        return None
    return DecodeTime(
        took_s=duration_s + draft_wait_s,
        plain_s=num_output_tokens / num_sequences * plain_step_s,
    )
