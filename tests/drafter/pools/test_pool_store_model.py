"""Pools against a naive model and brute-force drafts, under any sequence of events.

The model does not count bytes. It checks what the bounds may do: only the oldest text is evicted,
from its beginning; and the remaining texts are drafted from as if no others had ever been fed.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from drafter.ngram.table import EARLIEST, LATEST, LONGEST
from drafter.pool_index.records import (
    FeedOutcome,
    PoolLimits,
    PoolText,
    TextEviction,
)
from drafter.pools.snapshot import read_pool, snapshots_in, write_pool
from drafter.pools.store import PoolStore
from tests.drafter import brute_force_pool
from tests.drafter.pool_drafts import draft_from_pool
from tests.drafter.running_drafter import FakeClock
from tests.volume import examples

LIMITS = PoolLimits(max_pool_bytes=1 << 16, max_pools_bytes=1 << 17, pool_ttl_s=60.0)


def ngrams(min_ngram: int, max_ngram: int) -> int:
    return (1 << max_ngram) - (1 << (min_ngram - 1))


@dataclass
class FedText:
    """A text in the model: its remaining tokens, and when it was fed."""

    token_ids: list[int]
    fed_at_s: float


class PoolStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.model: dict[str, list[FedText]] = {}
        self.evictions: list[TextEviction] = []
        self.outcomes: list[FeedOutcome] = []

    pool_ids = st.sampled_from(["red", "blue", "green"])
    sizes = st.sampled_from([(2, 5), (1, 3), (2, 2), (3, 8)])
    # Few distinct tokens, which fill links, or many, which fill pages.
    texts = st.one_of(
        st.lists(st.integers(0, 2), max_size=40),
        st.tuples(
            st.integers(0, 2**32 - 1), st.integers(0, 900), st.sampled_from([2, 50, 2**32])
        ).map(lambda t: np.random.default_rng(t[0]).integers(0, t[2], t[1]).tolist()),
    )

    @initialize(key_bits=st.sampled_from([3, 6, 27, 27, 27]), seed=st.integers(0, 2**64 - 1))
    def start(self, key_bits: int, seed: int) -> None:
        """With few bits most n-grams collide."""
        self.key_bits, self.seed = key_bits, seed
        self.store = self.make_store()

    def make_store(self) -> PoolStore:
        return PoolStore(
            LIMITS,
            clock=self.clock,
            seed=self.seed,
            on_feed=self.outcomes.append,
            on_eviction=self.evictions.append,
            key_bits=self.key_bits,
        )

    @rule(
        pool_id=pool_ids,
        token_ids=texts,
        size=sizes,
        num_pieces=st.integers(0, 20),
    )
    def feed(
        self,
        pool_id: str,
        token_ids: list[int],
        size: tuple[int, int],
        num_pieces: int,
    ) -> None:
        outcome = self.store.feed(
            pool_id,
            np.array(token_ids, dtype=np.uint32),
            ngram_mask=ngrams(*size),
        )
        if len(token_ids) < 2:
            assert outcome is FeedOutcome.TOO_SHORT
        elif outcome is not FeedOutcome.DROPPED:
            assert outcome is FeedOutcome.KEPT
            fed = FedText(token_ids, self.clock.now_s)
            self.model.setdefault(pool_id, []).append(fed)
        for _ in range(num_pieces):
            self.store.work()
        self.forget_evicted_texts()

    @rule(seconds=st.sampled_from([1.0, 20.0, 59.5, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(num_pieces=st.integers(1, 10))
    def work(self, num_pieces: int) -> None:
        for _ in range(num_pieces):
            self.store.work()
        self.forget_evicted_texts()

    @rule()
    def expire(self) -> None:
        self.store.finish()
        self.forget_evicted_texts()
        for texts in self.model.values():
            assert all(self.clock.now_s - t.fed_at_s < LIMITS.pool_ttl_s for t in texts)
        for pool_id, texts in self.model.items():
            # Of its last text a single token may be left, which `texts_of` leaves out.
            assert texts or not list(self.store.texts_of(pool_id))
            assert not texts or pool_id in self.store.pool_ids()

    @rule()
    def go_through_a_snapshot(self) -> None:
        """A new store, from files, in the place of the old one."""
        self.expire()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for pool_id in self.store.pool_ids():
                # As `Snapshotter` does: of a pool's last text a single token may be left.
                if kept := list(self.store.texts_of(pool_id)):
                    write_pool(folder, kept)
            texts = [text for path in snapshots_in(folder) for text in read_pool(path)]
        self.store = self.make_store()
        for text in sorted(texts, key=lambda text: -text.age_s):
            assert self.store.restore(text) is FeedOutcome.KEPT
            self.store.finish()
        self.forget_evicted_texts()

    @rule(
        pool_id=pool_ids,
        size=sizes,
        tie=st.sampled_from([EARLIEST, LATEST, LONGEST]),
        where=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
        length=st.integers(0, 12),
        more=st.lists(st.integers(0, 2), max_size=3),
    )
    def propose(
        self,
        pool_id: str,
        size: tuple[int, int],
        tie: int,
        where: tuple[int, int],
        length: int,
        more: list[int],
    ) -> None:
        """A context cut out of any pool's text, with or without other tokens."""
        all_texts = [text.token_ids for texts in self.model.values() for text in texts]
        context = list(more)
        if all_texts:
            text = all_texts[where[0] % len(all_texts)]
            end = where[1] % (len(text) + 1)
            context = text[max(0, end - length) : end] + more[:1]
        self.store.block_of(pool_id, ngrams(*size))
        self.expire()
        pool = self.store.block_of(pool_id, ngrams(*size))
        options: dict[str, Any] = {
            "min_ngram": size[0],
            "max_ngram": size[1],
            "tie": tie,
            "max_draft_tokens": 10,
        }
        found = draft_from_pool(self.store.arena, pool, context, **options) if pool else None
        kept = [text.token_ids for text in self.model.get(pool_id, [])]
        assert found == brute_force_pool.find(kept, context, **options)

    def forget_evicted_texts(self) -> None:
        """Removes evicted tokens from the model: the oldest, from a text's beginning."""
        for pool_id, texts in self.model.items():
            kept: list[PoolText] = list(self.store.texts_of(pool_id))
            num_evicted = len(texts) - len(kept)
            assert num_evicted >= 0
            # Of the oldest one a single token may be left, which `texts_of` leaves out.
            texts[:] = texts[num_evicted:]
            for i, (text, known) in enumerate(zip(kept, texts, strict=True)):
                token_ids = text.token_ids.tolist()
                assert text.pool_id == pool_id
                assert token_ids == known.token_ids[len(known.token_ids) - len(token_ids) :]
                assert i == 0 or len(token_ids) == len(known.token_ids)
                known.token_ids = token_ids
                # While it waited, others may have come before it: it counts as no older than they.
                fed_at_s = self.clock.now_s - text.age_s
                assert known.fed_at_s <= fed_at_s + 1e-6
                known.fed_at_s = fed_at_s

    @invariant()
    def keeps_its_invariants(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()


PoolStoreMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestPoolStoreAgainstModel = PoolStoreMachine.TestCase
