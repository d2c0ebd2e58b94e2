"""The whole order of processing at every row, against a float64 oracle written row by row."""

import math

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.v1 import sampling_pb2
from tests.volume import examples
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import History, sampling_probs, target_probs

VOCAB_SIZE = 11

FloatArray = npt.NDArray[np.float64]


def oracle_logits(
    logits: FloatArray, sampling: Sampling, prompt: list[int], output: list[int]
) -> FloatArray:
    """The oracle for one row: penalties over the history before it, then the bias."""
    adjusted = logits.copy()
    for token_id in set(prompt) | set(output):
        if adjusted[token_id] > 0:
            adjusted[token_id] /= sampling.repetition_penalty
        else:
            adjusted[token_id] *= sampling.repetition_penalty
    for token_id in range(VOCAB_SIZE):
        count = output.count(token_id)
        adjusted[token_id] -= sampling.frequency_penalty * count
        adjusted[token_id] -= sampling.presence_penalty * (count > 0)
        adjusted[token_id] += sampling.logit_bias.get(token_id, 0.0)
    return adjusted


def oracle_probs(adjusted: FloatArray, sampling: Sampling) -> FloatArray:
    """The oracle for one row: temperature, min-p, top-k, top-p, softmax; ties keep low ids."""
    scaled = (adjusted - adjusted.max()) / sampling.temperature
    kept = [t for t in range(VOCAB_SIZE) if math.exp(scaled[t]) >= sampling.min_p]
    kept.sort(key=lambda t: (-scaled[t], t))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1:
        total = sum(math.exp(scaled[t]) for t in kept)
        before = np.cumsum([0.0] + [math.exp(scaled[t]) / total for t in kept])
        kept = [t for i, t in enumerate(kept) if i == 0 or before[i] < sampling.top_p]
    probs = np.zeros(VOCAB_SIZE)
    probs[kept] = np.exp(scaled[kept])
    normalised: FloatArray = probs / probs.sum()
    return normalised


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.5, 0.83]),
    min_p=st.sampled_from([0.0, 0.07, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.31, 0.77]),
    frequency_penalty=st.sampled_from([0.0, 0.63, -1.17]),
    presence_penalty=st.sampled_from([0.0, 0.41, -0.29]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-3, 3), max_size=3),
)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)


@settings(max_examples=examples(300), deadline=None)
@given(
    sampling=SAMPLINGS,
    prompt=TOKENS,
    output=TOKENS,
    drafts=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_has_the_history_of_a_step_without_drafts(
    sampling: Sampling, prompt: list[int], output: list[int], drafts: list[int], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(scale=3, size=(len(drafts) + 1, VOCAB_SIZE))
    probs = target_probs(torch.from_numpy(logits), sampling, prompt, output, drafts).numpy()
    assert probs.dtype == np.float32
    for row in range(len(drafts) + 1):
        history = output + drafts[:row]
        adjusted = oracle_logits(logits[row], sampling, prompt, history)
        np.testing.assert_allclose(
            probs[row], oracle_probs(adjusted, sampling), rtol=1e-4, atol=1e-7
        )
        # The same bits as in a step without drafts.
        alone = target_probs(torch.from_numpy(logits[row : row + 1]), sampling, prompt, history, [])
        assert np.array_equal(alone[0].numpy(), probs[row])


def test_greedy_is_a_point_mass_after_the_penalties() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    logits = torch.tensor([[4.0, 3.0, 0.0]])
    assert target_probs(logits, sampling, [], [], []).tolist() == [[1.0, 0.0, 0.0]]
    assert target_probs(logits, sampling, [0], [], []).tolist() == [[0.0, 1.0, 0.0]]


def test_a_message_is_accepted_and_its_unset_fields_are_defaults() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    message = sampling_pb2.SamplingParams(temperature=0.7, logit_bias={3: 1.5}, min_p=0.1)
    sampling = Sampling(temperature=0.7, logit_bias={3: 1.5}, min_p=0.1)
    ours, theirs = (target_probs(logits, each, [1], [2], [3]) for each in (sampling, message))
    assert torch.equal(ours, theirs)


def test_drafts_outside_the_vocabulary_are_not_counted() -> None:
    sampling = Sampling(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.5)
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    strange = target_probs(logits, sampling, [1], [2], [-1, 2**40])
    assert torch.equal(strange[2:], target_probs(logits[2:], sampling, [1], [2], []))


def test_no_stop_token_before_min_new_tokens() -> None:
    sampling = Sampling(temperature=1.0, min_new_tokens=3)
    history = History.of(
        sampling,
        prompt_token_ids=[1],
        output_token_ids=[2],
        draft_token_ids=[3, 4],
        # The model has no logit for one of them.
        stop_token_ids=frozenset({0, VOCAB_SIZE}),
    )
    probs = sampling_probs(np.zeros((3, VOCAB_SIZE), dtype=np.float32), sampling, history)
    # Rows sample the 2nd, 3rd and 4th output token; the first three are too early to stop at.
    assert (probs[:, 0] > 0).tolist() == [False, False, True]
    assert (probs[:, 1:] > 0).all()
