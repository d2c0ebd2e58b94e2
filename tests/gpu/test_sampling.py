"""The sampler's kernels on a GPU: the checks that Triton's interpreter runs on the CPU, and that a
step can be captured and waits for nothing.
"""

import numpy as np
import pytest
import torch

from tests.verifier.gpu_sampling.device_batches import assert_equal, staged_of
from tests.verifier.gpu_sampling.hostile_checks import *  # noqa: F403
from tests.verifier.gpu_sampling.noise_checks import *  # noqa: F403
from tests.verifier.gpu_sampling.sampler_checks import *  # noqa: F403
from tests.verifier.gpu_sampling.slots_checks import *  # noqa: F403
from tests.verifier.sampling_cases import rows_of, some_case, verified_by_host
from verifier.gpu.sampling.sampler import DeviceSampler

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here"
)


def test_a_captured_step_is_replayed_for_other_sequences() -> None:
    """Of the same numbers of drafts; neither a replay nor a step waits for the GPU."""
    draw = np.random.default_rng(21)
    device, vocab_size = torch.device("cuda"), 5003
    sampler = DeviceSampler(device=device, vocab_size=vocab_size, max_num_seqs=8, max_num_drafts=3)
    graph, logits = torch.cuda.CUDAGraph(), torch.zeros(32, vocab_size, device=device)
    for step in range(5):
        cases = [some_case(draw, vocab_size, 3) for _ in range(8)]
        for case in cases:
            case.drafts = [*case.drafts, 1, 2, 3][:3]
            case.logits = torch.cat([case.logits] * 4)[:4]
            if case.masks is not None:
                case.masks = np.concatenate([case.masks] * 4)[:4]
        slots = [
            sampler.open(c.sampling, prompt_length=len(c.prompt), stop_token_ids=c.stop_token_ids)
            for c in cases
        ]
        sampler.stage([staged_of(case, slot) for case, slot in zip(cases, slots, strict=True)])
        logits.copy_(rows_of(cases))
        if step == 0:
            sampler.run(logits)  # compiles
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                sampler.compute(logits)
        torch.cuda.set_sync_debug_mode("error")
        try:
            if step % 2:
                sampler.run(logits)
            else:
                graph.replay()
                sampler.copy_verdicts()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_equal(sampler.result(), verified_by_host(cases))
        for slot in slots:
            sampler.close(slot)
