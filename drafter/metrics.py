"""The drafter's metrics, in a given registry. Does not know RPCs.

Labels: `outcome` is the result of a delta (a draft, no match, still indexing, appended only, out of
sync, invalid); `source` is where its draft was copied from, `none` without one.
"""

from collections.abc import Sequence
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from drafter.batch.answer import (
    APPENDED,
    DRAFT,
    INDEXING,
    INVALID,
    NO_MATCH,
    OUT_OF_SYNC,
    POOL_DRAFT,
)
from drafter.history.lru import EvictionReason
from drafter.history.store import HistoryStore
from drafter.pool_index.records import FeedOutcome, TextEviction
from drafter.pools.snapshotter import SnapshotOutcome
from drafter.pools.store import PoolStore
from drafter.refusals import Failure

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
        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"tandem_drafter_{name}", help_text, registry=registry)

        def counters(
            name: str, help_text: str, label: str, values: type[Enum]
        ) -> dict[Enum, Counter]:
            """Makes a counter per value of an enum."""
            counter = Counter(f"tandem_drafter_{name}", help_text, [label], registry=registry)
            return {value: counter.labels(value.value) for value in values}

        self._sequences = gauge("sequences", "Sequences whose history is known.")
        self._max_sequences = gauge("max_sequences", "Most sequences whose history is known.")
        self._history_bytes = gauge("history_bytes", "Bytes held for histories.")
        self._max_history_bytes = gauge("max_history_bytes", "Most bytes held for histories.")
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
        self._failures = counters(
            "internal_errors",
            "What failed while everything else went on, by what it was; the log says more.",
            "reason",
            Failure,
        )
        self._pool_bytes = gauge(
            "pool_bytes", "Bytes held for shared pools, their indexes included."
        )
        self._max_pool_bytes = gauge("max_pool_bytes", "Most bytes held for all shared pools.")
        self._events = {
            **counters(
                "evictions", "Sequences forgotten that nobody released.", "reason", EvictionReason
            ),
            **counters(
                "pool_feeds",
                "Texts that were to be kept in a shared pool, by what became of them.",
                "outcome",
                FeedOutcome,
            ),
            **counters(
                "pool_evictions",
                "Texts of shared pools that were forgotten.",
                "reason",
                TextEviction,
            ),
            **counters("snapshots", "Snapshots of all shared pools.", "outcome", SnapshotOutcome),
        }

    def watch(self, store: HistoryStore, pools: PoolStore) -> None:
        """Exports the stores' limits, and what they hold when they are scraped.

        The thread of the metrics endpoint does so: only numbers that the stores keep are read, none
        that would be counted from their contents.
        """
        self._sequences.set_function(lambda: store.num_sequences)
        self._history_bytes.set_function(lambda: store.history_bytes)
        self._pool_bytes.set_function(lambda: pools.occupied_bytes)
        self._max_sequences.set(store.limits.max_sequences)
        self._max_history_bytes.set(store.limits.max_history_bytes)
        self._max_pool_bytes.set(pools.limits.max_pools_bytes)

    def count_failure(self, failure: Failure, count: int = 1) -> None:
        self._failures[failure].inc(count)

    def count(self, event: Enum) -> None:
        """Counts a feeding, an eviction or a snapshot by its outcome or reason."""
        self._events[event].inc()

    def observe_batch(self, num_by_outcome: Sequence[int], duration_s: float) -> None:
        """Counts the answers of one batch by their outcomes, see `answer.OPEN`."""
        # One lock per outcome, not per sequence.
        for outcome, counter in self._proposals.items():
            if num_by_outcome[outcome] > 0:
                counter.inc(num_by_outcome[outcome])
        self._proposal_seconds.observe(duration_s)
