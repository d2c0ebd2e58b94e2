"""The sampler on the device against the host's: the same tokens, counts and flags.

In the interpreter (`test_in_the_interpreter.py`), and on a GPU (`tests/gpu/test_sampling.py`).
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.verifier.gpu_sampling.device_batches import (
    DEVICE,
    assert_equal,
    sampler_of,
    staged_of,
    verified_by_device,
)
from tests.verifier.sampling.sampling_cases import rows_of, some_case, verified_by_host
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.gpu.sampling.slots import MAX_BIASES, MAX_STOP_TOKENS
from verifier.sampling import Sampling

# The interpreter computes in numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    "vocab_size", interpreted_cases([1, 33, 2048, 2300], [1, 2, 33, 300, 2048, 5003])
)
def test_a_mixed_batch_gets_the_tokens_of_the_host(vocab_size: int) -> None:
    draw = np.random.default_rng(vocab_size)
    sampler = sampler_of(vocab_size)
    num_accepted = 0
    for _ in range(interpreted_cases(3, 4)):
        cases = [some_case(draw, vocab_size, 4) for _ in range(draw.integers(1, 7))]
        num_rows = sum(len(case.drafts) + 1 for case in cases)
        is_usable = draw.random(num_rows) < 0.95 if draw.random() < 0.5 else None
        host = verified_by_host(cases, is_usable)
        assert_equal(verified_by_device(sampler, cases, is_usable), host)
        num_accepted += int(host.num_accepted_tokens.sum())
    assert num_accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened(dtype: torch.dtype) -> None:
    draw = np.random.default_rng(8)
    cases = [some_case(draw, 100, 4) for _ in range(6)]
    for case in cases:
        case.logits = case.logits.to(dtype).float()
    device = verified_by_device(sampler_of(100), cases, dtype=dtype)
    assert_equal(device, verified_by_host(cases))


def test_a_sequence_without_a_slot_does_not_change_the_others() -> None:
    draw = np.random.default_rng(10)
    cases = [some_case(draw, 100, 4) for _ in range(5)]
    sampler = sampler_of(100)
    expected = verified_by_host(cases)
    slots = [
        sampler.open(c.sampling, prompt_length=len(c.prompt), stop_token_ids=c.stop_token_ids)
        for c in cases
    ]
    staged = [staged_of(case, slot) for case, slot in zip(cases, slots, strict=True)]
    staged[2] = dataclasses.replace(staged[2], slot=None)
    sampler.stage(staged)
    sampler.run(rows_of(cases).to(DEVICE))
    verdict = sampler.result()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(
        verdict.output_token_ids[others], expected.output_token_ids[others]
    )


def test_more_biases_or_stop_tokens_than_fit_are_refused() -> None:
    biased = Sampling(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0))
    sampler = sampler_of(10, max_num_seqs=1)
    for sampling, stops in ((biased, 0), (Sampling(), MAX_STOP_TOKENS + 1)):
        with pytest.raises(ValueError, match="1024 and 2048 fit"):
            sampler.open(sampling, prompt_length=1, stop_token_ids=frozenset(range(stops)))
    # The slot is free still.
    assert sampler.open(Sampling(logprobs=2), prompt_length=1) == 0
