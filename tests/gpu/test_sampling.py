"""The sampler's kernels on a GPU: the checks that Triton's interpreter runs on the CPU, and that a
step waits for nothing.
"""

import numpy as np
import pytest
import torch

from tests.verifier.gpu_sampling.device_batches import assert_equal, staged_of
from tests.verifier.gpu_sampling.hostile_checks import *  # noqa: F403
from tests.verifier.gpu_sampling.noise_checks import *  # noqa: F403
from tests.verifier.gpu_sampling.sampler_checks import *  # noqa: F403
from tests.verifier.gpu_sampling.slots_checks import *  # noqa: F403
from tests.verifier.sampling.sampling_cases import rows_of, some_case, verified_by_host
from verifier.gpu.sampling.sampler import DeviceSampler

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here"
)


def test_a_step_waits_for_nothing() -> None:
    draw = np.random.default_rng(21)
    device, vocab_size = torch.device("cuda"), 5003
    sampler = DeviceSampler(device=device, vocab_size=vocab_size, max_num_seqs=8, max_num_drafts=3)
    for step in range(3):
        cases = [some_case(draw, vocab_size, 3) for _ in range(8)]
        slots = [
            sampler.open(c.sampling, prompt_length=len(c.prompt), stop_token_ids=c.stop_token_ids)
            for c in cases
        ]
        sampler.stage([staged_of(case, slot) for case, slot in zip(cases, slots, strict=True)])
        logits = rows_of(cases).to(device)
        # The first compiles.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            sampler.run(logits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_equal(sampler.result(), verified_by_host(cases))
        for slot in slots:
            sampler.close(slot)
