"""What a text and its index occupy, how they grow, and several texts in one index."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drafter import ngram_index
from drafter.indexed_text import HASH_BASE, IndexedText, most_tokens
from drafter.ngram_params import Algorithm, NgramParams, Overlap, Tie
from tests.drafter.asked_text import MAX_TOKENS, ask, text_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("tie", "most_bytes"), [(Tie.EARLIEST, 64), (Tie.LATEST, 64), (Tie.LONGEST, 96)]
)
def test_at_no_length_a_token_takes_more_than_promised(tie: Tie, most_bytes: int) -> None:
    # No n-gram twice: the worst that a text can be.
    tokens = np.arange(150_000, dtype=np.uint32)
    text = IndexedText(params=NgramParams(tie=tie), max_tokens=MAX_TOKENS)
    worst = 0.0
    for start in range(0, len(tokens), 250):
        text.append(tokens[start : start + 250])
        ask([text], [0])
        if text.length >= 1000:
            worst = max(worst, text.allocated_bytes / text.length)
    text.check_integrity()
    assert worst <= most_bytes


@pytest.mark.parametrize("tie", Tie)
@pytest.mark.parametrize("max_bytes", [5_000, 50_000, 1 << 20, 3 << 20])
def test_a_text_as_long_as_fits_occupies_no_more_than_its_bound(tie: Tie, max_bytes: int) -> None:
    params = NgramParams(tie=tie)
    num_tokens = most_tokens(params, max_bytes)
    assert num_tokens > max_bytes / 130 - 40
    text = IndexedText(params=params, max_tokens=num_tokens)
    for start in range(0, num_tokens, 777):
        text.append(np.arange(start, min(start + 777, num_tokens), dtype=np.uint32))
        ask([text], [0])
    text.check_integrity()
    assert text.allocated_bytes <= max_bytes


def test_nothing_fits_into_nothing() -> None:
    assert most_tokens(NgramParams(), 100) == -1


@pytest.mark.parametrize("algorithm", Algorithm)
def test_growth_is_announced(algorithm: Algorithm) -> None:
    text = text_of([], NgramParams(algorithm=algorithm, tie=Tie.LONGEST))
    rng = random.Random(4)
    for _ in range(60):
        part = np.array([rng.randrange(2**32) for _ in range(rng.randrange(2000))], dtype=np.uint32)
        announced = text.bytes_after(len(part))
        text.append(part)
        assert text.allocated_bytes == announced
        ask([text], [0])
        text.check_integrity()
    if algorithm is Algorithm.INDEX:
        for index in (0, 3, 0, 0):
            announced = text.allocated_bytes + text.table_growth_bytes(index)
            text.grow_table(index)
            assert text.allocated_bytes == announced
            text.check_integrity()


MEASURE = """
import gc, sys
import numpy as np
from drafter.indexed_text import IndexedText
from drafter.ngram_params import NgramParams, Tie, Algorithm
from tests.drafter.asked_text import ask

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

num_texts, num_tokens, tie = int(sys.argv[1]), int(sys.argv[2]), Tie[sys.argv[3]]
rng = np.random.default_rng(1)
params = NgramParams(tie=tie)
source = rng.integers(0, 2**32, num_tokens + num_texts, dtype=np.uint32)

def make(i):
    text = IndexedText(params=params, max_tokens=1 << 22)
    for start in range(0, num_tokens, 500):
        text.append(source[i + start : i + min(start + 500, num_tokens)])
        ask([text], [0])
    return text

make(0)
gc.collect()
before = resident_bytes()
texts = [make(i) for i in range(num_texts)]
gc.collect()
print(resident_bytes() - before, sum(text.allocated_bytes for text in texts))
"""


@pytest.mark.parametrize(
    ("num_texts", "num_tokens"), [(3000, 200), (600, 1500), (50, 20_000), (7, 150_000)]
)
@pytest.mark.parametrize("tie", [Tie.EARLIEST, Tie.LONGEST])
def test_the_reported_bytes_are_what_the_process_grows_by(
    tie: Tie, num_texts: int, num_tokens: int
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(num_texts), str(num_tokens), tie.name],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    real, reported = map(int, result.stdout.split())
    assert reported == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("overlap", Overlap)
def test_a_text_behind_a_sealed_one_shares_no_ngram_with_it(overlap: Overlap) -> None:
    text = text_of([1, 2, 3, 4], NgramParams(min_ngram=2, max_ngram=3, overlap=overlap))
    for following in ([5, 6, 7], [8], [9, 10]):
        text.seal()
        ask([text], [0])
        text.begin()
        text.append(np.array(following, dtype=np.uint32))
    text.seal()
    ask([text], [0])
    whole = text.token_ids.tolist()
    for n in (2, 3):
        for end in range(n, len(whole) + 1):
            within_one = any(
                first <= end - n and end <= last
                for first, last in ((0, 4), (4, 7), (7, 8), (8, 10))
            )
            assert find_end(text, whole[end - n : end]) == (end if within_one else 0)


def find_end(text: IndexedText, pattern: list[int]) -> int:
    """Where the n-gram ends in the text; 0: nowhere."""
    tokens = np.array(pattern, dtype=np.uint32)
    n = len(pattern)
    index = n - text.params.min_ngram
    hash_ = np.uint64(ngram_index.hash_at(tokens.ctypes.data, n, n, HASH_BASE))
    end, _ = ngram_index.find(
        text.address + 8 * (ngram_index.TABLES + ngram_index.TABLE_WORDS * index),
        1,
        text.buffer.ctypes.data,
        np.uint64(ngram_index.mix(hash_)),
        tokens.ctypes.data,
        n,
    )
    return int(end)
