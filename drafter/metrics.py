"""What the drafter measures. Registers in the registry that it is given; knows no RPCs.

Labels: `outcome` is what became of a delta (a draft, no match, still indexing, appended without
asking for one, out of sync, invalid); `source` is where the draft was copied from, `none` without
one.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from drafter.batch.scan import (
    APPENDED,
    DRAFT,
    INDEXING,
    INVALID,
    NO_MATCH,
    OUT_OF_SYNC,
    POOL_DRAFT,
)
from drafter.failures import Failure
from drafter.history.lru import EvictionReason
from drafter.history.store import HistoryStore
from drafter.pool_index.records import FeedOutcome, TextEviction
from drafter.pools.snapshotter import SnapshotOutcome
from drafter.pools.store import PoolStore

# From one short history to a batch of thousands.
_DURATION_BUCKETS_S = (
    0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5,
)  # fmt: skip

_LABELS = {
    DRAFT: ("draft", "sequence"),
    POOL_DRAFT: ("draft", "pool"),
    APPENDED: ("appended", "none"),
    NO_MATCH: ("no_match", "none"),
    INDEXING: ("indexing", "none"),
    OUT_OF_SYNC: ("out_of_sync", "none"),
    INVALID: ("invalid", "none"),
}


class DrafterMetrics:
    """The drafter's metrics in one registry; used by the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sequences = Gauge(
            "tandem_drafter_sequences", "Sequences whose history is known.", registry=registry
        )
        self._history_bytes = Gauge(
            "tandem_drafter_history_bytes", "Bytes held for histories.", registry=registry
        )
        proposals = Counter(
            "tandem_drafter_proposals",
            "Answers to deltas, by what became of them.",
            ["outcome", "source"],
            registry=registry,
        )
        self._proposals = {
            outcome: proposals.labels(*labels) for outcome, labels in _LABELS.items()
        }
        self._proposal_seconds = Histogram(
            "tandem_drafter_proposal_seconds",
            "Time to answer one batch of deltas, in seconds, without long text's wait.",
            registry=registry,
            buckets=_DURATION_BUCKETS_S,
        )
        evictions = Counter(
            "tandem_drafter_evictions",
            "Sequences forgotten that nobody released.",
            ["reason"],
            registry=registry,
        )
        self._evictions = {reason: evictions.labels(reason.value) for reason in EvictionReason}
        failures = Counter(
            "tandem_drafter_internal_errors",
            "What failed while everything else went on, by what it was; the log says more.",
            ["reason"],
            registry=registry,
        )
        self._failures = {failure: failures.labels(failure.value) for failure in Failure}

        self._pool_bytes = Gauge(
            "tandem_drafter_pool_bytes",
            "Bytes held for shared pools, their indexes included.",
            registry=registry,
        )
        self._pools = Gauge("tandem_drafter_pools", "Shared pools.", registry=registry)
        self._pool_texts = Gauge(
            "tandem_drafter_pool_texts", "Texts kept in shared pools.", registry=registry
        )
        feeds = Counter(
            "tandem_drafter_pool_feeds",
            "Texts that were to be kept in a shared pool, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self._feeds = {outcome: feeds.labels(outcome.value) for outcome in FeedOutcome}
        text_evictions = Counter(
            "tandem_drafter_pool_evictions",
            "Texts of shared pools that were forgotten.",
            ["reason"],
            registry=registry,
        )
        self._text_evictions = {
            reason: text_evictions.labels(reason.value) for reason in TextEviction
        }
        snapshots = Counter(
            "tandem_drafter_snapshots",
            "Snapshots of all shared pools.",
            ["outcome"],
            registry=registry,
        )
        self._snapshots = {outcome: snapshots.labels(outcome.value) for outcome in SnapshotOutcome}

    def count_failure(self, failure: Failure, count: int = 1) -> None:
        self._failures[failure].inc(count)

    def watch_pools(self, store: PoolStore) -> None:
        """Reads the gauges from the store whenever they are scraped.

        That is in a thread of its own: what is read is a number that the store keeps, never one
        that is counted from its texts.
        """
        self._pool_bytes.set_function(lambda: store.occupied_bytes)
        self._pools.set_function(lambda: store.num_pools)
        self._pool_texts.set_function(lambda: store.num_texts)

    def count_feed(self, outcome: FeedOutcome) -> None:
        self._feeds[outcome].inc()

    def count_text_eviction(self, reason: TextEviction) -> None:
        self._text_evictions[reason].inc()

    def count_snapshot(self, outcome: SnapshotOutcome) -> None:
        self._snapshots[outcome].inc()

    def watch(self, store: HistoryStore) -> None:
        """Reads the gauges from the store whenever they are scraped, see `watch_pools`."""
        self._sequences.set_function(lambda: store.num_sequences)
        self._history_bytes.set_function(lambda: store.history_bytes)

    def count_eviction(self, reason: EvictionReason) -> None:
        self._evictions[reason].inc()

    def observe_batch(self, num_by_outcome: Sequence[int], duration_s: float) -> None:
        """Counts the answers of one batch.

        Args:
            num_by_outcome: how many sequences came to what, by `scan.OPEN` and so on.
            duration_s: how long it took, without long text's wait.
        """
        # One lock and one float per kind of outcome, not per sequence.
        for outcome, counter in self._proposals.items():
            if num_by_outcome[outcome] > 0:
                counter.inc(num_by_outcome[outcome])
        self._proposal_seconds.observe(duration_s)
