"""Real models' shapes with random weights, written as checkpoints.

The tokenizer is the bundled model's, so that its texts serve. What the models say means nothing.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3Config
from transformers.configuration_utils import PreTrainedConfig

from benchmarks.workloads import BUNDLED_MODEL

# Its type information lacks some classes.
_TRANSFORMERS: Any = transformers
_DEVIATION = 0.02
_SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's dimensions."""

    name: str
    config: Callable[[], PreTrainedConfig]

    def step_weights_bytes(self, itemsize: int) -> int:
        """Bytes of weights that a step of one token reads: all but embeddings that only look up,
        and experts that are not chosen.
        """
        config = self.config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        values = 0.0
        for name, parameter in model.named_parameters():
            is_chosen = 1.0
            if ".experts." in name:
                is_chosen = config.num_experts_per_tok / config.num_local_experts
            if "embed_tokens_per_layer" not in name:
                values += parameter.numel() * is_chosen
        if not config.tie_word_embeddings:
            values -= model.get_input_embeddings().weight.numel()
        return int(values * itemsize)


QWEN3_0_6B = Shape(
    name="Qwen3-0.6B",
    config=lambda: Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    ),
)
LLAMA_3_8B = Shape(
    name="Llama-3-8B",
    config=lambda: LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=1,
    ),
)
# Of one size, so that what a family adds to the products can be compared: about 100 million
# parameters in what a step reads.
_EQUAL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_WITHOUT_HEAD_DIM = {key: value for key, value in _EQUAL.items() if key != "head_dim"}
FAMILIES = [
    Shape(name="Llama", config=lambda: LlamaConfig(**_EQUAL)),
    Shape(
        name="Gemma 4",
        config=lambda: _TRANSFORMERS.Gemma4TextConfig(
            **_EQUAL,
            global_head_dim=256,
            vocab_size_per_layer_input=4096,
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=4,
            layer_types=2 * [*3 * ["sliding_attention"], "full_attention"],
        ),
    ),
    Shape(name="OLMo 3", config=lambda: _TRANSFORMERS.Olmo3Config(**_WITHOUT_HEAD_DIM)),
    Shape(
        name="Granite",
        config=lambda: _TRANSFORMERS.GraniteConfig(
            **_WITHOUT_HEAD_DIM,
            embedding_multiplier=12.0,
            attention_multiplier=0.0078125,
            residual_multiplier=0.22,
            logits_scaling=8.0,
        ),
    ),
    Shape(name="SmolLM3", config=lambda: _TRANSFORMERS.SmolLM3Config(**_WITHOUT_HEAD_DIM)),
    Shape(
        name="GPT-OSS",
        config=lambda: _TRANSFORMERS.GptOssConfig(
            **{**_EQUAL, "intermediate_size": 768}, num_local_experts=8, num_experts_per_tok=4
        ),
    ),
    Shape(
        name="Qwen3.5",
        config=lambda: _TRANSFORMERS.Qwen3_5TextConfig(
            **_EQUAL, linear_num_key_heads=8, linear_num_value_heads=8
        ),
    ),
]
TINY = Shape(
    name="tiny",
    config=lambda: Qwen3Config(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    ),
)


def first_layers(
    shape: Shape, num_layers: int, *, max_position_embeddings: int | None = None
) -> Shape:
    """The same model with its first layers alone, for texts of another length if one is given."""

    def config() -> PreTrainedConfig:
        config = shape.config()
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:num_layers]
        if max_position_embeddings is not None:
            config.max_position_embeddings = max_position_embeddings
        return config

    return Shape(name=f"{shape.name}-layers-{num_layers}", config=config)


def write_checkpoint(
    shape: Shape, parent: Path, *, device: torch.device, dtype: torch.dtype
) -> Path:
    """Writes the checkpoint unless it is there; returns its folder. Draws weights on the device."""
    folder = parent / shape.name
    if folder.exists():
        return folder
    partial = parent / f"{shape.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = shape.config()
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(partial)
    GenerationConfig(eos_token_id=0, pad_token_id=0).save_pretrained(partial)
    _write_weights(_tensors_of(model), partial, device=device, dtype=dtype)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, partial)
    partial.rename(folder)
    return folder


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds; tensors that are shared have one name here."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def _write_weights(
    tensors: dict[str, torch.Tensor],
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Shards and their index."""
    generator = torch.Generator(device).manual_seed(2026)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total_bytes = shard_bytes = num_shards = 0

    def end_shard() -> None:
        nonlocal shard_bytes, num_shards
        name = f"model-{num_shards:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        shard_bytes, num_shards = 0, num_shards + 1

    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            weight = torch.ones(tensor.shape, dtype=dtype)
        else:
            drawn = torch.empty(tensor.shape, dtype=dtype, device=device)
            weight = drawn.normal_(std=_DEVIATION, generator=generator).cpu()
        shard[name] = weight
        total_bytes += weight.nbytes
        shard_bytes += weight.nbytes
        if shard_bytes >= _SHARD_BYTES:
            end_shard()
    if shard:
        end_shard()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
