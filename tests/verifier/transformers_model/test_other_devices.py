"""All tensors of a step are on the model's device.

torch's `meta` device computes shapes only, and refuses tensors of another device as a GPU does. So
a forgotten copy shows without a GPU.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.verifier.chunks import Chunk
from tests.verifier.paged_model import DENSE_CONFIGS, PagedModel
from verifier.attention.backend import AttentionBackend
from verifier.attention.flash_attention import FlashAttentionBackend
from verifier.transformers_model.paged_model import ATTENTION_NAME, register_attention

ELSEWHERE = torch.device("meta")


def shapes_only(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    **arguments: Any,
) -> torch.Tensor:
    tensors = [each for each in arguments.values() if isinstance(each, torch.Tensor)]
    assert len(tensors) == 3
    assert all(each.device == queries.device for each in (keys, values, *tensors))
    return torch.empty_like(queries)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("backend_name", ["sdpa", "flash_attn"])
def test_a_step_runs_on_the_models_device(name: str, backend_name: str) -> None:
    """A long chunk, a decode and drafts."""
    register_attention()
    with ELSEWHERE:
        model = AutoModelForCausalLM.from_config(
            DENSE_CONFIGS[name](), attn_implementation=ATTENTION_NAME
        )
    model.eval().requires_grad_(False)
    backend: AttentionBackend | None = None
    if backend_name == "flash_attn":
        backend = FlashAttentionBackend(shapes_only, device=ELSEWHERE)
    paged = PagedModel(model, backend=backend)
    rows = paged.run(
        Chunk(token_ids=[1] * 80, start=0, block_table=list(range(20, 25)), num_rows=1),
        Chunk(token_ids=[1], start=40, block_table=[4, 9, 2], num_rows=1),
        Chunk(token_ids=[1] * 4, start=30, block_table=[6, 7, 8], num_rows=4),
    )
    assert [row.shape for row in rows] == [(1, 97), (1, 97), (4, 97)]
    assert all(row.device == ELSEWHERE for row in rows)
