"""The decoder for GPUs, on a CPU in plain torch, gives transformers' logits."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.test_loader import CONFIGS, save
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.paged_model import some_tokens
from verifier.attention.backend import StepAttention
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.gpu import current_device, decoder
from verifier.gpu.plain import PlainOperations

TEXT = some_tokens(90, 97)
SCATTERED = list(range(64))[::-1]


@functools.cache
def saved(name: str) -> tempfile.TemporaryDirectory[str]:
    """The folder of a random model of `CONFIGS`. It goes with the process."""
    folder = tempfile.TemporaryDirectory()
    save(Path(folder.name), name)
    return folder


def folder_of(name: str) -> Path:
    return Path(saved(name).name)


@functools.cache
def expected_logits(name: str) -> torch.Tensor:
    """Logits [T, V] of `TEXT` by transformers, in float32."""
    return transformers_logits(folder_of(name), TEXT)


def transformers_logits(
    folder: Path, token_ids: list[int], dtype: torch.dtype | str = "auto"
) -> torch.Tensor:
    """Logits [T, V] by transformers, computed in a dtype, as float32."""
    # The only code of transformers' that knows softcaps.
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([token_ids]), use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def assert_near(rows: torch.Tensor, expected: torch.Tensor) -> None:
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_every_family_are_transformers_ones(name: str) -> None:
    """Chunks, single tokens and drafts, over scattered blocks."""
    running = RunningGpuDecoder(load(folder_of(name)))
    rows = running.run_in_chunks(TEXT, [33, 1, 1, 17, 8, 2], SCATTERED)
    assert_near(rows, expected_logits(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "gemma3", "phi3", "olmo3"])
def test_sixteen_bit_logits_are_as_near_the_float32_ones_as_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Twice its distance is allowed, as at the check when a model is loaded."""
    save(tmp_path, name, dtype)
    weights = load(tmp_path)
    assert weights.dtype is weights.embeddings.dtype is dtype
    exact = transformers_logits(tmp_path, TEXT, torch.float32)
    off = (transformers_logits(tmp_path, TEXT) - exact).abs().mean().item()
    rows = RunningGpuDecoder(weights).run_in_chunks(TEXT, [33, 1, 17, 8], SCATTERED)
    assert (rows - exact).abs().mean().item() <= 2 * off


def test_hidden_states_are_those_of_the_scored_rows() -> None:
    running = RunningGpuDecoder(load(folder_of("qwen3")))
    layout = lay_out(
        [
            ScheduledTokens(
                token_ids=TEXT[:40],
                draft_token_ids=[],
                num_computed_tokens=0,
                block_table=[3, 1, 2],
                scored_offsets=range(35, 40),
            )
        ],
        block_size=16,
        wants_hidden_states=True,
    )
    logits = running.decoder.forward(layout)
    assert len(logits) == 5
    states = running.decoder.hidden_states
    assert states is not None
    head = load(folder_of("qwen3")).head.numpy()
    own = logits[layout.scored_logits_indices]
    np.testing.assert_allclose(states @ head.T, own, rtol=0, atol=1e-4 * np.abs(own).max())
    assert_near(torch.from_numpy(own), expected_logits("qwen3")[35:40])
    running.run(Chunk(token_ids=TEXT[:3], start=0, block_table=[5], num_rows=1))
    assert running.decoder.hidden_states is None


def test_a_token_whose_kv_is_not_finite_is_told_and_harms_no_other_sequence() -> None:
    weights = load(folder_of("llama"))
    weights.embeddings[96] = float("nan")
    running = RunningGpuDecoder(weights)
    bad = [token % 96 for token in TEXT[:20]]
    bad[7] = 96
    good = [token % 96 for token in TEXT[20:44]]
    chunks = [
        Chunk(token_ids=bad, start=0, block_table=[4, 9], num_rows=1),
        Chunk(token_ids=good, start=0, block_table=[7, 2], num_rows=1),
    ]
    _, sound = running.run(*chunks)
    finite = running.decoder.kv_is_finite
    assert finite is not None
    # Those that attend to it find zeros.
    assert finite.tolist() == [True] * 7 + [False] + [True] * 36
    (alone,) = RunningGpuDecoder(weights).run(chunks[1])
    assert_near(sound, alone)
    assert all(each.isfinite().all() for layer in range(3) for each in running.cache.blocks(layer))


class ShapesOnly(PlainOperations):
    """How many rows are stored depends on values, which `meta` tensors do not have."""

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        head_norms: torch.Tensor | None,
        **others: Any,
    ) -> torch.Tensor:
        tensors = [others[name] for name in ("keys", "values", "slot_mapping", "is_bad")]
        tensors += [cos_sin] if head_norms is None else [cos_sin, head_norms]
        assert {tensor.device for tensor in tensors} == {qkv.device}
        return torch.empty_like(qkv)


@pytest.mark.parametrize("name", ["llama_biases", "gemma3", "phi3_partial"])
def test_all_tensors_of_a_step_are_on_the_models_device(name: str) -> None:
    """Torch's `meta` device refuses tensors of another one, as a GPU does."""
    elsewhere = torch.device("meta")
    weights = load(folder_of(name), device=elsewhere)
    running = RunningGpuDecoder(weights, operations=ShapesOnly())
    layout = running.lay_out(
        Chunk(token_ids=[1] * 80, start=0, block_table=list(range(20, 25)), num_rows=1),
        Chunk(token_ids=[1], start=40, block_table=[4, 9, 2], num_rows=1),
        Chunk(token_ids=[1] * 4, start=30, block_table=[6, 7, 8], num_rows=4),
    )
    logits, is_finite = running.decoder.forward_on_device(layout)
    assert (logits.shape, is_finite.shape) == ((6, 97), (85,))
    assert logits.device == is_finite.device == elsewhere


def test_a_forward_pass_makes_the_gpu_its_threads_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def recorded(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr(decoder, "current_device", recorded)
    running = RunningGpuDecoder(load(folder_of("llama")))
    prepare = running.backend.prepare

    def checked(layout: BatchLayout, cache: KVCache) -> StepAttention:
        assert entered == [torch.device("cpu")]
        return prepare(layout, cache)

    monkeypatch.setattr(running.backend, "prepare", checked)
    running.run(Chunk(token_ids=TEXT[:3], start=0, block_table=[5], num_rows=1))
    assert entered == []
    chosen = current_device.current_device(torch.device("cuda", 3))
    assert isinstance(chosen, torch.cuda.device)
    assert chosen.idx == 3
