"""The configuration of a checkpoint that transformers computes: which models are served.

Architectures that would be computed wrongly are refused by name. `parity/transformers_check.py`
finds unknown peculiarities before the model is served.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from verifier.attention.kv_cache import KVShape
from verifier.checkpoint.folder_checks import check_files
from verifier.checkpoint.inert_keys import GENERATION_KEYS
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.checkpoint.text_part import text_config

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Models with sinks that their configuration does not show; any other fails the parity probe.
MODEL_TYPES_WITH_SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"}
# Their rotation of a token depends on the longest sequence of the whole batch.
UNSUPPORTED_ROPE_TYPES = {"dynamic", "longrope"}
# Parts of the names of configuration keys for images and sound.
_MEDIA_WORDS = frozenset({"audio", "codec", "image", "video", "vision", "vq"})
# A tensor that is stored as another type, and how the names of weights end.
_UNQUANTISED = frozenset({"F64", "F32", "F16", "BF16"})
_WEIGHT_SUFFIXES = ("weight", "_proj")
NOT_QUANTISED_ALREADY = (
    "a checkpoint that is quantised already is not served; --quantization fp8 quantises an "
    "ordinary one while loading"
)


def read_checked_config(folder: Path) -> Any:
    """The configuration of a checkpoint that is served as far as can be told without its weights.

    Raises:
        CheckpointError: no safetensors, or an architecture that is not served.
    """
    check_files(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if (folder / "adapter_config.json").exists():
        # transformers might load the base model that it names, from elsewhere.
        raise CheckpointError(
            f"{folder} holds adapter_config.json: LoRA adapters are not served: merge it into its "
            "model and serve that"
        )
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} holds no .safetensors file; other formats are not loaded")
    try:
        config = read_config(folder)
    except Exception as error:
        # Any model's code runs here, and checks config.json in its own way.
        raise CheckpointError(f"{folder}: config.json: {one_line(error)}") from error
    check_architecture(config)
    properties_of(config, torch.float32, folder)
    _check_stored_types(folder)
    return config


def read_config(folder: Path, *, only_text: bool = False) -> Any:
    """The configuration of a checkpoint, without leftovers that transformers stumbles over.

    Args:
        only_text: whether it is that of a multimodal checkpoint's text part.

    Raises:
        Exception: whatever the model's code does.
    """
    # Only some kinds of attention give them; others are refused where a checkpoint asks.
    fixed = {"output_attentions": False}
    if only_text:
        content = text_config(json.loads((folder / "config.json").read_bytes()))
        config = AutoConfig.for_model(**{**content, **fixed})
    else:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **fixed
        )
    if not getattr(config, "quantization_config", True):
        del config.quantization_config
    # The saver's choice; transformers refuses what it does not know.
    config._experts_implementation = None
    # transformers checks them with the model, and some values stop it.
    for key in GENERATION_KEYS - {"use_cache"}:
        vars(config).pop(key, None)
    return config


def properties_of(config: Any, dtype: torch.dtype, folder: Path | None = None) -> dict[str, Any]:
    """The attributes of `Checkpoint` that the configuration tells, by name.

    Raises:
        CheckpointError: it does not tell them.
    """
    try:
        num_heads = int(config.num_attention_heads)
        return {
            "dtype": dtype,
            "vocab_size": int(config.vocab_size),
            "max_position_embeddings": int(config.max_position_embeddings),
            "eos_token_ids": _eos_token_ids(config, folder),
            "kv_shape": KVShape(
                num_layers=int(config.num_hidden_layers),
                num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
                head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
                dtype=dtype,
            ),
            "hidden_size": int(config.hidden_size),
        }
    except CheckpointError:
        raise
    except Exception as error:
        # For example, values that differ from layer to layer.
        raise CheckpointError(f"{config.model_type} is not served: {one_line(error)}") from error


def check_architecture(config: Any) -> None:
    """Refuses models other than decoder-only text models with dense attention.

    Raises:
        CheckpointError: names the unsupported property.
    """
    name = str(getattr(config, "model_type", "?"))
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name}: encoder-decoder models are not served")
    if media_key := _media_key(config):
        raise CheckpointError(
            f"{name}: multimodal models are not served, only text goes in and out: its "
            f"configuration has {media_key}"
        )
    if getattr(config, "kv_lora_rank", None):
        raise CheckpointError(f"{name}: multi-head latent attention (MLA) is not served")
    if getattr(config, "attn_logit_softcapping", None):
        raise CheckpointError(f"{name}: attention with a softcap is not served")
    if name in MODEL_TYPES_WITH_SINKS:
        raise CheckpointError(f"{name}: attention with sinks is not served")
    if getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{name}: quantization_config: transformers computes no quantised weights here, and no "
            "decoder of Tandem's own serves this model, or not with these flags"
        )
    if getattr(config, "is_heterogeneous", False):
        raise CheckpointError(f"{name}: layers of different sizes are not served")
    others = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if others:
        raise CheckpointError(f"{name}: layers of type {', '.join(sorted(others))} are not served")
    unsupported = _rope_types(config) & UNSUPPORTED_ROPE_TYPES
    if unsupported:
        raise CheckpointError(
            f"{name}: rotary embeddings of type {', '.join(sorted(unsupported))} are not served"
        )
    if not hasattr(config, "num_attention_heads") or not hasattr(config, "max_position_embeddings"):
        raise CheckpointError(f"{name}: not a decoder with attention in every layer")


def uses_experts(config: Any) -> bool:
    """Whether layers route tokens to experts."""
    return any(
        "expert" in key and isinstance(value, int) and value > 1
        for key, value in config.to_dict().items()
    )


def _check_stored_types(folder: Path) -> None:
    """Refuses quantised weights, which configurations do not always tell: transformers would cast
    their codes.

    Raises:
        CheckpointError: names the tensor; or a file is not what the format says.
    """
    try:
        with TensorFiles(folder) as files:
            for name, tensor in files.tensors.items():
                # Integers of another name are positions and masks.
                if name.endswith(_WEIGHT_SUFFIXES) and tensor.dtype not in _UNQUANTISED:
                    raise CheckpointError(
                        f"{folder}: {name} is stored as {tensor.dtype}: {NOT_QUANTISED_ALREADY}"
                    )
    except NotServedError as error:
        raise CheckpointError(str(error)) from error


def _media_key(config: Any) -> str | None:
    """A configuration key about images or sound, if there is one. Token ids do not count: text
    models derived from multimodal ones may have kept some.
    """
    for key, value in config.to_dict().items():
        is_token = key.endswith(("_token_id", "_token_ids", "_token_index"))
        if value is not None and not is_token and not _MEDIA_WORDS.isdisjoint(key.split("_")):
            return str(key)
    return None


def _rope_types(config: Any) -> set[str]:
    """The types of rotary embedding; models may have one per type of layer."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return {p["rope_type"] for p in (parameters, *per_layer_type) if "rope_type" in p}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _eos_token_ids(config: Any, folder: Path | None) -> frozenset[int]:
    """End tokens of the generation configuration if there is one, else of the model's."""
    value = getattr(config, "eos_token_id", None)
    if folder is not None and (folder / "generation_config.json").exists():
        try:
            generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{folder / 'generation_config.json'}: {one_line(error)}"
            ) from error
        if generation_config.eos_token_id is not None:
            value = generation_config.eos_token_id
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in ids):
        raise CheckpointError(f"end tokens {str(value)[:100]}: not ids of tokens")
    return frozenset(ids)
