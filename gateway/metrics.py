"""The gateway's metrics.

Owns their names, labels and buckets; those by model are in `model_metrics.py`. Knows no request.
Labels come from small fixed sets.
"""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.errors import ERROR_CODES, UnreadError, VerifierFullError, code_name
from gateway.model_metrics import MetricsByModel, ModelMetrics
from gateway.requests.admission import Admission

# A draft's round trip takes some hundred microseconds; verifiers wait 0.25 s at most by default.
_HOP_BUCKETS_S = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.25,
)  # fmt: skip
# Every labelled series begins at 0: Prometheus sees no increase in a series that appears with its
# first event.
_SHED_REASONS = (
    "concurrency",
    "waiting_tokens",
    "model_concurrency",
    "model_waiting_tokens",
    "tenant_concurrency",
    "tenant_waiting_tokens",
    "bodies",
    "tenant_bodies",
    "draining",
    "no_verifier",
    "verifier_full",
)
_EXPIRY_PHASES = ("queue", "prefill", "decode")
_RESUME_REASONS = ("verifier_gone", "verifier_draining", "verifier_full", "verifier_unable")
_RETRY_REASONS = ("full", "draining", "waiting")
_COPY_OUTCOMES = ("sent", "failed", "dropped")
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


class GatewayMetrics:
    """All metrics of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"tandem_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tandem_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"tandem_{name}", text, registry=registry, buckets=buckets)

        self._by_model = MetricsByModel(registry)
        self._requests_received = counter(
            "requests_received",
            "Requests received, over gRPC and HTTP, whatever their end; without the gRPC calls "
            "that are refused before their request is looked at (tandem_rpc_requests).",
        )
        self._request_errors = counter(
            "request_errors",
            "Of the requests received, those that ended in an error, by gRPC status code.",
            ["code"],
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
            "Choices that went to another verifier before they began, by reason: the first one "
            "refused them, or had them waiting while the other one had room.",
            ["reason"],
        )
        self._messages_ignored = counter(
            "peer_messages_ignored",
            "Events of verifiers that are invalid, by reason.",
            ["peer", "reason"],
        )
        self._pool_copies = counter(
            "pool_copies",
            "Texts for the pool of another drafter, by outcome: it has the text; it did not take "
            "it; too many waited for it.",
            ["outcome"],
        )
        self._num_running = gauge("num_requests_running", "Choices in a verifier's batch.")
        self._num_waiting = gauge("num_requests_waiting", "Choices waiting for a verifier.")
        self._num_admitted = gauge(
            "num_requests_admitted",
            "Choices of admitted requests: running, waiting, or being prepared or read.",
        )
        self._max_admitted = gauge("max_concurrent_requests", "Most choices admitted at a time.")
        self._waiting_tokens = gauge(
            "waiting_prompt_tokens", "Prompt tokens of the choices that have no output yet."
        )
        self._max_waiting_tokens = gauge(
            "max_waiting_prompt_tokens",
            "Most prompt tokens of choices that have no output yet; a single one may have more.",
        )
        self._kv_cache_usage = gauge(
            "kv_cache_usage_perc",
            "K/V blocks in use at the verifiers that have choices of this gateway, / all blocks of "
            "its verifiers; 1: all. For endpoint pickers.",
        )
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
        self._draft_round_trip = histogram(
            "draft_round_trip_seconds",
            "From a verifier's sending a drafter a sequence's tokens to its receiving the hint for "
            "them, in seconds; at most one per step, of hints that arrived between steps.",
            _HOP_BUCKETS_S,
        )
        for code in ERROR_CODES:
            self._request_errors.labels(code)
        for shed_reason in _SHED_REASONS:
            self._requests_shed.labels(shed_reason)
        for phase in _EXPIRY_PHASES:
            self._requests_expired.labels(phase)
        for resume_reason in _RESUME_REASONS:
            self._request_resumes.labels(resume_reason)
        for retry_reason in _RETRY_REASONS:
            self._request_retries.labels(retry_reason)
        for outcome in _COPY_OUTCOMES:
            self._pool_copies.labels(outcome)
        for ignored_reason in IGNORED_REASONS:
            self._messages_ignored.labels("verifier", ignored_reason)

    def count_request(self) -> None:
        self._requests_received.inc()

    def count_error(self, error: Exception) -> None:
        """A request ended in this error."""
        if isinstance(error, UnreadError):
            self._requests_unread.inc()
        elif isinstance(error, VerifierFullError):
            self.count_shed("verifier_full")
        self.count_code(code_name(error))

    def count_code(self, code: str) -> None:
        """A request ended in an error; the code is one of `ERROR_CODES`."""
        self._request_errors.labels(code).inc()

    def count_expired(self, phase: str) -> None:
        """A request's deadline passed; also an error with the code that its client gets."""
        self._requests_expired.labels(phase).inc()
        self._request_errors.labels("DEADLINE_EXCEEDED").inc()

    def expect_model(self, model_id: str, num_positions: int) -> None:
        """A verifier came: series of its model begin.

        Args:
            num_positions: how many drafts it verifies per step.
        """
        self.of_model(model_id).expect_positions(num_positions)

    def of_model(self, model_id: str) -> ModelMetrics:
        """The metrics of one model's requests; of a model that verifiers serve."""
        return self._by_model.of(model_id)

    def count_shed(self, reason: str) -> None:
        self._requests_shed.labels(reason).inc()

    def count_resume(self, reason: str) -> None:
        """Another verifier goes on with a choice; the reason is one of `_RESUME_REASONS`."""
        self._request_resumes.labels(reason).inc()

    def count_retry(self, reason: str) -> None:
        """Another verifier gets a choice; the reason is one of `_RETRY_REASONS`."""
        self._request_retries.labels(reason).inc()

    def count_ignored(self, reason: str) -> None:
        """A verifier's message is ignored; the reason is one of `IGNORED_REASONS`."""
        self._messages_ignored.labels("verifier", reason).inc()

    def count_pool_copy(self, outcome: str) -> None:
        """A text was copied to another drafter, or not; the outcome is one of `_COPY_OUTCOMES`."""
        self._pool_copies.labels(outcome).inc()

    def set_load(self, *, num_running: int, num_waiting: int) -> None:
        self._num_running.set(num_running)
        self._num_waiting.set(num_waiting)

    def watch_admission(self, admission: Admission) -> None:
        """Exports the limits, and at every scrape what is admitted."""
        self._max_admitted.set(admission.max_choices)
        self._max_waiting_tokens.set(admission.max_waiting_tokens)
        self._num_admitted.set_function(lambda: admission.num_choices)
        self._waiting_tokens.set_function(lambda: admission.num_waiting_tokens)

    def watch_kv_cache(self, usage: Callable[[], float]) -> None:
        """Exports a share of K/V blocks, which any thread may ask for, at every scrape."""
        self._kv_cache_usage.set_function(usage)

    def set_connected(self, *, num_verifiers: int, num_drafters: int) -> None:
        self._verifiers_connected.set(num_verifiers)
        self._drafters_connected.set(num_drafters)

    def set_verifiers_outvoted(self, num_verifiers: int) -> None:
        self._verifiers_outvoted.set(num_verifiers)

    def observe_draft_round_trip(self, duration_s: float) -> None:
        """A verifier reports how long a drafter's answer took."""
        self._draft_round_trip.observe(duration_s)
