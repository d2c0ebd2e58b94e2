"""Texts whose n-grams are made to collide in the tables of their index.

An n-gram's hash is a polynomial with a secret base, then a public mixing. An attacker who does not
know the base can only guess that the hash of a single token is the token itself, and choose tokens
by the mixing. These tests set the base, and so can make any tokens collide.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.drafter_texts import Call
from drafter.ngram import table as ngram_table
from drafter.ngram.index import DONE
from drafter.ngram.params import Algorithm
from drafter.ngram.text import IndexedText, tokens_that_fit
from tests.drafter.texts import INDEXED, MAX_TOKENS, propose_for

NUM_COLLIDING = ngram_table.CHUNK_SLOTS + 1
"""One more than a chunk has slots."""


def tokens_in_even_chunks(base: int | None, count: int = NUM_COLLIDING) -> npt.NDArray[np.uint32]:
    """The first tokens whose n-grams of size 1 lie in chunk 0 of two.

    Args:
        base: of the polynomial; None: unknown, the token itself is mixed.
        count: how many.
    """
    tokens = np.arange(1, 4 * count, dtype=np.uint64)
    hashes = tokens if base is None else tokens * np.uint64(base)
    mixed = (hashes ^ (hashes >> np.uint64(32))) * ngram_table._MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    found: npt.NDArray[np.uint32] = tokens[mixed & np.uint64(1) == 0][:count].astype(np.uint32)
    return found


def assert_answers_as_a_scan_does(text: IndexedText) -> None:
    params = replace(text.params, algorithm=Algorithm.KMP)
    scanned = IndexedText(params=params, max_tokens=MAX_TOKENS)
    scanned.append(text.token_ids)
    for end in ([], [7, 8, 9], list(text.token_ids[100:103]), list(text.token_ids[5000:5004])):
        for each in (text, scanned):
            each.append(np.array(end, dtype=np.uint32))
        drafts = propose_for([text, scanned], [8, 8])
        assert drafts[0] == drafts[1]


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_tokens_chosen_by_the_public_mixing_alone_fill_no_chunk(max_ngram: int) -> None:
    tokens = tokens_in_even_chunks(None)
    assert len(tokens) == NUM_COLLIDING
    text = IndexedText(
        params=replace(INDEXED, min_ngram=1, max_ngram=max_ngram), max_tokens=MAX_TOKENS
    )
    for start in range(0, len(tokens), 1000):
        text.append(tokens[start : start + 1000])
        propose_for([text], [0])
    assert text.is_indexed
    text.check_integrity()
    assert_answers_as_a_scan_does(text)


@pytest.mark.parametrize("piece", [64, NUM_COLLIDING])
def test_tokens_chosen_with_the_secret_base_turn_the_index_into_a_scan(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.ngram.text.HASH_BASE", np.uint64(5))
    params = replace(INDEXED, min_ngram=1)
    max_bytes = 1 << 20
    text = IndexedText(params=params, max_tokens=tokens_that_fit(params, max_bytes))
    tokens = tokens_in_even_chunks(5)
    for start in range(0, len(tokens), piece):
        text.append(tokens[start : start + piece])
        propose_for([text], [0])
    assert not text.is_indexed
    assert text.num_unindexed == 0
    assert text.allocated_bytes <= max_bytes
    text.check_integrity()
    assert_answers_as_a_scan_does(text)


def test_ngrams_of_one_hash_end_the_index_as_soon_as_they_cost_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With base 1 the hash is the sum of the tokens; these pairs have two sums."""
    monkeypatch.setattr("drafter.ngram.text.HASH_BASE", np.uint64(1))
    up = np.arange(20_000, dtype=np.uint32)
    tokens = np.stack([up, 1_000_000 - up], axis=1).reshape(-1)
    text = IndexedText(params=replace(INDEXED, min_ngram=2, max_ngram=2), max_tokens=MAX_TOKENS)
    text.append(tokens)
    propose_for([text], [0])
    assert not text.is_indexed
    assert text._header[ngram_table.INDEXED_LENGTH] < 3 * ngram_table.MAX_PROBES
    assert_answers_as_a_scan_does(text)


def test_probing_for_long_counts_as_work() -> None:
    """Otherwise a call, whose budget is counted in n-grams, could take many times as long."""
    up = np.arange(450, dtype=np.uint32)
    colliding = np.stack([up, 1_000_000 - up], axis=1).reshape(-1)
    num_calls = []
    for tokens in (np.arange(len(colliding), dtype=np.uint32), colliding):
        text = IndexedText(params=replace(INDEXED, min_ngram=2, max_ngram=2), max_tokens=MAX_TOKENS)
        text.append(tokens)
        num_calls.append(1)
        while Call([text], [0], hash_base=np.uint64(1)).run().statuses[0] != DONE:
            num_calls[-1] += 1
        assert text.is_indexed
    assert num_calls[0] == 1
    assert num_calls[1] > 1
