"""Decoders of our own kernels, run chunk by chunk over block tables."""

import functools
import shutil
import tempfile
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from servicekit.gguf.folder import model_folder
from tests.servicekit.gguf_files import ALL_TYPES, write_model
from tests.verifier.chunks import Chunk, lay_out_chunks, rows_in_chunks
from tests.verifier.cpu.numpy_decoder import values
from verifier.batch.batch_layout import BatchLayout
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.weight_types import FloatArray
from verifier.cpu.decoder import CpuDecoder
from verifier.cpu.loading.loader import load_weights
from verifier.cpu.weights import DecoderWeights

Array = npt.NDArray[Any]
MODEL_FOLDER = Path(__file__).parents[3] / "examples/demo_model/model"


def load(folder: Path, dtype: str = "auto", quantization: str = "none") -> DecoderWeights:
    return load_weights(describe_decoder(folder), dtype=dtype, quantization=quantization)


@functools.cache
def weights_of(name: str, dtype: str = "float32", quantization: str = "none") -> DecoderWeights:
    """The bundled model, or a random one of `CONFIGS` or `METHODS`, always the same one."""
    return load(folder_of(name), dtype, quantization)


def folder_of(name: str) -> Path:
    """Of such a model's checkpoint."""
    return MODEL_FOLDER if name == "bundled" else Path(_saved(name).name)


@functools.cache
def _saved(name: str) -> tempfile.TemporaryDirectory[str]:
    """The folder of a random model. It goes with the process."""
    folder = tempfile.TemporaryDirectory()
    save(Path(folder.name), name)
    return folder


def save(folder: Path, name: str) -> None:
    """Saves a random model: of `CONFIGS`, of `METHODS`, or a GGUF file ("gguf_llama")."""
    kind, _, architecture = name.partition("_")
    if kind == "gguf":
        num_experts = 4 if architecture.endswith(("moe", "oss", "next")) else 0
        types = {"_exps": "MXFP4", **ALL_TYPES} if architecture == "gpt-oss" else ALL_TYPES
        path = write_model(folder / "all.gguf", types, architecture=architecture,
                           num_experts=num_experts)  # fmt: skip
        for document in model_folder(path).glob("*.json"):
            shutil.copy(document, folder)
        return
    # torch and transformers take seconds, and the bundled model needs neither.
    from tests.verifier import quantized_files
    from tests.verifier.cpu import test_loader

    if name in quantized_files.METHODS:
        quantized_files.write_quantized(folder, name)
    else:
        test_loader.save(folder, name)


def some_tokens(num_tokens: int, vocab_size: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(vocab_size, size=num_tokens).tolist()
    return tokens


def logits_of(weights: DecoderWeights, token_ids: list[int]) -> FloatArray:
    """All logits [T, V] of a short text, in one step."""
    with RunningDecoder(weights, num_blocks=8, num_threads=2, max_num_tokens=64) as running:
        return running.run_in_chunks(token_ids, [len(token_ids)], list(range(8)))


class RunningDecoder:
    """A decoder; `run` is one step."""

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        num_threads: int = 1,
        max_num_tokens: int = 2048,
        num_state_slots: int = 8,
        max_drafts: int = 0,
        kind: type[CpuDecoder] = CpuDecoder,
    ) -> None:
        self.weights = weights
        self.decoder = kind(
            weights,
            num_blocks=num_blocks,
            block_size=block_size,
            num_threads=num_threads,
            max_num_tokens=max_num_tokens,
            num_state_slots=num_state_slots,
            # Chunks whose logits are all wanted are laid out as drafts.
            max_drafts=max_drafts or max_num_tokens,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.decoder.close()

    def lay_out(self, *chunks: Chunk, is_expanded: bool = False) -> BatchLayout:
        """`is_expanded`: tokens that stand for drafts attend one by one."""
        return lay_out_chunks(chunks, block_size=self.decoder.block_size, is_expanded=is_expanded)

    def run(self, *chunks: Chunk, is_expanded: bool = False) -> list[FloatArray]:
        """One step over all chunks; returns each one's logits [num_rows, vocab_size]."""
        layout = self.lay_out(*chunks, is_expanded=is_expanded)
        logits = self.decoder.forward(layout).copy()
        ends = np.cumsum([chunk.num_rows for chunk in chunks])
        return list(np.split(logits, ends[:-1]))

    def run_in_chunks(
        self, token_ids: list[int], sizes: SequenceOf[int], block_table: list[int]
    ) -> FloatArray:
        """All logits of the text, computed from position 0 in chunks of these sizes in rotation."""
        return np.concatenate(rows_in_chunks(self.run, token_ids, sizes, block_table))

    def keys_and_values(self, block_table: list[int], num_tokens: int) -> list[tuple[Array, Array]]:
        """Each layer's K and V [num_kv_heads, T, head_dim] in float64 of a sequence's tokens."""
        weights, block_size = self.weights, self.decoder.block_size
        layers = [layer for layer in weights.layers if layer.has_kv]
        positions = np.arange(num_tokens)
        slots = np.array(block_table)[positions // block_size] * block_size
        pieces, offsets = np.divmod(slots + positions % block_size, 16)
        result = []
        for layer, cache in zip(layers, self.decoder.kv_caches, strict=True):
            num_heads, head_dim = layer.num_kv_heads, layer.head_dim
            keys, own = np.split(values(cache[pieces], weights.other_type), 2, axis=1)
            keys = keys.reshape(num_tokens, num_heads, head_dim, 16)
            own = own.reshape(num_tokens, num_heads, head_dim // 16, 16, 16)
            keys = np.stack([k[..., offset] for k, offset in zip(keys, offsets, strict=True)])
            own = np.stack([v[..., offset, :] for v, offset in zip(own, offsets, strict=True)])
            own = own.reshape(num_tokens, num_heads, head_dim)
            result.append((keys.swapaxes(0, 1), own.swapaxes(0, 1)))
        return result
