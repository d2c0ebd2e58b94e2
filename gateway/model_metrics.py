"""The gateway's metrics of requests, by model.

Owns their names, labels and buckets. Knows no request. The label `model` has the names that
verifiers report, never those that clients send; a draft's position is bounded by the verifiers'
limit on drafts per step.

Counters of tokens, steps and drafts count shown output, so they equal the sums of `Usage` over all
choices that finished.
"""

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.messages.response import Step
from tandem.speculation_note import speculation_note
from tandem.values import FinishReason, Usage

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
_LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip

# Further positions have no series, whatever a verifier's limit.
_MAX_DRAFT_POSITIONS = 512
# Verifiers that come and go for months may report any number of models.
_MAX_MODELS = 32
_OTHER_MODELS = "other"
# Those that the note about speculation is of.
_LAST_CHOICES = 256

#: The labels of an exemplar: the id of the trace; None: the request is not traced.
Exemplar = dict[str, str] | None


class MetricsByModel:
    """All metrics with the label `model`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tandem_{name}", text, ["model", *labels], registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"tandem_{name}", text, ["model"], registry=registry, buckets=buckets)

        self.steps = counter("generation_steps", "Model steps that gave a sequence tokens.")
        self.drafts = counter(
            "spec_decode_num_drafts", "Of these steps, those that verified drafts."
        )
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft, from 0.",
            "position",
        )
        self.generation_tokens = counter(
            "generation_tokens",
            "Output tokens generated; not those that a resuming client brought.",
        )
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of the choices whose first token came."
        )
        self.success = counter("request_success", "Choices that ended, by reason.", "finish_reason")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Arrival of a request to the first token of a choice sent, in seconds.",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Gap between two messages of one choice, in seconds.",
            _TOKEN_BUCKETS_S,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds",
            "Arrival of a request to the last token of a choice sent, in seconds.",
            _REQUEST_BUCKETS_S,
        )
        self.queue_time = histogram(
            "request_queue_time_seconds",
            "Opening a choice at a verifier to its place in a batch, in seconds; of choices whose "
            "first token came.",
            _REQUEST_BUCKETS_S,
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds",
            "A choice's place in a batch to its first token sent, in seconds.",
            _REQUEST_BUCKETS_S,
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "First to last token sent of a choice that ended by itself, / its tokens after the "
            "first, in seconds.",
            _TOKEN_BUCKETS_S,
        )
        self.prompt_lengths = histogram(
            "request_prompt_tokens",
            "Prompt tokens of each choice that ended by itself.",
            _LENGTH_BUCKETS,
        )
        self.generation_lengths = histogram(
            "request_generation_tokens",
            "Output tokens of each choice that ended by itself; not those that a resuming client "
            "brought.",
            _LENGTH_BUCKETS,
        )
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model_id: str) -> "ModelMetrics":
        """A model's metrics. Those of models after the first `_MAX_MODELS` are counted together."""
        known = self._models.get(model_id)
        if known is None:
            label = model_id if len(self._models) < _MAX_MODELS else _OTHER_MODELS
            known = self._models.get(label) or ModelMetrics(self, label)
            self._models[label] = known
        return known


class ModelMetrics:
    """The metrics of one model's requests."""

    def __init__(self, families: MetricsByModel, model: str) -> None:
        """Begins all series, at 0."""
        self._model = model
        self._last_usages: deque[Usage] = deque(maxlen=_LAST_CHOICES)
        self._steps = families.steps.labels(model)
        self._drafts = families.drafts.labels(model)
        self._draft_tokens = families.draft_tokens.labels(model)
        self._accepted_tokens = families.accepted_tokens.labels(model)
        self._accepted_per_position = families.accepted_per_position
        self._series_of_position: list[Counter] = []
        self._generation_tokens = families.generation_tokens.labels(model)
        self._prompt_tokens = families.prompt_tokens.labels(model)
        self._success = {reason: families.success.labels(model, reason) for reason in FinishReason}
        self._time_to_first_token = families.time_to_first_token.labels(model)
        self._inter_token_latency = families.inter_token_latency.labels(model)
        self._e2e_latency = families.e2e_latency.labels(model)
        self._queue_time = families.queue_time.labels(model)
        self._prefill_time = families.prefill_time.labels(model)
        self._time_per_output_token = families.time_per_output_token.labels(model)
        self._prompt_lengths = families.prompt_lengths.labels(model)
        self._generation_lengths = families.generation_lengths.labels(model)

    def expect_positions(self, num_positions: int) -> None:
        """A verifier verifies so many drafts per step: each position gets a series."""
        known = len(self._series_of_position)
        for position in range(known, min(num_positions, _MAX_DRAFT_POSITIONS)):
            self._series_of_position.append(
                self._accepted_per_position.labels(self._model, str(position))
            )

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
        num_accepted = [step.num_accepted_tokens for step in steps]
        for position, series in enumerate(self._series_of_position[: max(num_accepted)]):
            series.inc(sum([num > position for num in num_accepted]))

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def count_end(self, reason: FinishReason) -> None:
        self._success[reason].inc()

    @property
    def speculation_note(self) -> str:
        """What drafts brought the last choices; "" if that is not known."""
        return speculation_note(self._last_usages)

    def note_usage(self, usage: Usage) -> None:
        """A choice ended by itself."""
        self._last_usages.append(usage)

    def observe_first_token(self, since_arrival_s: float, exemplar: Exemplar) -> None:
        self._time_to_first_token.observe(since_arrival_s, exemplar)

    def observe_next_token(self, since_last_s: float, exemplar: Exemplar) -> None:
        self._inter_token_latency.observe(since_last_s, exemplar)

    def observe_last_token(self, since_arrival_s: float, exemplar: Exemplar) -> None:
        self._e2e_latency.observe(since_arrival_s, exemplar)

    def observe_queue(self, duration_s: float) -> None:
        self._queue_time.observe(duration_s)

    def observe_prefill(self, duration_s: float) -> None:
        self._prefill_time.observe(duration_s)

    def observe_time_per_output_token(self, duration_s: float) -> None:
        self._time_per_output_token.observe(duration_s)

    def observe_lengths(self, num_prompt_tokens: int, num_generated: int) -> None:
        """A choice ended by itself."""
        self._prompt_lengths.observe(num_prompt_tokens)
        self._generation_lengths.observe(num_generated)
