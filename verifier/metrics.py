"""The verifier's metrics: an observer of the engine. All have the label `model`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servicekit.telemetry.constant_labels import ConstantLabels
from servicekit.telemetry.tally_histogram import TallyHistogram
from verifier.drafters.messages import DrafterFault, DrafterState
from verifier.drafts.depth_policy import DepthOutcome
from verifier.drafts.draft_buffer import HintOutcome
from verifier.drafts.draft_wait import WaitOutcome
from verifier.engine.engine import Engine
from verifier.engine.observation import PHASES, EngineObserver, Fault, StepRecord
from verifier.structured.library_grammar import GrammarKind

_STEP_BUCKETS_S = (
    0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1, 3, 10,
)  # fmt: skip
_HOP_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_COMPILE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 3)
_DEPTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 24, 32)


class VerifierMetrics(EngineObserver):
    """Called by the engine thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_id: str,
        block_size: int,
        num_kv_blocks: int,
        max_num_seqs: int,
        max_num_waiting: int,
        max_waiting_tokens: int,
    ) -> None:
        """Registers them.

        Args:
            block_size: tokens per K/V block.
            max_num_waiting: limit of the sequences that wait for room.
            max_waiting_tokens: limit of the tokens that these have in all.
        """
        registry = self._registry = ConstantLabels(registry, {"model": model_id})
        for name, text, limit in (
            ("kv_blocks_total", "K/V blocks.", num_kv_blocks),
            ("verifier_max_num_seqs", "Most sequences in the batch.", max_num_seqs),
            ("verifier_max_num_waiting", "Most sequences that wait for room.", max_num_waiting),
            (
                "verifier_max_waiting_tokens",
                "Most tokens of the sequences that wait for room.",
                max_waiting_tokens,
            ),
        ):
            Gauge(f"tandem_{name}", text, registry=registry).set(limit)
        Gauge(
            "tandem_cache_config_info",
            "How the K/V cache is divided: tokens per block, and blocks.",
            ["block_size", "num_gpu_blocks"],
            registry=registry,
        ).labels(block_size, num_kv_blocks).set(1)
        self._step_duration = TallyHistogram(
            "tandem_step_duration_seconds",
            "Model step, in seconds, by phase: schedule, forward, verify, commit.",
            bounds=_STEP_BUCKETS_S,
            registry=registry,
            label="phase",
            label_values=PHASES,
        )
        self._step_tokens = TallyHistogram(
            "tandem_step_tokens",
            "Tokens scheduled per step, drafts included.",
            bounds=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._draft_wait = TallyHistogram(
            "tandem_draft_wait_seconds",
            "Time a step waited for hints, in seconds.",
            bounds=_HOP_BUCKETS_S,
            registry=registry,
        )
        self._draft_hop = TallyHistogram(
            "tandem_draft_hop_seconds",
            "From sending a drafter a sequence's tokens to the receipt of the hint that continues "
            "them, in seconds; hints that travelled while a step was computed do not count.",
            bounds=_HOP_BUCKETS_S,
            registry=registry,
        )
        waits = Counter(
            "tandem_draft_waits",
            "Steps that waited for hints, by whether a draft came meanwhile: paid, vain.",
            ["outcome"],
            registry=registry,
        )
        self._waits = {outcome: waits.labels(outcome.value) for outcome in WaitOutcome}
        drafter_faults = Counter(
            "tandem_verifier_drafter_faults",
            "What drafters did wrong, by kind; it cost drafts, nothing else.",
            ["reason"],
            registry=registry,
        )
        self._drafter_faults = {fault: drafter_faults.labels(fault.value) for fault in DrafterFault}
        faults = Counter(
            "tandem_verifier_internal_errors",
            "Faults of the verifier's own that ended at most one sequence, by phase.",
            ["phase"],
            registry=registry,
        )
        self._faults = {fault: faults.labels(fault.value) for fault in Fault}
        self._depth = TallyHistogram(
            "tandem_speculation_depth",
            "Drafts verified per sequence and step, 0 included.",
            bounds=_DEPTH_BUCKETS,
            registry=registry,
        )
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
        grammars = Counter(
            "tandem_grammars",
            "Grammars of structured output, by kind, and whether they could be used: compiled, "
            "refused.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._grammars = {
            (kind, can_be_used): grammars.labels(kind.value, outcome)
            for kind in GrammarKind
            for can_be_used, outcome in ((True, "compiled"), (False, "refused"))
        }
        self._grammar_compile = TallyHistogram(
            "tandem_grammar_compile_seconds",
            "Time that compiling a grammar took, in seconds, without its wait for others.",
            bounds=_COMPILE_BUCKETS_S,
            registry=registry,
        )
        self._cost_error = TallyHistogram(
            "tandem_step_cost_error_ratio",
            "Error of a step's expected duration: the difference / the duration.",
            bounds=_ERROR_BUCKETS,
            registry=registry,
        )

    def stepped(self, record: StepRecord) -> None:
        for phase, duration_s in record.phase_durations_s.items():
            self._step_duration.observe(duration_s, phase)
        self._step_tokens.observe(record.stats.num_scheduled_tokens)
        self._draft_wait.observe(record.stats.draft_wait_s)
        self._depth.observe_all(
            len(item.draft_token_ids) for item in record.scheduled if item.is_sampled
        )
        if record.speculation is not None:
            self._count_speculation(record.speculation, record.stats.draft_wait_s)

    def hop_measured(self, duration_s: float) -> None:
        self._draft_hop.observe(duration_s)

    def wait_ended(self, outcome: WaitOutcome) -> None:
        self._waits[outcome].inc()

    def drafter_failed(self, fault: DrafterFault) -> None:
        self._drafter_faults[fault].inc()

    def grammar_compiled(self, kind: GrammarKind, can_be_used: bool, duration_s: float) -> None:
        """For any thread."""
        self._grammars[kind, can_be_used].inc()
        self._grammar_compile.observe(duration_s)

    def fault_met(self, fault: Fault) -> None:
        self._faults[fault].inc()

    def watch(self, engine: Engine) -> None:
        """Exports, at every scrape, what the engine's load says."""
        self._registry.register(_LoadCollector(engine))

    def _count_speculation(self, outcome: DepthOutcome, draft_wait_s: float) -> None:
        error_s = abs(outcome.duration_s - outcome.expected_s)
        self._cost_error.observe(error_s / outcome.duration_s)
        if outcome.plain_s is not None:
            self._decode_seconds.inc(outcome.duration_s + draft_wait_s)
            self._plain_decode_seconds.inc(outcome.plain_s)


class _LoadCollector(Collector):
    """The metrics that show the engine's load: read at a scrape, and no work in any step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        load = self._engine.load
        for name, text, value in (
            ("kv_blocks_used", "K/V blocks held by sequences.", load.num_kv_blocks_used),
            ("verifier_sequences_running", "Sequences in the batch.", load.num_running),
            ("verifier_sequences_waiting", "Sequences waiting for room.", load.num_waiting),
            (
                "verifier_waiting_tokens",
                "Tokens of the sequences waiting for room.",
                load.num_waiting_tokens,
            ),
            (
                "verifier_pending_commands",
                "Commands that the engine has not handled yet.",
                self._engine.num_pending_commands,
            ),
        ):
            yield GaugeMetricFamily(f"tandem_{name}", text, value=value)
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Tokens of sequences looked up in the prefix cache.",
                load.num_prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", load.num_prefix_cache_hits),
            (
                "preemptions",
                "Sequences that gave their K/V blocks back and went back to waiting.",
                load.num_preemptions,
            ),
        ):
            yield CounterMetricFamily(f"tandem_{name}", text, value=value)
        hints = CounterMetricFamily("tandem_draft_hints", "Hints, by outcome.", labels=["outcome"])
        for outcome in HintOutcome:
            hints.add_metric([outcome.value], load.num_hints.get(outcome, 0))
        yield hints
        drafters = GaugeMetricFamily(
            "tandem_verifier_drafters",
            "Drafters in use, by state: connecting, up, slow, down.",
            labels=["state"],
        )
        for state in DrafterState:
            if state is not DrafterState.IDLE:
                drafters.add_metric([state.value], load.num_drafters.get(state, 0))
        yield drafters
