"""Rows of logits that no model should give, and the limits of parameters: the host's tokens."""

import math

import numpy as np
import pytest
import torch

from tests.verifier.gpu_sampling.device_batches import assert_equal, sampler_of, verified_by_device
from tests.verifier.sampling.sampling_cases import Case, verified_by_host
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.gpu.sampling.slots import MAX_BIASES
from verifier.sampling import Sampling

# The interpreter computes in numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def case_of(row: torch.Tensor, sampling: Sampling, drafts: tuple[int, ...] = ()) -> Case:
    """All rows alike."""
    rows = row.repeat(len(drafts) + 1, 1).float()
    return Case(sampling=sampling, prompt=[0], output=[], drafts=list(drafts), logits=rows)


HOSTILE_ROWS = {
    "all equal": torch.zeros(600),
    "all masked": torch.full((600,), -math.inf),
    "one token": torch.full((600,), -math.inf).index_fill(0, torch.tensor([417]), 2.0),
    "nan": torch.zeros(600).index_fill(0, torch.tensor([599]), math.nan),
    "all nan": torch.full((600,), math.nan),
    "infinite": torch.zeros(600).index_fill(0, torch.tensor([3]), math.inf),
    "nan under infinite": torch.tensor([math.inf, math.nan, *[0.0] * 598]),
    "huge": torch.full((600,), 3.4e38).index_fill(0, torch.tensor([5]), -3.4e38),
    "far apart": torch.linspace(-3e38, 3e38, 600),
    "two levels": (torch.arange(600) % 2).float(),
    "denormal": torch.linspace(-1e-44, 1e-44, 600),
    "just possible": torch.tensor([0.0, *[-708.0] * 300, *[-709.0] * 299]),
    "negative zeros": torch.tensor([-0.0, 0.0] * 300),
}
HOSTILE_SAMPLING = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=1e-300, seed=2),
    Sampling(temperature=1e300, seed=3),
    Sampling(temperature=1.0, top_k=7, seed=2**64 - 1),
    Sampling(temperature=1.0, top_k=600, top_p=0.5, seed=2**63),
    Sampling(temperature=0.5, top_k=301, top_p=0.25, min_p=1e-300, seed=6),
    Sampling(temperature=1.0, top_p=1e-300, seed=7),
    Sampling(temperature=1.0, top_p=1 - 2**-53, seed=8),
    Sampling(temperature=1.0, min_p=1.0, seed=9),
    Sampling(temperature=1.0, repetition_penalty=1e-300, frequency_penalty=2.0, seed=10),
    Sampling(logit_bias={417: 100.0, 5: -100.0}, repetition_penalty=1e300),
]


@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_hostile_rows(name: str) -> None:
    row = HOSTILE_ROWS[name]
    cases = [case_of(row, sampling, (417,)) for sampling in HOSTILE_SAMPLING]
    sampler = sampler_of(len(row), max_num_seqs=len(cases))
    assert_equal(verified_by_device(sampler, cases), verified_by_host(cases))


@pytest.mark.parametrize("top_k", [1, 599, 0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
def test_of_equal_logits_the_lowest_ids_are_kept(top_k: int, top_p: float) -> None:
    """A cut through equals is exact: sums of ones have no rounding."""
    num_kept = math.ceil(min(top_k or 600, 600) * top_p)
    num_seeds = interpreted_cases(16, 40)
    sampler = sampler_of(600, max_num_seqs=num_seeds)
    cases = [
        case_of(torch.zeros(600), Sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed))
        for seed in range(num_seeds)
    ]
    verdict = verified_by_device(sampler, cases)
    assert_equal(verdict, verified_by_host(cases))
    seen = set(verdict.output_token_ids[:, 0].tolist())
    assert max(seen) < num_kept
    assert len(seen) > min(num_kept, num_seeds) // 3


def test_as_many_biases_as_there_may_be_and_many_stop_tokens() -> None:
    draw = np.random.default_rng(12)
    ids = draw.permutation(1500)[:MAX_BIASES].tolist()
    sampling = Sampling(
        temperature=1.0,
        logit_bias={i: float(draw.normal(scale=5)) for i in ids},
        min_new_tokens=2,
        seed=4,
    )
    case = case_of(torch.zeros(1500), sampling, (1, 2))
    case.stop_token_ids = frozenset(ids[-128:])
    assert_equal(verified_by_device(sampler_of(1500), [case]), verified_by_host([case]))
