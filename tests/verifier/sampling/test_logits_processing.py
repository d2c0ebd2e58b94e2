"""Which tokens are kept of equal ones; tests of the sampler's kernels compare all else."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.v1 import sampling_pb2
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import History, sampling_probs, target_probs

VOCAB_SIZE = 16


def probs_of(logits: list[list[float]], **fields: float) -> npt.NDArray[np.float32]:
    sampling = Sampling(**({"temperature": 1.0} | fields))  # type: ignore[arg-type]
    rows = np.array(logits, dtype=np.float32)
    return np.concatenate([sampling_probs(row[None], sampling, History()) for row in rows])


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        pytest.param({"top_k": 2}, [0, 1], id="top_k"),
        pytest.param({"top_p": 0.5}, [0, 1, 2], id="top_p: 0.4 before the third"),
        pytest.param({"top_p": 0.3}, [0, 1], id="top_p: 0.2 before the second"),
        pytest.param({"top_p": 1e-9}, [0], id="top_p: the likeliest always stays"),
        pytest.param({"top_k": 9}, [0, 1, 2, 3, 4], id="top_k over the vocabulary"),
        pytest.param({"top_k": 4, "top_p": 0.5}, [0, 1], id="top_p of what top_k left"),
    ],
)
def test_equal_logits_keep_the_lowest_ids(fields: dict[str, float], kept: list[int]) -> None:
    [probs] = probs_of([[1.0] * 5], **({"top_p": 1.0} | fields))
    assert np.flatnonzero(probs).tolist() == kept


def test_equal_logits_keep_the_lowest_ids_of_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(2)
    row = torch.randint(0, 3, (20_000,), generator=generator)
    [probs] = probs_of([row.tolist()], top_k=8000)
    likeliest = np.flatnonzero(row == 2)
    second = np.flatnonzero(row == 1)[: 8000 - len(likeliest)]
    assert np.flatnonzero(probs).tolist() == sorted([*likeliest, *second])


def test_a_message_is_accepted_and_its_unset_fields_are_defaults() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    message = sampling_pb2.SamplingParams(temperature=0.7, logit_bias={3: 1.5}, min_p=0.1)
    sampling = Sampling(temperature=0.7, logit_bias={3: 1.5}, min_p=0.1)
    ours, theirs = (target_probs(logits, each, [1], [2], [3]) for each in (sampling, message))
    assert torch.equal(ours, theirs)


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
