"""The gateway's metrics.

Owns their names, labels and buckets. Knows no request. Labels come from small fixed sets; a draft's
position is bounded by the verifiers' limit on drafts per step.

Counters of tokens, steps and drafts count shown output, so they equal the sums of `Usage` over all
choices that finished.
"""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.errors import ERROR_CODES, code_name
from gateway.generation.usage import MAX_MATCH_LENGTH
from gateway.messages.response import FinishReason, Source, Step, Usage
from servicekit.tally_histogram import TallyHistogram

# A draft's round trip takes some hundred microseconds; verifiers wait 0.25 s at most by default.
_HOP_BUCKETS_S = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.25,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5,
    10, 30, 60,
)  # fmt: skip
_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    30, 60,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800,
)  # fmt: skip
_ACCEPTANCE_LENGTH_BUCKETS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16, 24, 32)
_ACCEPTANCE_RATE_BUCKETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)
# Inclusive upper bounds, in tokens; longer matches count in the last bucket.
_MATCH_LENGTHS = (1, 2, 3, 5, 8, 16, 32, MAX_MATCH_LENGTH)

# Every labelled series begins at 0: Prometheus sees no increase in a series that appears with its
# first event.
_SHED_REASONS = (
    "concurrency",
    "waiting_tokens",
    "tenant_concurrency",
    "tenant_waiting_tokens",
    "draining",
    "no_verifier",
)
_EXPIRY_PHASES = ("queue", "prefill", "decode")
_RESUME_REASONS = ("verifier_gone", "verifier_draining", "verifier_full")
_REFUSAL_REASONS = ("full", "draining")
#: Reasons for ignoring a verifier's messages.
IGNORED_REASONS = (
    "foreign_sequence",
    "unknown_sequence",
    "unknown_drafter",
    "refused_drafter",
    "odd_event",
    "rejected_command",
    "internal_error",
)
# Further positions have no series, whatever a verifier's limit.
_MAX_DRAFT_POSITIONS = 512


class GatewayMetrics:
    """All metrics of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"tandem_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tandem_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"tandem_{name}", text, registry=registry, buckets=buckets)

        self._steps = counter("generation_steps", "Model steps that gave a sequence tokens.")
        self._drafts = counter(
            "spec_decode_num_drafts", "Of these steps, those that verified drafts."
        )
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft, from 0.",
            ["position"],
        )
        self._match_length = TallyHistogram(
            "tandem_spec_decode_match_length",
            "Match length of each verified draft, in tokens; 64 is 64 and more.",
            bounds=_MATCH_LENGTHS,
            registry=registry,
        )
        matched_draft_tokens = counter(
            "spec_decode_matched_draft_tokens",
            "Draft tokens verified, by match length (the bucket's upper bound) and source.",
            ["match_length", "source"],
        )
        matched_accepted_tokens = counter(
            "spec_decode_matched_accepted_tokens",
            "Draft tokens accepted, by match length (the bucket's upper bound) and source.",
            ["match_length", "source"],
        )
        self._request_acceptance_length = histogram(
            "request_acceptance_length",
            "Mean acceptance length of each choice that ended by itself and verified drafts: "
            "tokens per verify step.",
            _ACCEPTANCE_LENGTH_BUCKETS,
        )
        self._request_acceptance_ratio = histogram(
            "request_acceptance_ratio",
            "Accepted by verified draft tokens of each choice that ended by itself and verified "
            "some.",
            _ACCEPTANCE_RATE_BUCKETS,
        )
        self._generation_tokens = counter(
            "generation_tokens",
            "Output tokens generated; not those that a resuming client brought.",
        )
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of the choices whose first token came."
        )
        self._request_success = counter(
            "request_success", "Choices that ended, by reason.", ["finish_reason"]
        )
        self._requests_received = counter(
            "requests_received", "Requests received, over gRPC and HTTP, whatever their end."
        )
        self._request_errors = counter(
            "request_errors", "Requests that ended in an error, by gRPC status code.", ["code"]
        )
        self._requests_shed = counter(
            "requests_shed",
            "Requests that were refused for load or readiness, by reason.",
            ["reason"],
        )
        self._requests_expired = counter(
            "requests_expired",
            "Requests whose deadline passed, by what they were doing: waiting for a verifier, "
            "computing the prompt, or generating.",
            ["phase"],
        )
        self._requests_unread = counter(
            "requests_unread", "Requests that were ended because their client did not read."
        )
        self._request_resumes = counter(
            "request_resumes", "Choices that moved to another verifier, by reason.", ["reason"]
        )
        self._request_retries = counter(
            "request_retries",
            "Choices that a verifier refused before they began and that went to another one, by "
            "reason.",
            ["reason"],
        )
        self._messages_ignored = counter(
            "peer_messages_ignored",
            "Events of verifiers that are invalid, by reason.",
            ["peer", "reason"],
        )
        self._num_running = gauge("num_requests_running", "Choices in a verifier's batch.")
        self._num_waiting = gauge("num_requests_waiting", "Choices waiting for a verifier.")
        peers_connected = Gauge(
            "tandem_peers_connected",
            "Verifiers that this gateway has a session with, and drafters that answer at least one "
            "of them.",
            ["kind"],
            registry=registry,
        )
        self._verifiers_connected = peers_connected.labels("verifier")
        self._drafters_connected = peers_connected.labels("drafter")
        self._verifiers_outvoted = gauge(
            "verifiers_outvoted",
            "Connected verifiers that get no requests, because others serve another model by the "
            "same name.",
        )
        self._time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Arrival of a request to the first token of a choice sent, in seconds.",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self._inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Gap between two messages of one choice, in seconds.",
            _TOKEN_BUCKETS_S,
        )
        self._e2e_request_latency = histogram(
            "e2e_request_latency_seconds",
            "Arrival of a request to the last token of a choice sent, in seconds.",
            _REQUEST_BUCKETS_S,
        )
        self._draft_round_trip = histogram(
            "draft_round_trip_seconds",
            "From a verifier's sending a drafter a sequence's tokens to its receiving the hint for "
            "them, in seconds; at most one per step, of hints that arrived between steps.",
            _HOP_BUCKETS_S,
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED):
            self._request_success.labels(reason.name.lower())
        for code in ERROR_CODES:
            self._request_errors.labels(code)
        for shed_reason in _SHED_REASONS:
            self._requests_shed.labels(shed_reason)
        for phase in _EXPIRY_PHASES:
            self._requests_expired.labels(phase)
        for resume_reason in _RESUME_REASONS:
            self._request_resumes.labels(resume_reason)
        for refusal_reason in _REFUSAL_REASONS:
            self._request_retries.labels(refusal_reason)
        for ignored_reason in IGNORED_REASONS:
            self._messages_ignored.labels("verifier", ignored_reason)
        self._series_of_position: list[Counter] = []
        # By source and bucket of match lengths: draft tokens, accepted tokens.
        self._series_of_match = {
            int(source): [
                (
                    matched_draft_tokens.labels(str(bound), source.name.lower()),
                    matched_accepted_tokens.labels(str(bound), source.name.lower()),
                )
                for bound in _MATCH_LENGTHS
            ]
            for source in Source
        }

    def count_request(self) -> None:
        self._requests_received.inc()

    def count_error(self, error: Exception) -> None:
        self._request_errors.labels(code_name(error)).inc()

    def count_expired(self, phase: str) -> None:
        """A request's deadline passed; also an error with the code that its client gets."""
        self._requests_expired.labels(phase).inc()
        self._request_errors.labels("DEADLINE_EXCEEDED").inc()

    def count_unread(self, error: Exception) -> None:
        """A request was ended, with this error, because its client did not read."""
        self._requests_unread.inc()
        self.count_error(error)

    def count_steps(self, steps: Sequence[Step]) -> None:
        """Clients were shown these steps."""
        self._steps.inc(len(steps))
        self._generation_tokens.inc(sum([step.num_tokens for step in steps]))
        steps = [step for step in steps if step.num_draft_tokens]
        if not steps:
            return
        self._drafts.inc(len(steps))
        self._draft_tokens.inc(sum([step.num_draft_tokens for step in steps]))
        self._accepted_tokens.inc(sum([step.num_accepted_tokens for step in steps]))
        self._match_length.observe_all([step.matched_ngram_length for step in steps])
        num_accepted = [step.num_accepted_tokens for step in steps]
        for position, series in enumerate(self._series_of_position[: max(num_accepted)]):
            series.inc(sum([num > position for num in num_accepted]))
        # By source and match length: draft tokens, accepted tokens.
        by_match: dict[tuple[int, int], list[int]] = {}
        for step in steps:
            counts = by_match.setdefault((step.source, step.matched_ngram_length), [0, 0])
            counts[0] += step.num_draft_tokens
            counts[1] += step.num_accepted_tokens
        for (source, length), counts in by_match.items():
            buckets = self._series_of_match.get(source, self._series_of_match[0])
            draft_tokens, accepted_tokens = buckets[bisect_left(_MATCH_LENGTHS, length)]
            draft_tokens.inc(counts[0])
            accepted_tokens.inc(counts[1])

    def expect_positions(self, num_positions: int) -> None:
        """A verifier came that verifies so many drafts per step: each position gets a series."""
        known = len(self._series_of_position)
        for position in range(known, min(num_positions, _MAX_DRAFT_POSITIONS)):
            self._series_of_position.append(self._accepted_per_position.labels(str(position)))

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def count_end(self, reason: FinishReason) -> None:
        self._request_success.labels(reason.name.lower()).inc()

    def observe_acceptance(self, usage: Usage) -> None:
        """A choice ended by itself."""
        if usage.num_drafts:
            self._request_acceptance_length.observe(
                1 + usage.num_accepted_tokens / usage.num_drafts
            )
            self._request_acceptance_ratio.observe(
                usage.num_accepted_tokens / usage.num_draft_tokens
            )

    def count_shed(self, reason: str) -> None:
        self._requests_shed.labels(reason).inc()

    def count_resume(self, reason: str) -> None:
        """Another verifier goes on with a choice; the reason is one of `_RESUME_REASONS`."""
        self._request_resumes.labels(reason).inc()

    def count_retry(self, reason: str) -> None:
        """Another verifier gets a choice; the reason is one of `_REFUSAL_REASONS`."""
        self._request_retries.labels(reason).inc()

    def count_ignored(self, reason: str) -> None:
        """A verifier's message is ignored; the reason is one of `IGNORED_REASONS`."""
        self._messages_ignored.labels("verifier", reason).inc()

    def set_load(self, *, num_running: int, num_waiting: int) -> None:
        self._num_running.set(num_running)
        self._num_waiting.set(num_waiting)

    def set_connected(self, *, num_verifiers: int, num_drafters: int) -> None:
        self._verifiers_connected.set(num_verifiers)
        self._drafters_connected.set(num_drafters)

    def set_verifiers_outvoted(self, num_verifiers: int) -> None:
        self._verifiers_outvoted.set(num_verifiers)

    def observe_first_token(self, since_arrival_s: float) -> None:
        self._time_to_first_token.observe(since_arrival_s)

    def observe_next_token(self, since_last_s: float) -> None:
        self._inter_token_latency.observe(since_last_s)

    def observe_last_token(self, since_arrival_s: float) -> None:
        self._e2e_request_latency.observe(since_arrival_s)

    def observe_draft_round_trip(self, duration_s: float) -> None:
        """A verifier reports how long a drafter's answer took."""
        self._draft_round_trip.observe(duration_s)
