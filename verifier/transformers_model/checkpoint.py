"""Loads a checkpoint folder: which models are served, their digests, and reference logits.

Weights come from safetensors files only: no code in a checkpoint is executed. Architectures that
would be computed wrongly are refused by name. `parity/transformers_check.py` finds unknown
peculiarities before the model is served.

Weights are mapped, not read, until they are used, so that a file larger than memory can be loaded.
On a CPU, weights of the checkpoint's own dtype stay mapped. For another device, each tensor is
read, converted and moved at a time, and never the whole model held by the process.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from verifier.attention.kv_cache import KVShape
from verifier.checkpoint.digests import begin_digest
from verifier.checkpoint.folder_checks import check_files
from verifier.checkpoint.inert_keys import GENERATION_KEYS
from verifier.checkpoint.model_config import DTYPES as WEIGHT_TYPES
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.transformers_model.fp8_weights import multiplies_in_fp8, quantise_linear_layers
from verifier.transformers_model.paged_model import ATTENTION_NAME, register_attention

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
# Tensors beside quantised weights.
_SCALE_SUFFIXES = ("_scale", "_scale_inv", "_zero_point")
_NOT_QUANTISED_ALREADY = (
    "a checkpoint that is quantised already is not served; --quantization fp8 quantises an "
    "ordinary one while loading"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded model and its properties."""

    model: PreTrainedModel
    architecture: str
    dtype: torch.dtype
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    kv_shape: KVShape
    model_digest: str
    hidden_size: int


def load_checkpoint(
    folder: Path,
    *,
    dtype: str,
    device: torch.device,
    quantization: str = "none",
    prepare: Callable[[PreTrainedModel], None] | None = None,
) -> Checkpoint:
    """Loads a causal language model.

    Args:
        dtype: a key of `DTYPES`, or "auto": see `choose_dtype`.
        quantization: "none" or "fp8".
        prepare: changes the whole model, on the CPU, before it is moved to the device. Another
            dtype than the checkpoint's, or a mixture of experts, then takes its memory there.

    Raises:
        CheckpointError: no safetensors, or an architecture that is not served.
    """
    config = read_checked_config(folder)
    if quantization == "fp8" and uses_experts(config):
        raise CheckpointError(
            f"{config.model_type}: --quantization fp8 is not offered for mixtures of experts: most "
            "of their weights are not in linear layers"
        )
    torch_dtype = choose_dtype(dtype, config=config, device=device)
    properties = _properties_of(config, torch_dtype, folder)
    with TensorFiles(folder) as files:
        files.log_rounding(WEIGHT_TYPES[str(torch_dtype).removeprefix("torch.")])
    # What changes the model has to see all of it.
    is_direct = prepare is None and quantization == "none"
    digest = begin_digest(folder)
    register_attention()
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch_dtype,
            attn_implementation=ATTENTION_NAME,
            device_map={"": device if is_direct else torch.device("cpu")},
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {_one_line(error)}") from error
    except Exception as error:
        # Any model's code runs here.
        told = f"({type(error).__name__}: {_one_line(error)})"
        if ATTENTION_NAME in str(error):
            raise CheckpointError(
                f"{config.model_type} is not served: its code knows no attention function but its "
                f"own {told}"
            ) from error
        raise CheckpointError(
            f"{folder}: transformers cannot build the model that config.json describes {told}"
        ) from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        # transformers has initialised them at random.
        raise CheckpointError(f"{folder}: weights are missing: {', '.join(missing[:3])}")
    _check_unused(folder, loaded[1]["unexpected_keys"])
    model.eval().requires_grad_(False)
    if prepare is not None:
        prepare(model)
    if quantization == "fp8":
        rounds_rows = multiplies_in_fp8(device, quantization)
        quantise_linear_layers(model, device, rounds_rows=rounds_rows)
    cast(torch.nn.Module, model).to(device)
    return Checkpoint(
        model=model,
        architecture=type(model).__name__,
        model_digest=digest.result(),
        **properties,
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
        raise CheckpointError(f"{folder}: config.json: {_one_line(error)}") from error
    check_architecture(config)
    _properties_of(config, torch.float32, folder)
    _check_stored_types(folder)
    return config


def read_config(folder: Path) -> Any:
    """The configuration of a checkpoint, without leftovers that transformers stumbles over.

    Raises:
        Exception: whatever the model's code does.
    """
    config = AutoConfig.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        # Only some kinds of attention give them; others are refused where a checkpoint asks.
        output_attentions=False,
    )
    if not getattr(config, "quantization_config", True):
        del config.quantization_config
    # The saver's choice; transformers refuses what it does not know.
    config._experts_implementation = None
    # transformers checks them with the model, and some values stop it.
    for key in GENERATION_KEYS - {"use_cache"}:
        vars(config).pop(key, None)
    return config


def checkpoint_of(model: PreTrainedModel, *, dtype: torch.dtype, model_digest: str) -> Checkpoint:
    """The Checkpoint of a model whose attention is `ATTENTION_NAME`."""
    return Checkpoint(
        model=model,
        architecture=type(model).__name__,
        model_digest=model_digest,
        **_properties_of(model.config, dtype),
    )


def _properties_of(config: Any, dtype: torch.dtype, folder: Path | None = None) -> dict[str, Any]:
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
        raise CheckpointError(f"{config.model_type} is not served: {_one_line(error)}") from error


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
                        f"{folder}: {name} is stored as {tensor.dtype}: {_NOT_QUANTISED_ALREADY}"
                    )
    except NotServedError as error:
        raise CheckpointError(str(error)) from error


def _check_unused(folder: Path, names: Iterable[str]) -> None:
    """Refuses tensors without which the weights mean something else.

    Args:
        names: of stored tensors that the model has no place for.

    Raises:
        CheckpointError: names the tensor.
    """
    for name in sorted(names):
        if name.endswith(_SCALE_SUFFIXES):
            raise CheckpointError(f"{folder} holds {name}: {_NOT_QUANTISED_ALREADY}")
        if "lora_" in name:
            raise CheckpointError(
                f"{folder} holds {name}: LoRA adapters are not served: merge it into its model and "
                "serve that"
            )


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
        raise CheckpointError(f"{name}: {_NOT_QUANTISED_ALREADY}")
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


def choose_dtype(dtype: str, *, config: Any, device: torch.device) -> torch.dtype:
    """The torch dtype for `--dtype`.

    "auto" is what the configuration tells, even if weights are stored otherwise; on a CPU only if
    the processor multiplies matrices of it natively, else float32, which holds every value of the
    others and is faster than emulating them.
    """
    if dtype != "auto":
        return DTYPES[dtype]
    stored = getattr(config, "dtype", None)
    own = next((known for known in DTYPES.values() if known is stored), torch.float32)
    if device.type != "cpu":
        return own
    if own is torch.bfloat16 and cpu_has_bfloat16():
        return torch.bfloat16
    if own is torch.float16 and cpu_has_float16():
        return torch.float16
    return torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices natively (AVX512_BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def cpu_has_float16() -> bool:
    """Whether this processor multiplies float16 matrices natively (AVX512_FP16 or AMX)."""
    # Absent from releases of torch before 2.13.
    read_capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)
    capabilities = read_capabilities()
    return bool(capabilities.get("avx512_fp16") or capabilities.get("amx_fp16"))


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] by transformers' own attention, for the parity probe and tests."""
    try:
        # In the configuration that the model's parts share.
        model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            output = model(
                input_ids=torch.tensor([token_ids], device=model.device), use_cache=False
            )
        logits: torch.Tensor = output.logits[0]
        return logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@contextlib.contextmanager
def replaced_weights(
    model: PreTrainedModel, value: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Within the context, the model computes with other weights: `value` of a module's own.

    Each module's weights are replaced only while it runs: that takes the memory of one module, of
    the largest embedding at most, instead of a second model's.
    """
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def replace(module: torch.nn.Module, _: Any) -> None:
        with torch.inference_mode(mode=False):
            for parameter in module.parameters(recurse=False):
                kept[parameter] = parameter.data
                parameter.data = value(module, parameter.data)

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    handles = []
    try:
        for module in cast(torch.nn.Module, model).modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(replace))
                handles.append(module.register_forward_hook(restore, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _eos_token_ids(config: Any, folder: Path | None) -> frozenset[int]:
    """End tokens of the generation configuration if there is one, else of the model's."""
    value = getattr(config, "eos_token_id", None)
    if folder is not None and (folder / "generation_config.json").exists():
        try:
            generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{folder / 'generation_config.json'}: {_one_line(error)}"
            ) from error
        if generation_config.eos_token_id is not None:
            value = generation_config.eos_token_id
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in ids):
        raise CheckpointError(f"end tokens {str(value)[:100]}: not ids of tokens")
    return frozenset(ids)
