"""The verifier's metrics: an observer of the engine."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from servicekit.tally_histogram import TallyHistogram
from verifier.drafts.draft_buffer import HintOutcome
from verifier.drafts.speculation_gain import DecodeCosts
from verifier.engine.observation import EngineLoad, Fault, StepRecord

_STEP_BUCKETS_S = (
    0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1, 3, 10,
)  # fmt: skip
_HOP_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DEPTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 24, 32)


class VerifierMetrics:
    """An `EngineObserver`. Called by the engine thread; prometheus_client does the locking."""

    def __init__(self, registry: CollectorRegistry, *, num_kv_blocks: int) -> None:
        self._step_duration = Histogram(
            "tandem_step_duration_seconds",
            "Model step, in seconds, by phase: schedule, forward, verify, commit.",
            ["phase"],
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._step_tokens = Histogram(
            "tandem_step_tokens",
            "Tokens scheduled per step, drafts included.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._draft_wait = Histogram(
            "tandem_draft_wait_seconds",
            "Time a step waited for hints, in seconds.",
            buckets=_HOP_BUCKETS_S,
            registry=registry,
        )
        self._draft_hop = Histogram(
            "tandem_draft_hop_seconds",
            "From a decision's publication to the receipt of its hint, in seconds.",
            buckets=_HOP_BUCKETS_S,
            registry=registry,
        )
        hints = Counter("tandem_draft_hints", "Hints, by outcome.", ["outcome"], registry=registry)
        self._hints = {outcome: hints.labels(outcome.value) for outcome in HintOutcome}
        self._kv_blocks_used = Gauge(
            "tandem_kv_blocks_used", "K/V blocks held by sequences.", registry=registry
        )
        Gauge("tandem_kv_blocks_total", "K/V blocks.", registry=registry).set(num_kv_blocks)
        self._running = Gauge(
            "tandem_verifier_sequences_running", "Sequences in the batch.", registry=registry
        )
        self._waiting = Gauge(
            "tandem_verifier_sequences_waiting", "Sequences waiting for room.", registry=registry
        )
        self._prefix_cache_queries = Counter(
            "tandem_prefix_cache_queries",
            "Tokens of sequences looked up in the prefix cache.",
            registry=registry,
        )
        self._prefix_cache_hits = Counter(
            "tandem_prefix_cache_hits", "Tokens found in the prefix cache.", registry=registry
        )
        self._preemptions = Counter(
            "tandem_preemptions",
            "Sequences that gave their K/V blocks back and went back to waiting.",
            registry=registry,
        )
        self._counted = EngineLoad()
        self._pending_commands = Gauge(
            "tandem_verifier_pending_commands",
            "Commands that the engine has not handled yet.",
            registry=registry,
        )
        faults = Counter(
            "tandem_verifier_internal_errors",
            "Faults of the verifier's own that ended at most one sequence, by phase.",
            ["phase"],
            registry=registry,
        )
        self._faults = {fault: faults.labels(fault.value) for fault in Fault}
        self._depth = TallyHistogram(
            "tandem_spec_decode_depth",
            "Drafts verified per sequence and step, 0 included.",
            bounds=_DEPTH_BUCKETS,
            registry=registry,
        )
        self._decode_costs = DecodeCosts()
        self._decode_seconds = Counter(
            "tandem_decode_seconds",
            "Time of steps in which all sequences decoded, waits for hints included, in seconds.",
            registry=registry,
        )
        self._plain_decode_seconds = Counter(
            "tandem_decode_plain_seconds",
            "Estimate of what plain decoding would have taken for the same tokens, in seconds.",
            registry=registry,
        )

    def stepped(self, record: StepRecord) -> None:
        for phase, duration_s in record.phase_durations_s.items():
            self._step_duration.labels(phase).observe(duration_s)
        self._step_tokens.observe(record.stats.num_scheduled_tokens)
        self._draft_wait.observe(record.stats.draft_wait_s)
        self._depth.observe_all(
            len(item.draft_token_ids) for item in record.scheduled if item.samples
        )
        if all(item.samples and item.num_new_tokens == 1 for item in record.scheduled):
            self._weigh_decode(record)

    def settled(self, load: EngineLoad) -> None:
        self._kv_blocks_used.set(load.num_kv_blocks_used)
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        before, self._counted = self._counted, load
        self._prefix_cache_queries.inc(
            load.num_prefix_cache_queries - before.num_prefix_cache_queries
        )
        self._prefix_cache_hits.inc(load.num_prefix_cache_hits - before.num_prefix_cache_hits)
        self._preemptions.inc(load.num_preemptions - before.num_preemptions)

    def hint_ended(self, outcome: HintOutcome) -> None:
        self._hints[outcome].inc()

    def hop_measured(self, duration_s: float) -> None:
        self._draft_hop.observe(duration_s)

    def fault_met(self, fault: Fault) -> None:
        self._faults[fault].inc()

    def watch_commands(self, num_pending: Callable[[], int]) -> None:
        """Sets the source of the gauge of pending commands."""
        self._pending_commands.set_function(num_pending)

    def _weigh_decode(self, record: StepRecord) -> None:
        num_sequences = len(record.scheduled)
        time = self._decode_costs.weigh(
            num_sequences=num_sequences,
            num_scheduled_tokens=record.stats.num_scheduled_tokens,
            num_output_tokens=num_sequences + int(record.verdict.num_accepted_tokens.sum()),
            duration_s=record.stats.duration_s,
            draft_wait_s=record.stats.draft_wait_s,
        )
        if time is not None:
            self._decode_seconds.inc(time.took_s)
            self._plain_decode_seconds.inc(time.plain_s)
