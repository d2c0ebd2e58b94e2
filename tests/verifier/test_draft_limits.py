"""The limits of K."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.drafts.draft_limits import num_drafts_possible, num_drafts_trusted
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import History, sampling_probs


@pytest.mark.parametrize(
    ("tokens_per_match", "match_length", "expected"),
    [(0, 9, None), (2, 9, 18), (3, 1, 3), pytest.param(2, 0, 2, id="nobody said how far")],
)
def test_the_number_of_drafts_follows_the_match(
    tokens_per_match: int, match_length: int, expected: int | None
) -> None:
    assert (
        num_drafts_trusted(tokens_per_match=tokens_per_match, match_length=match_length) == expected
    )


STOPS = frozenset({7, 8})


@pytest.mark.parametrize(
    ("drafts", "num_output", "min_new_tokens", "expected"),
    [
        pytest.param([1, 2, 3], 0, 0, 3, id="no stop token"),
        pytest.param([1, 7, 3], 0, 0, 2, id="the first stop token may stand"),
        pytest.param([8, 7, 3], 5, 0, 1, id="what follows it may not"),
        pytest.param([1, 2, 7, 3], 2, 5, 2, id="too early for a stop token"),
        pytest.param([1, 2, 7, 3], 3, 5, 3, id="the first that is late enough"),
        pytest.param([7], 0, 1, 0, id="nothing is left"),
        pytest.param([], 0, 9, 0, id="nothing was there"),
    ],
)
def test_drafts_that_cannot_be_accepted_are_cut(
    drafts: list[int], num_output: int, min_new_tokens: int, expected: int
) -> None:
    num_drafts = num_drafts_possible(
        drafts, stop_token_ids=STOPS, num_output_tokens=num_output, min_new_tokens=min_new_tokens
    )
    assert num_drafts == expected


@given(
    drafts=st.lists(st.integers(0, 4), max_size=6),
    stops=st.frozensets(st.integers(0, 4), max_size=2),
    num_output=st.integers(0, 4),
    min_new_tokens=st.integers(0, 8),
)
def test_drafts_are_kept_while_they_can_be_sampled_and_the_text_goes_on(
    drafts: list[int], stops: frozenset[int], num_output: int, min_new_tokens: int
) -> None:
    sampling = Sampling(temperature=1.0, min_new_tokens=min_new_tokens)
    history = History.of(
        sampling,
        prompt_token_ids=[],
        output_token_ids=[0] * num_output,
        draft_token_ids=drafts,
        stop_token_ids=stops,
    )
    probs = sampling_probs(np.zeros((len(drafts) + 1, 5), dtype=np.float32), sampling, history)
    expected = 0
    for j, token_id in enumerate(drafts):
        if probs[j, token_id] == 0:
            break
        expected = j + 1
        if token_id in stops:
            break
    num_drafts = num_drafts_possible(
        drafts, stop_token_ids=stops, num_output_tokens=num_output, min_new_tokens=min_new_tokens
    )
    assert num_drafts == expected
