"""A pool's index at sizes where its table has many parts, and its bytes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drafter.pool_index.arena import BLOCK_BITS, BLOCK_WORDS, DEPTH
from drafter.pool_index.records import FeedOutcome, PoolLimits
from drafter.pool_index.tokens import FIRST
from drafter.pools.store import PoolStore
from tests.drafter.pool_drafts import draft_from_pool

ROOT = Path(__file__).parents[3]
NGRAMS = 0b11110
EARLIEST, LATEST = 0, 1
TOKENS_PER_BLOCK = BLOCK_WORDS - FIRST


class FakePools:
    """A store with a clock that the test sets, and every text that it was fed."""

    def __init__(self, limits: PoolLimits) -> None:
        self.now_s = 0.0
        self.store = PoolStore(limits, clock=lambda: self.now_s, seed=7)
        self.texts: list[np.ndarray] = []

    def feed(self, token_ids: np.ndarray) -> None:
        self.store.feed("p", token_ids, ngram_mask=NGRAMS)
        self.store.finish()
        self.texts.append(token_ids)

    def check_samples(self, num_samples: int) -> None:
        """Compares drafts for n-grams of the remaining texts with a search of all of them."""
        rng = np.random.default_rng(5)
        texts = [text.token_ids for text in self.store.texts_of("p")]
        token_ids = np.concatenate(texts)
        text_of = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        for _ in range(num_samples):
            n = int(rng.integers(2, 6))
            start = int(rng.integers(0, len(token_ids) - n))
            ngram = token_ids[start : start + n]
            is_here = text_of[:-n] == text_of[n:]  # a token of the same text follows
            for k in range(n):
                is_here = is_here & (token_ids[k : len(token_ids) - n + k] == ngram[k])
            places = np.flatnonzero(is_here) + n
            for tie, at in ((EARLIEST, 0), (LATEST, -1)):
                expected: list[int] = []
                if len(places) > 0:
                    following = slice(places[at], places[at] + 4)
                    is_same_text = text_of[following] == text_of[places[at]]
                    expected = token_ids[following][is_same_text].tolist()
                assert self.draft(tuple(ngram.tolist()), tie) == expected

    def draft(self, ngram: tuple[int, ...], tie: int) -> list[int]:
        n = len(ngram)
        found = draft_from_pool(
            self.store.arena,
            self.store.block_of("p", NGRAMS),
            ngram,
            min_ngram=n,
            max_ngram=n,
            tie=tie,
            max_draft_tokens=4,
        )
        if found is None:
            return []
        draft, match_length = found
        assert match_length == n
        return draft


def test_a_large_pool_answers_for_every_ngram_and_after_evicting_half() -> None:
    limits = PoolLimits(max_pool_bytes=32 << 20, max_pools_bytes=64 << 20, pool_ttl_s=1000)
    pools = FakePools(limits)
    rng = np.random.default_rng(1)
    for i in range(80):
        vocabulary = 40 if i % 8 == 0 else 2**32
        pools.feed(rng.integers(0, vocabulary, 1000).astype(np.uint32))
        pools.now_s += 10
    header = pools.store.block_of("p", NGRAMS) << BLOCK_BITS
    assert pools.store.arena[header + DEPTH] > 10, "the directory is in several parts"
    pools.check_samples(1000)
    evicted = [pools.texts[0], pools.texts[20]]
    grown_bytes = pools.store.occupied_bytes
    pools.now_s = 1000.0 + 40 * 10
    pools.store.finish()
    pools.store.check_integrity()
    assert pools.store.num_texts == 39
    pools.check_samples(1000)
    for text in evicted[1:]:
        assert pools.draft(tuple(text[100:105].tolist()), EARLIEST) == []
    # Pages that emptied have been joined.
    assert pools.store.occupied_bytes < 0.7 * grown_bytes
    pools.now_s = 1e6
    pools.store.finish()
    assert pools.store.occupied_bytes == 0


def test_a_pool_emptied_to_the_end_of_a_block_continues_in_the_next() -> None:
    limits = PoolLimits(max_pool_bytes=1 << 18, max_pools_bytes=1 << 20, pool_ttl_s=1000)
    pools = FakePools(limits)
    pools.feed(np.arange(TOKENS_PER_BLOCK, dtype=np.uint32))
    pools.now_s = 999.0
    following = np.arange(5000, 5300, dtype=np.uint32)
    pools.store.feed("p", following, ngram_mask=NGRAMS)
    # The first has expired, so it is evicted before the second is indexed.
    pools.now_s = 1000.0
    pools.store.finish()
    pools.store.check_integrity()
    [kept] = pools.store.texts_of("p")
    assert kept.token_ids.tolist() == following.tolist()
    pools.check_samples(100)
    pools.now_s = 1e6
    pools.store.finish()
    assert pools.store.occupied_bytes == 0, "the block before was given back"


def test_a_text_larger_than_its_pool_keeps_its_end() -> None:
    limits = PoolLimits(max_pool_bytes=1 << 17, max_pools_bytes=1 << 20, pool_ttl_s=1000)
    pools = FakePools(limits)
    pools.feed(np.arange(20_000, dtype=np.uint32))
    [kept] = pools.store.texts_of("p")
    assert 500 < len(kept.token_ids) < 10_000
    assert kept.token_ids[-1] == 19_999
    pools.check_samples(300)


def test_when_all_pools_are_full_the_oldest_text_of_all_goes() -> None:
    limits = PoolLimits(max_pool_bytes=1 << 18, max_pools_bytes=1 << 19, pool_ttl_s=1000)
    store = PoolStore(limits, clock=lambda: 0.0, seed=3)
    rng = np.random.default_rng(3)
    fed = []
    for i in range(60):
        pool_id = f"p{i % 6}"
        token_ids = rng.integers(0, 2**32, 150).astype(np.uint32)
        store.feed(pool_id, token_ids, ngram_mask=NGRAMS)
        store.finish()
        store.check_integrity()
        fed.append((pool_id, token_ids))
    kept = {
        (text.pool_id, text.token_ids[-1])
        for pool_id in store.pool_ids()
        for text in store.texts_of(pool_id)
    }
    is_kept = [(pool_id, token_ids[-1]) in kept for pool_id, token_ids in fed]
    assert is_kept == sorted(is_kept), "evicted texts were fed before the remaining ones"
    assert 5 < sum(is_kept) < 60


def test_texts_over_the_waiting_limit_are_dropped_and_counted() -> None:
    outcomes: list[FeedOutcome] = []
    limits = PoolLimits(max_pool_bytes=1 << 18, max_pools_bytes=1 << 19, pool_ttl_s=1000)
    store = PoolStore(limits, clock=lambda: 0.0, seed=3, on_feed=outcomes.append)
    text = np.arange(3000, dtype=np.uint32)
    for _ in range(50):
        store.feed("p", text, ngram_mask=NGRAMS)
        store.check_integrity()
    assert [outcome.value for outcome in outcomes[:3]] == ["kept"] * 2 + ["dropped"]
    assert store.feed("other", text, ngram_mask=NGRAMS).value == "kept", "it has room"
    # The many short texts that a flood may bring are counted with their records.
    for i in range(1000):
        store.feed(f"p{i}", text[:2], ngram_mask=NGRAMS)
    assert store.num_pools < 20
    store.finish()
    store.check_integrity()
    assert store.feed("p", text, ngram_mask=NGRAMS).value == "kept"


_MEASURE = """
import sys
import numpy as np
from pathlib import Path
from drafter.warm_up import warm_up
from drafter.pool_index.records import FeedOutcome, Pool, PoolLimits, Text
from drafter.pools.store import PoolStore

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

warm_up()
num_texts, num_tokens, num_pools = map(int, sys.argv[1:])
rng = np.random.default_rng(1)
limits = PoolLimits(max_pool_bytes=400 << 20, max_pools_bytes=800 << 20, pool_ttl_s=1000)
store = PoolStore(limits, clock=lambda: 0.0, seed=1)
for i in range(num_texts):
    if i == num_texts // 20:  # what the process itself needs at first is no pool's
        reported, resident = store.occupied_bytes, resident_bytes()
    text = rng.integers(0, 30_000, num_tokens).astype(np.uint32)
    store.feed(f"pool {i % num_pools}", text, ngram_mask=0b11110)
    store.finish()
print(store.occupied_bytes - reported, resident_bytes() - resident)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_texts", "num_tokens", "num_pools"),
    [(500, 1000, 1), (400, 1000, 40), (40_000, 8, 4)],
    ids=["one pool", "many pools", "short texts"],
)
def test_reported_pool_bytes_match_the_growth_of_the_process(
    num_texts: int, num_tokens: int, num_pools: int
) -> None:
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, f"{num_texts}", f"{num_tokens}", f"{num_pools}"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    reported_bytes, grown_bytes = map(int, measured.stdout.split())
    print(f"reported {reported_bytes}, grown {grown_bytes}")
    assert reported_bytes > 15_000_000
    # Usually within a tenth; what else the process touches meanwhile counts, too.
    assert abs(reported_bytes - grown_bytes) <= 0.2 * grown_bytes
