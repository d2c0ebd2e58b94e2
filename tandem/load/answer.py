"""What one request took, and the sums over many."""

import collections
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation_note import speculation_note
from tandem.values import Usage

PERCENTILES = (50, 90, 99)
LATENCIES = ("TTFT", "ITL", "TPOT", "E2E")


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request's times, in seconds from its arrival, and counts. Filled while it streams."""

    received_at_s: list[float] = field(default_factory=list)
    """Of each message with output."""
    output_tokens: int = 0
    num_drafts: int = 0
    """Steps that verified drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    usage: Usage | None = None
    """Of a gateway that was called over gRPC."""
    error: str | None = None
    """Why it failed; None: it did not."""
    sent_late_s: float = 0.0
    """How long after its arrival it was sent; part of its latencies."""

    def latencies_s(self) -> dict[str, list[float]]:
        """By name: TTFT, gaps between messages (ITL), TPOT and E2E; none of a failed request."""
        found: dict[str, list[float]] = {name: [] for name in LATENCIES}
        times = self.received_at_s
        if self.error is not None or not times:
            return found
        found["TTFT"].append(times[0])
        found["E2E"].append(times[-1])
        found["ITL"] += [later - sooner for sooner, later in itertools.pairwise(times)]
        # One message that holds the whole answer does not tell how long a token took.
        if self.output_tokens > 1 and len(times) > 1:
            found["TPOT"].append((times[-1] - times[0]) / (self.output_tokens - 1))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All requests of one variant."""

    answers: Sequence[Answer]
    duration_s: float
    """From the first arrival to the last answer, of all turns together."""

    @property
    def num_failed(self) -> int:
        return sum(answer.error is not None for answer in self.answers)

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Of those that did not fail."""
        num_done = len(self.answers) - self.num_failed
        return num_done / self.duration_s if self.duration_s else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None without any."""
        drafted = sum(answer.num_draft_tokens for answer in self.answers)
        return sum(a.num_accepted_tokens for a in self.answers) / drafted if drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Output tokens per step with drafts; None without any."""
        drafts = sum(answer.num_drafts for answer in self.answers)
        return 1 + sum(a.num_accepted_tokens for a in self.answers) / drafts if drafts else None

    @property
    def speculation_note(self) -> str:
        """What drafts brought, and if little, why; "" if that is not known."""
        return speculation_note(each.usage for each in self.answers if each.usage is not None)

    def latencies_s(self, name: str) -> list[float]:
        return [value for answer in self.answers for value in answer.latencies_s()[name]]

    def percentiles_ms(self) -> dict[str, dict[str, float | None]]:
        """By latency, then by "p50", "p90", "p99"; None without any request that tells."""
        return {
            name: {f"p{p}": _percentile_ms(self.latencies_s(name), p) for p in PERCENTILES}
            for name in LATENCIES
        }

    def errors(self) -> dict[str, int]:
        """How many requests failed, by reason; the most frequent first."""
        counts = collections.Counter(a.error for a in self.answers if a.error is not None)
        return dict(counts.most_common())

    @property
    def most_late_s(self) -> float:
        """How long after its arrival the latest request was sent."""
        return max((answer.sent_late_s for answer in self.answers), default=0.0)

    def to_json(self) -> dict[str, object]:
        return {
            "requests": len(self.answers),
            "failed": self.num_failed,
            "errors": self.errors(),
            "sent_late_s": self.most_late_s,
            "duration_s": self.duration_s,
            "output_tokens": self.output_tokens,
            "tokens_per_s": self.tokens_per_s,
            "requests_per_s": self.requests_per_s,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "speculation_note": self.speculation_note,
            "latency_ms": self.percentiles_ms(),
        }


def _percentile_ms(values_s: list[float], percent: int) -> float | None:
    if not values_s:
        return None
    if len(values_s) == 1:
        return values_s[0] * 1e3
    return statistics.quantiles(values_s, n=100, method="inclusive")[percent - 1] * 1e3
