"""First proposals of texts, by the index and by the scan.

Against the brute-force oracle, worked examples and the golden trace. `test_growing_texts.py` tests
later proposals of the same texts.
"""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafter_texts import Call
from drafter.ngram.params import Algorithm, NgramParams, Overlap, Tie
from drafter.ngram.table import ACCEPTED_DISTANCE
from tests.drafter import brute_force
from tests.drafter.texts import KMP, propose, propose_for, text_of
from tests.volume import examples

GOLDEN_TRACE = Path(__file__).parents[2] / "data" / "golden_trace.json"

OPTION_PAIRS = list(itertools.product(Overlap, Tie))

# context | min..max, k, limit (0: none) | disjoint + earliest, allowed + earliest, allowed + latest
WORKED_EXAMPLES = [
    ("1 2 3 4 2 3", (2, 3, 4, 0), ("4 2 3", "4 2 3", "4 2 3")),
    ("7 7 7", (1, 2, 3, 0), ("7 7", "7", "7")),
    ("1 2 1 2 1", (3, 3, 4, 0), ("", "2 1", "2 1")),
    ("1 2 1 2 1 2", (2, 4, 4, 0), ("1 2 1 2", "1 2", "1 2")),
    ("1 2 1 1 1", (1, 2, 1, 0), ("2", "1", "1")),
    ("3 4 50 1 2 3 4 60 1 2 3 4", (1, 2, 1, 0), ("50", "50", "60")),
    ("1 2 3 100 1 2 3 200 1 2 3 300 1 2 3", (3, 3, 2, 0), ("100 1", "100 1", "300 1")),
    ("1 2 3 4 1 2 3", (2, 3, 3, 8), ("4", "4", "4")),
    ("5 5", (3, 4, 2, 0), ("", "", "")),
]
COLUMNS = [
    (Overlap.DISJOINT, Tie.EARLIEST),
    (Overlap.ALLOWED, Tie.EARLIEST),
    (Overlap.ALLOWED, Tie.LATEST),
]


def assert_equals_oracle(context: list[int], params: NgramParams, max_draft_tokens: int) -> bool:
    """Returns whether there was a draft."""
    expected = brute_force.propose(context, params, max_draft_tokens)
    for algorithm in Algorithm:
        found = propose(context, replace(params, algorithm=algorithm), max_draft_tokens)
        assert found == expected, f"{algorithm} {params} on {context}"
    return expected is not None


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize(("context", "options", "drafts"), WORKED_EXAMPLES)
def test_worked_examples_of_known_drafters(
    context: str,
    options: tuple[int, int, int, int],
    drafts: tuple[str, ...],
    column: int,
    algorithm: Algorithm,
) -> None:
    min_ngram, max_ngram, max_draft_tokens, max_length = options
    overlap, tie = COLUMNS[column]
    params = NgramParams(
        min_ngram=min_ngram, max_ngram=max_ngram, overlap=overlap, tie=tie, algorithm=algorithm
    )
    tokens = [int(token) for token in context.split()]
    if max_length:
        max_draft_tokens = min(max_draft_tokens, max_length - len(tokens))

    draft = propose(tokens, params, max_draft_tokens)

    expected = [int(token) for token in drafts[column].split()]
    assert (draft[0] if draft else []) == expected


@pytest.mark.parametrize(("overlap", "tie"), OPTION_PAIRS)
@settings(max_examples=examples(250), deadline=None)
@given(
    context=st.one_of(
        st.lists(st.integers(0, 1), max_size=24),
        st.lists(st.integers(0, 3), max_size=120),
        st.lists(st.sampled_from([0, 7, 2**31, 2**32 - 1]), max_size=60),
    ),
    sizes=st.tuples(st.integers(1, 32), st.integers(1, 32)).map(sorted),
    max_draft_tokens=st.integers(1, 40),
)
def test_equals_the_oracle_on_any_context(
    overlap: Overlap, tie: Tie, context: list[int], sizes: list[int], max_draft_tokens: int
) -> None:
    params = NgramParams(min_ngram=sizes[0], max_ngram=sizes[1], overlap=overlap, tie=tie)
    assert_equals_oracle(context, params, max_draft_tokens)


@pytest.mark.parametrize(("overlap", "tie"), OPTION_PAIRS)
@pytest.mark.parametrize("kind", ["random", "periodic", "periodic with flaws", "copied parts"])
def test_equals_the_oracle_on_long_contexts(kind: str, overlap: Overlap, tie: Tie) -> None:
    rng = random.Random(f"{kind}{overlap}{tie}")
    num_drafts = 0
    for _ in range(12):
        context = long_context(kind, rng, rng.randint(200, 2000))
        params = NgramParams(
            min_ngram=rng.randint(1, 3), max_ngram=rng.randint(3, 32), overlap=overlap, tie=tie
        )
        num_drafts += assert_equals_oracle(context, params, 24)
    assert num_drafts > 0


def long_context(kind: str, rng: random.Random, length: int) -> list[int]:
    alphabet = rng.choice([2, 10, 200])
    if kind == "random":
        return [rng.randrange(alphabet) for _ in range(length)]
    if kind == "copied parts":
        context = [rng.randrange(1000) for _ in range(100)]
        while len(context) < length:
            start = rng.randrange(len(context))
            context += context[start : start + rng.randint(1, 90)]
            context += [rng.randrange(1000) for _ in range(rng.randrange(3))]
        return context[:length]
    period = [rng.randrange(alphabet) for _ in range(rng.randint(1, 40))]
    context = (period * (length // len(period) + 1))[:length]
    if kind == "periodic with flaws":
        for _ in range(length // 50):
            context[rng.randrange(length)] = rng.randrange(alphabet)
    return context


@pytest.mark.parametrize("algorithm", Algorithm)
def test_every_proposal_of_the_golden_trace(algorithm: Algorithm) -> None:
    trace = json.loads(GOLDEN_TRACE.read_text())
    params = NgramParams(
        min_ngram=trace["prompt_lookup_min"],
        max_ngram=trace["prompt_lookup_max"],
        algorithm=algorithm,
    )
    text = text_of(trace["prompt_token_ids"], params)
    for step in trace["steps"]:
        text.append(np.array(step["output_token_ids"], dtype=np.uint32))
        assert text.length == step["context_length_after"]
        max_draft_tokens = min(
            trace["num_speculative_tokens"], trace["max_model_len"] - text.length
        )
        [draft] = propose_for([text], [max(max_draft_tokens, 0)])
        assert (draft[0] if draft else []) == step["proposal_after"], step["step"]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_match_lengths_count_beyond_the_longest_ngram_up_to_64(algorithm: Algorithm) -> None:
    params = NgramParams(algorithm=algorithm)
    for num_equal in (5, 6, 63, 64, 65, 200):
        repeated = list(range(100, 100 + num_equal))
        assert propose([1, *repeated, 2, 3, *repeated], params, 3) == (
            [2, 3, 100],
            min(num_equal, 64),
        )


@pytest.mark.parametrize("algorithm", Algorithm)
def test_buffer_contents_beyond_the_known_tokens_are_never_read(
    algorithm: Algorithm,
) -> None:
    text = text_of([1, 2, 3, 1, 2], NgramParams(algorithm=algorithm))
    text.buffer[text.length :] = 3
    assert propose_for([text], [30]) == [([3, 1, 2], 2)]


def test_a_draft_that_is_asked_for_twice_is_not_accepted_by_what_lies_beyond_the_text() -> None:
    text = text_of([1, 2, 3, 1, 2], NgramParams(tie=Tie.LONGEST))
    text.buffer[text.length :] = 3
    for _ in range(2):
        assert propose_for([text], [1]) == [([3], 2)]
    assert text._words[ACCEPTED_DISTANCE] == 0
    text.append(np.array([3], dtype=np.uint32))
    propose_for([text], [1])
    assert text._words[ACCEPTED_DISTANCE] == 3


def test_each_scanned_text_of_a_call_has_its_own_draft() -> None:
    """Of texts of one length, in a call that keeps no progress of scans."""
    texts = [text_of([k, k + 1, k + 2, k, k + 1], KMP) for k in (0, 10, 20)]
    call = Call(texts, [3] * 3).run()
    assert [call.draft(i) for i in range(3)] == [([k + 2, k, k + 1], 2) for k in (0, 10, 20)]
