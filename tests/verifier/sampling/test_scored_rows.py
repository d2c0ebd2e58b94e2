"""Scores of rows against `target_probs` row by row: exactly, over slices and ties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verifier.paged_model import some_tokens
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import fill_likeliest, target_probs
from verifier.sampling.scored_rows import draft_positions, prompt_logprobs

VOCAB_SIZE = 12
SAMPLING = Sampling(
    temperature=0.7, repetition_penalty=1.8, frequency_penalty=0.6, presence_penalty=-0.4,
    min_new_tokens=3, logit_bias={2: 1.5},
)  # fmt: skip


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("first_row", [0, 1, 7])
def test_a_prompt_row_knows_the_tokens_up_to_its_own_and_no_output(first_row: int) -> None:
    prompt = some_tokens(15, VOCAB_SIZE)
    logits = random_logits(14)
    reported = prompt_logprobs(
        logits[first_row:].numpy(), prompt, first_row=first_row, sampling=SAMPLING, num_top=2
    )
    of_a_prompt = Sampling(temperature=0.7, repetition_penalty=1.8, logit_bias={2: 1.5})
    assert [each.token_id for each in reported] == prompt[first_row + 1 :]
    for row, each in enumerate(reported, start=first_row):
        probs = target_probs(logits[row : row + 1], of_a_prompt, prompt[: row + 1], [], [])[0]
        assert math.isclose(math.exp(each.logprob), float(probs[prompt[row + 1]]), rel_tol=1e-5)
        assert each.rank == int((probs > probs[prompt[row + 1]]).sum()) + 1
        assert [top.token_id for top in each.top] == probs.topk(2).indices.tolist()


@pytest.mark.parametrize("first_draft", [0, 1, 5])
def test_a_draft_row_knows_the_drafts_before_it_as_output(first_draft: int) -> None:
    prompt, drafts = some_tokens(6, VOCAB_SIZE), some_tokens(8, VOCAB_SIZE, seed=2)
    logits, stop_token_ids = random_logits(9), frozenset({4, 9})
    positions = draft_positions(
        logits[first_draft:].numpy(), prompt_token_ids=prompt, draft_token_ids=drafts,
        first_draft=first_draft, sampling=SAMPLING, stop_token_ids=stop_token_ids, num_top=1,
        keeps_distributions=True,
    )  # fmt: skip
    assert len(positions) == 9 - first_draft
    for j, position in enumerate(positions, start=first_draft):
        masked = logits[j : j + 1].clone()
        if j < 3:
            masked[:, sorted(stop_token_ids)] = -torch.inf
        expected = target_probs(masked, SAMPLING, prompt, drafts[:j], [])[0]
        assert position.probs is not None
        assert position.logprobs is not None
        torch.testing.assert_close(torch.from_numpy(position.probs), expected)
        torch.testing.assert_close(torch.from_numpy(position.logprobs).exp(), expected)
        assert position.top_token_id == position.top[0].token_id == int(expected.argmax())
        if j < len(drafts):
            assert position.draft is not None
            assert position.draft.token_id == drafts[j]
            assert math.isclose(
                math.exp(position.draft.logprob), float(expected[drafts[j]]),
                rel_tol=1e-5, abs_tol=1e-12,
            )  # fmt: skip
        else:
            assert position.draft is None


@given(
    row=st.lists(st.sampled_from([0.0, -0.5, -1.0, -math.inf]), min_size=7, max_size=7),
    num_top=st.integers(0, 7),
)
def test_of_equals_the_lower_ids_are_the_likelier(row: list[float], num_top: int) -> None:
    token_ids, values = np.empty(num_top, dtype=np.int64), np.empty(num_top)
    fill_likeliest(np.array(row), token_ids, values)
    expected = sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:num_top]
    assert token_ids.tolist() == expected
    assert values.tolist() == [row[i] for i in expected]
