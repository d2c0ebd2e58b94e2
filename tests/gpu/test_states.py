"""Recurrent states on a GPU: bits are those of one pass, whatever was accepted, kept and begun with
again.
"""

import importlib.util
import random
from pathlib import Path

import pytest
import torch

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.state_walk import NUM_SLOTS, Walk
from tests.verifier.cpu.test_loader import save
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.paged_model import some_tokens
from verifier.batch.batch_layout import StateUse

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs the package triton, and it is not installed here",
    ),
]
GPU = torch.device("cuda")
TEXT = some_tokens(300, 97)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_any_steps_give_the_bits_of_one_pass(name: str, dtype: str, tmp_path: Path) -> None:
    from verifier.gpu.attention.triton_backend import TritonBackend
    from verifier.gpu.operations import operations_for

    save(tmp_path, name, getattr(torch, dtype))
    weights = load(tmp_path, dtype, GPU, operations_for(GPU, is_strict=True))
    running = RunningGpuDecoder(
        weights,
        backend=TritonBackend(device=GPU, is_strict=True),
        num_blocks=80,
        num_state_slots=NUM_SLOTS + 1,
        max_drafts=len(TEXT),
    )
    whole = Chunk(
        token_ids=TEXT,
        start=0,
        block_table=list(range(60, 80)),
        num_rows=len(TEXT),
        state=StateUse(NUM_SLOTS),
    )
    (expected,) = running.run(whole)
    walk = Walk(
        TEXT, random.Random(7), vocab_size=97, max_num_tokens=64, max_drafts=9, num_blocks=60
    )
    for step in walk.steps(100):
        results = running.run(*(chunk for chunk, _ in step))
        for (chunk, num_right), rows in zip(step, results, strict=True):
            first = chunk.end - chunk.num_rows
            assert torch.equal(rows[:num_right], expected[first : first + num_right])
