"""Compiles the verifier's kernels, or loads them from disk.

    python -m verifier.warm_up

compiles them into the folder of the source, for an image or a package: for all types of weights, on
x86-64 for processors with AVX2 and for those with AVX-512, whichever this one is.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import typeof

from servicekit.kernels.jit import without_collections
from servicekit.kernels.ship import compile_for_all_levels
from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.group_formats import FORMATS, take_apart
from verifier.checkpoint.model_config import DTYPES
from verifier.checkpoint.weight_types import WeightType
from verifier.cpu.decoder import BLOCK_SIZE, CpuDecoder
from verifier.cpu.group_packing import pack_groups
from verifier.cpu.kernels.forward import forward
from verifier.cpu.kernels.group_records import record_bytes
from verifier.cpu.loading.loader import load_weights
from verifier.cpu.records import LAYER, MODEL, STEP
from verifier.drafts.depth_policy import DepthPolicy
from verifier.sampling import warm_up as sampling

_STORED = ("F32", "BF16", "F16")
_QUANTIZATIONS = ("none", "fp8")


def warm_up(linear: WeightType, other: WeightType) -> None:
    """What serves a model whose weights have these types. Where nothing was compiled yet, this
    takes half a minute.

    Args:
        linear: as in `DecoderWeights`; so `other`.
    """
    markers = [np.empty(0, dtype=kind.value) for kind in (linear, other)]
    records = [np.empty(0, dtype=kind) for kind in (MODEL, LAYER, STEP)]
    arguments = (*markers, *records, 0)
    with without_collections():
        compiled: Any = forward
        compiled.compile(tuple(map(typeof, arguments)))
    warm_up_engine()


def warm_up_engine() -> None:
    """What serves any model beside it. Built without this, an engine compiles it for half a minute,
    on the event loop.
    """
    sampling.warm_up()
    DepthPolicy(max_rows=8, max_depth=1)


def compute_chunk(model: CpuDecoder, num_tokens: int) -> None:
    """Calls what a step calls, and touches memory that steps share. Writes to block 0.

    Args:
        num_tokens: at most a block. With one alone, the first prompt could take ten times as long
            as the next, and the verifier would believe for a while that drafts cost as much.
    """
    num_drafts = min(num_tokens // 2, model.max_drafts)
    chunk = ScheduledTokens(
        token_ids=[0] * (num_tokens - num_drafts),
        draft_token_ids=[0] * num_drafts,
        num_computed_tokens=0,
        block_table=[0],
    )
    model.forward(lay_out([chunk], block_size=model.block_size))


def warm_up_all() -> None:
    """Serves a tiny model with all types of weights, of the checkpoint and in memory."""
    with without_collections(), tempfile.TemporaryDirectory() as folder:
        for stored in _STORED:
            _write_checkpoint(Path(folder), stored)
            described = describe_decoder(Path(folder))
            for dtype, quantization in itertools.product(DTYPES, _QUANTIZATIONS):
                model = CpuDecoder(
                    load_weights(described, dtype=dtype, quantization=quantization),
                    num_blocks=1,
                    block_size=BLOCK_SIZE,
                    # To have the kernels that threads wait in.
                    num_threads=2,
                    max_num_tokens=1,
                )
                compute_chunk(model, 1)
                model.close()
    rows = np.zeros((1, FORMATS["Q8_0"].block_bytes), dtype=np.uint8)
    blocks = np.zeros((1, 1, record_bytes(FORMATS["Q8_0"])), dtype=np.uint8)
    pack_groups("Q8_0", take_apart("Q8_0", rows), blocks)
    # As GGUF files and quantised checkpoints are served by default.
    for other_type in (WeightType.FLOAT16, WeightType.BFLOAT16):
        warm_up(WeightType.GROUPS, other_type)


def _write_checkpoint(folder: Path, stored: str) -> None:
    """A decoder of one layer, with weights of zero of a safetensors type."""
    size = 16
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": size,
        "vocab_size": size,
        "max_position_embeddings": size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    item_bytes = 4 if stored == "F32" else 2
    header, end = {}, 0
    for name, shape in _tensors(size):
        start, end = end, end + item_bytes * int(np.prod(shape))
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [start, end]}
    # Aligned, so that rows of the types that need no conversion are read from the file itself.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def _tensors(size: int) -> Iterator[tuple[str, list[int]]]:
    for name in ("lm_head", "model.embed_tokens"):
        yield f"{name}.weight", [size, size]
    yield "model.norm.weight", [size]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.0.{name}.weight", [size]
    for part, names in {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}.items():
        for name in names:
            yield f"model.layers.0.{part}.{name}_proj.weight", [size, size]


if __name__ == "__main__":
    compile_for_all_levels(warm_up_all)
