"""A text and its index: bytes, growth, entries, and how much one call indexes."""

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafter_texts import Call
from drafter.budgets import NGRAMS_PER_ANSWER
from drafter.ngram.index import BLOCK, BUDGET_SPENT, DONE, MUST_SCAN
from drafter.ngram.params import Algorithm, NgramParams, Tie
from drafter.ngram.propose import SCANNED_PER_ENTRY
from drafter.ngram.table import ENTRIES, TABLE_WORDS, TABLES
from drafter.ngram.text import IndexedText, tokens_that_fit
from tests.drafter.texts import INDEXED, KMP, MAX_TOKENS, propose_for, text_of
from tests.volume import cases, examples

ROOT = Path(__file__).parents[3]


def text_that_fills_tables(num_tokens: int) -> npt.NDArray[np.uint32]:
    """Every n-gram of up to 5 tokens twice, after different tokens."""
    first = np.arange(num_tokens // 2, dtype=np.uint32)
    # Pieces of 40 tokens in another order.
    pieces = np.array_split(first, max(1, len(first) // 40))
    random.Random(1).shuffle(pieces)
    return np.concatenate([first, *pieces])


def num_entries(text: IndexedText, n: int) -> int:
    """How many n-grams of a size are in the index."""
    return text._words[TABLES + TABLE_WORDS * (n - text.params.min_ngram) + ENTRIES]


@pytest.mark.parametrize("repeats", [False, True])
def test_at_no_length_a_token_takes_more_than_promised(repeats: bool) -> None:
    tokens = text_that_fills_tables(150_000) if repeats else np.arange(150_000, dtype=np.uint32)
    text = IndexedText(params=INDEXED, max_tokens=MAX_TOKENS)
    worst = 0.0
    for start in range(0, len(tokens), 250):
        text.append(tokens[start : start + 250])
        propose_for([text], [0])
        if text.length >= 1000:
            worst = max(worst, text.allocated_bytes / text.length)
    text.check_integrity()
    assert worst <= 64


@pytest.mark.parametrize("params", [INDEXED, KMP])
@pytest.mark.parametrize("max_bytes", [5_000, 50_000, 1 << 20, 3 << 20])
def test_a_text_as_long_as_fits_occupies_no_more_than_its_bound(
    params: NgramParams, max_bytes: int
) -> None:
    num_tokens = tokens_that_fit(params, max_bytes)
    assert num_tokens > max_bytes / 130 - 40
    text = IndexedText(params=params, max_tokens=num_tokens)
    tokens = text_that_fills_tables(num_tokens)
    for start in range(0, len(tokens), 777):
        text.append(tokens[start : start + 777])
        propose_for([text], [0])
    text.check_integrity()
    assert text.allocated_bytes <= max_bytes


def test_a_text_whose_ngrams_are_all_entered_occupies_no_more_than_its_bound() -> None:
    """As much as a table can hold per token: one size, and no n-gram twice."""
    params = replace(INDEXED, min_ngram=2, max_ngram=2)
    for max_bytes in [*range(1_800, 9_000, 60), *range(60_000, 400_000, 20_000)]:
        num_tokens = tokens_that_fit(params, max_bytes)
        if num_tokens < 0:
            continue
        text = IndexedText(params=params, max_tokens=num_tokens)
        tokens = np.arange(num_tokens, dtype=np.uint32)
        for start in range(0, num_tokens, 8000):
            text.append(tokens[start : start + 8000])
            propose_for([text], [0])
        text.check_integrity()
        assert text.allocated_bytes <= max_bytes


@settings(max_examples=examples(300), deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=8),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
)
def test_an_ngram_is_entered_only_where_its_shorter_one_was_met_again(
    parts: list[list[int]], sizes: list[int]
) -> None:
    smallest, largest = sizes
    text = text_of([], replace(INDEXED, min_ngram=smallest, max_ngram=largest))
    context: list[int] = []
    for part in parts:
        context += part
        text.append(np.array(part, dtype=np.uint32))
        propose_for([text], [0])
    text.check_integrity()

    def counted_ngrams(n: int) -> list[tuple[int, ...]]:
        return [tuple(context[end - n : end]) for end in range(n, len(context) - largest + 1)]

    for n in range(smallest, largest + 1):
        shorter = Counter(counted_ngrams(n - 1))
        kinds = {ngram for ngram in counted_ngrams(n) if n == smallest or shorter[ngram[1:]] > 1}
        assert num_entries(text, n) == len(kinds), f"{n}-grams of {context}"


@pytest.mark.parametrize("algorithm", Algorithm)
def test_growth_is_known_beforehand(algorithm: Algorithm) -> None:
    text = text_of([], NgramParams(algorithm=algorithm, tie=Tie.LONGEST))
    rng = random.Random(4)
    for _ in range(60):
        part = np.array([rng.randrange(2**32) for _ in range(rng.randrange(2000))], dtype=np.uint32)
        announced = text.bytes_after(len(part))
        text.append(part)
        assert text.allocated_bytes == announced
        propose_for([text], [0])
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
from drafter.ngram.text import IndexedText
from drafter.ngram.params import NgramParams, Tie
from tests.drafter.texts import propose_for

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

num_texts, num_tokens, delta = map(int, sys.argv[1:4])
rng = np.random.default_rng(1)
params = NgramParams(tie=Tie.LONGEST)
source = rng.integers(0, 2**32, num_tokens + num_texts, dtype=np.uint32)

def make(i):
    text = IndexedText(params=params, max_tokens=1 << 22)
    for start in range(0, num_tokens, delta):
        text.append(source[i + start : i + min(start + delta, num_tokens)])
        propose_for([text], [0])
    return text

make(0)
gc.collect()
before = resident_bytes()
texts = [make(i) for i in range(num_texts)]
gc.collect()
print(resident_bytes() - before, sum(text.allocated_bytes for text in texts))
"""
# Texts, their tokens, and how many come at a time.
AMOUNTS = [
    (3000, 200, 500),
    (600, 1500, 500),
    (50, 20_000, 500),
    (100, 32_000, 8192),
    (7, 150_000, 500),
]


@pytest.mark.slow
@pytest.mark.parametrize("amount", cases(AMOUNTS[1:4], AMOUNTS))
def test_reported_bytes_match_the_growth_of_the_process(amount: tuple[int, int, int]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, amount)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    real, reported = map(int, result.stdout.split())
    assert reported == pytest.approx(real, rel=0.1)


def test_no_call_enters_more_than_its_budget() -> None:
    # A text that repeats: n-grams of every size are entered, and no table grows.
    text = text_of(list(range(64)) * 2048, INDEXED)
    num_calls = 1
    while (call := Call([text], [8]).run()).statuses[0] != DONE:
        num_calls += 1
    assert call.draft(0) == (list(range(8)), 64)
    assert num_calls >= 0.9 * 4 * 131_072 / NGRAMS_PER_ANSWER


def test_the_budget_of_a_call_is_for_all_of_its_texts() -> None:
    texts = [text_of(range(5000), INDEXED) for _ in range(4)]
    Call(texts, [0] * 4).run()
    num_indexed = sum(text.length - text.num_unindexed for text in texts)
    # Each may go on for a block beyond it; budgets of their own would index all 20,000.
    assert num_indexed <= NGRAMS_PER_ANSWER + len(texts) * BLOCK


def test_scans_count_in_the_budget_of_a_call() -> None:
    texts = [text_of(range(4000), KMP) for _ in range(3)]
    call = Call(texts, [8] * 3, budget=4800 // SCANNED_PER_ENTRY).run()
    assert call.statuses.tolist() == [DONE, MUST_SCAN, BUDGET_SPENT]
