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
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.refusals import CheckpointError
from verifier.gpu import current_device, decoder
from verifier.gpu.loading import load_weights
from verifier.gpu.plain import PlainOperations
from verifier.gpu.weights import DenseLinear, Mlp

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


@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3_moe"])
def test_sequences_of_one_step_do_not_disturb_each_other(name: str, is_expanded: bool) -> None:
    """A prompt's chunk without logits, a single token, drafts; blocks of all interleaved."""
    running = RunningGpuDecoder(load(folder_of(name)))
    tables = [SCATTERED[i::3] for i in range(3)]
    for table, end in zip(tables, (20, 50, 61), strict=True):
        running.run(Chunk(token_ids=TEXT[:end], start=0, block_table=table, num_rows=0))
    none, single, drafts = running.run(
        Chunk(token_ids=TEXT[20:53], start=20, block_table=tables[0], num_rows=0),
        Chunk(token_ids=TEXT[50:51], start=50, block_table=tables[1], num_rows=1),
        Chunk(token_ids=TEXT[61:69], start=61, block_table=tables[2], num_rows=8),
        is_expanded=is_expanded,
    )
    expected = expected_logits(name)
    assert none.shape == (0, 97)
    assert_near(single, expected[50:51])
    assert_near(drafts, expected[61:69])
    (rest,) = running.run(
        Chunk(token_ids=TEXT[53:], start=53, block_table=tables[0], num_rows=len(TEXT) - 53)
    )
    assert_near(rest, expected[53:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "gemma3", "phi3"])
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


def test_a_residual_stream_too_large_for_float16_is_computed(tmp_path: Path) -> None:
    """Gemma's embeddings are scaled; trained in bfloat16, its stream may leave float16's range."""
    model = save(tmp_path, "gemma3_linear")
    model.model.embed_tokens.weight.data.mul_(30_000.0)
    model.save_pretrained(tmp_path)
    expected = transformers_logits(tmp_path, TEXT)
    rows = RunningGpuDecoder(load(tmp_path, "float16")).run_in_chunks(TEXT, [40], SCATTERED)
    assert expected.isfinite().all()
    assert (rows - expected).abs().mean() < 0.02 * expected.abs().mean()


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


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = save(tmp_path / "one", "phi3")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (
        RunningGpuDecoder(load(tmp_path / name)).run_in_chunks(TEXT, [50], SCATTERED)
        for name in ("one", "many")
    )
    assert torch.equal(one, many)


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


def test_weights_are_fused_and_tied_embeddings_are_one_tensor() -> None:
    weights = load(folder_of("llama_tied"))
    assert weights.head is weights.embeddings
    layer = weights.layers[0]
    assert isinstance(layer.qkv, DenseLinear)
    assert layer.qkv.weight.shape == ((4 + 2 + 2) * 16, 64)
    assert isinstance(layer.mlp, Mlp)
    assert isinstance(layer.mlp.gate_up, DenseLinear)
    assert layer.mlp.gate_up.weight.shape == (80, 64)


def test_a_checkpoint_that_changed_since_it_was_described_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    described = describe_decoder(tmp_path)
    save(tmp_path, "llama_tied")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing or has changed"):
        load_weights(described, dtype="auto", device=torch.device("cpu"))
