"""Growing texts, for which drafts are proposed on the way: index == scan == brute force.

Under all options, orders of appends and moments of growth.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafter_texts import Call
from drafter.budgets import MAX_UNINDEXED
from drafter.ngram import table as ngram_table
from drafter.ngram.index import MUST_SCAN
from drafter.ngram.kmp import SCAN_WORDS
from drafter.ngram.params import Algorithm, NgramParams, Overlap, Tie
from drafter.ngram.text import IndexedText
from servicekit.kernels.memory import address_of
from tests.drafter import brute_force
from tests.drafter.texts import INDEXED, KMP, MAX_TOKENS, propose_for, text_of
from tests.volume import cases, examples

OPTION_PAIRS = list(itertools.product(Overlap, Tie))

# New tokens, or a copy of known ones: from where (as a fraction), and how many.
PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), max_size=12),
        st.lists(st.sampled_from([0, 7, 2**31, 2**32 - 1]), max_size=6),
        st.tuples(st.floats(0, 1), st.integers(1, 90)),
    ),
    max_size=25,
)


class GrowingText:
    """One text four times: indexed (if its options allow it), scanned, indexed now and then, and in
    the oracle.
    """

    def __init__(self, params: NgramParams) -> None:
        self.params = params
        self.context: list[int] = []
        self.texts = [
            IndexedText(params=replace(params, algorithm=algorithm), max_tokens=MAX_TOKENS)
            for algorithm in (*Algorithm, Algorithm.INDEX)
        ]
        self.oracle = brute_force.Drafter(params)

    def append(self, part: list[int]) -> None:
        self.context += part
        for text in self.texts:
            text.append(np.array(part, dtype=np.uint32))

    def copy(self, start: int, count: int) -> None:
        self.append(self.context[start : start + count])

    def check_draft(self, max_draft_tokens: int) -> bool:
        """Asserts that all drafts are the oracle's; returns whether there was one."""
        expected = self.oracle.propose(self.context, max_draft_tokens)
        *prompt, late = self.texts
        if len(self.context) % 5 == 0:
            propose_for([late], [0])
        for found in (
            *propose_for(prompt, [max_draft_tokens] * len(prompt)),
            *propose_for([late], [max_draft_tokens], max_unindexed=MAX_UNINDEXED),
        ):
            assert found == expected, f"{self.params} {max_draft_tokens} on {self.context}"
        return expected is not None


@pytest.mark.parametrize(("overlap", "tie"), OPTION_PAIRS)
@settings(max_examples=examples(300), deadline=None)
@given(
    parts=PARTS,
    sizes=st.tuples(st.integers(1, 32), st.integers(1, 32)).map(sorted),
    max_draft_tokens=st.integers(1, 100),
    tokens_per_match=st.integers(0, 3),
    ask_every=st.integers(1, 3),
)
def test_equals_the_oracle_at_every_length(
    overlap: Overlap,
    tie: Tie,
    parts: list[list[int] | tuple[float, int]],
    sizes: list[int],
    max_draft_tokens: int,
    tokens_per_match: int,
    ask_every: int,
) -> None:
    growing = GrowingText(
        NgramParams(
            min_ngram=sizes[0],
            max_ngram=sizes[1],
            overlap=overlap,
            tie=tie,
            tokens_per_match=tokens_per_match if tie is Tie.LONGEST else 0,
        )
    )
    for i, part in enumerate(parts):
        if isinstance(part, tuple):
            growing.copy(int(part[0] * len(growing.context)), part[1])
        else:
            growing.append(part)
        if i % ask_every == 0:
            growing.check_draft(max_draft_tokens)
    growing.texts[0].check_integrity()


@pytest.mark.parametrize(("overlap", "tie"), OPTION_PAIRS)
def test_equals_the_oracle_on_texts_of_thousands_of_tokens(overlap: Overlap, tie: Tie) -> None:
    rng = random.Random(f"long {overlap}{tie}")
    num_drafts = 0
    for num_tokens in (700, 2500, 4500):
        growing = GrowingText(random_params(rng, overlap, tie))
        alphabet = rng.choice([3, 200, 2**32])
        while len(growing.context) < num_tokens:
            for _ in range(rng.choice([1, 5])):
                grow(growing, rng, alphabet)
            num_drafts += growing.check_draft(24)
        growing.texts[0].check_integrity()
    assert num_drafts > 10


def test_index_and_scan_agree_where_tables_have_many_chunks() -> None:
    rng = np.random.default_rng(5)
    context = rng.integers(0, 3000, 60_000).astype(np.uint32)
    context[40_000:40_100] = context[9_000:9_100]
    params = replace(INDEXED, min_ngram=1)
    texts = [
        IndexedText(params=replace(params, algorithm=algorithm), max_tokens=MAX_TOKENS)
        for algorithm in Algorithm
    ]
    num_long = 0
    for start in range(0, len(context), 1500):
        for text in texts:
            text.append(context[start : start + 1500])
        for end in range(8):
            if end:
                for text in texts:
                    text.append(context[end * 77 : end * 77 + 3])
            indexed, scanned = propose_for(texts, [8, 8])
            assert indexed == scanned
            num_long += indexed is not None and indexed[1] >= 2
    texts[0].check_integrity()
    assert (
        texts[0]._header[ngram_table.TABLES + ngram_table.TABLE_WORDS + ngram_table.SHAPE] & 0xFFFF
        > 10
    )
    assert num_long > 20


def test_a_scan_begins_anew_when_its_text_has_grown() -> None:
    """Where another stream lengthens a text between two calls."""
    text = text_of([*range(200), 3, 4], KMP)
    progress = np.zeros((1, SCAN_WORDS), dtype=np.int64)

    def scan_on() -> Call:
        scans = np.array([address_of(progress)])
        return Call([text], [2], scans=scans, budget=1).run()

    assert scan_on().statuses[0] == MUST_SCAN
    text.append(np.array([190, 191], dtype=np.uint32))  # which the scan has passed
    while (call := scan_on()).statuses[0] == MUST_SCAN:
        pass
    assert call.draft(0) == ([192, 193], 2)


def test_hashes_that_collide_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With base 1 an n-gram's hash is the sum of its tokens: every permutation collides."""
    monkeypatch.setattr("drafter.ngram.text.HASH_BASE", np.uint64(1))
    rng = random.Random(8)
    for overlap, tie in OPTION_PAIRS:
        for _ in range(cases(10, 40)):
            growing = GrowingText(random_params(rng, overlap, tie))
            while len(growing.context) < 300:
                grow(growing, rng, 5)
                growing.check_draft(9)


def random_params(rng: random.Random, overlap: Overlap, tie: Tie) -> NgramParams:
    min_ngram = rng.randint(1, 5)
    return NgramParams(
        min_ngram=min_ngram,
        max_ngram=rng.choice([min_ngram, rng.randint(min_ngram, 8), rng.randint(min_ngram, 32)]),
        overlap=overlap,
        tie=tie,
        tokens_per_match=rng.choice([0, 1, 2]) if tie is Tie.LONGEST else 0,
    )


def grow(growing: GrowingText, rng: random.Random, alphabet: int) -> None:
    if rng.random() < 0.5 or not growing.context:
        growing.append([rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 1, 2, 5, 60]))])
    else:
        growing.copy(rng.randrange(len(growing.context)), rng.choice([1, 3, 10, 80]))
