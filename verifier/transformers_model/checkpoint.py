"""Loads a checkpoint folder with transformers; logits by transformers' own attention.

Weights come from safetensors files only: no code in a checkpoint is executed.

Weights are mapped, not read, until they are used, so that a file larger than memory can be loaded.
On a CPU, weights of the checkpoint's own dtype stay mapped. For another device, each tensor is
read, converted and moved at a time, and never the whole model held by the process.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from verifier.attention.kv_cache import KVShape
from verifier.checkpoint.digests import begin_digest
from verifier.checkpoint.model_config import DTYPES as WEIGHT_TYPES
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.transformers_model.config import (
    NOT_QUANTISED_ALREADY,
    one_line,
    properties_of,
    read_checked_config,
    uses_experts,
)
from verifier.transformers_model.dtypes import choose_dtype
from verifier.transformers_model.fp8_weights import multiplies_in_fp8, quantise_linear_layers
from verifier.transformers_model.paged_model import ATTENTION_NAME, register_attention

# Tensors beside quantised weights.
_SCALE_SUFFIXES = ("_scale", "_scale_inv", "_zero_point")


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
    is_digested: bool = True,
) -> Checkpoint:
    """Loads a causal language model.

    Args:
        dtype: a key of `DTYPES`, or "auto": see `choose_dtype`.
        quantization: "none" or "fp8".
        prepare: changes the whole model, on the CPU, before it is moved to the device. Another
            dtype than the checkpoint's, or a mixture of experts, then takes its memory there.
        is_digested: whether to read all files for the digest, which is "" otherwise.

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
    properties = properties_of(config, torch_dtype, folder)
    with TensorFiles(folder) as files:
        files.log_rounding(WEIGHT_TYPES[str(torch_dtype).removeprefix("torch.")])
    # What changes the model has to see all of it.
    is_direct = prepare is None and quantization == "none"
    digest = begin_digest(folder) if is_digested else None
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
        raise CheckpointError(f"{folder}: {one_line(error)}") from error
    except Exception as error:
        # Any model's code runs here.
        told = f"({type(error).__name__}: {one_line(error)})"
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
        model_digest="" if digest is None else digest.result(),
        **properties,
    )


def checkpoint_of(model: PreTrainedModel, *, dtype: torch.dtype, model_digest: str) -> Checkpoint:
    """The Checkpoint of a model whose attention is `ATTENTION_NAME`."""
    return Checkpoint(
        model=model,
        architecture=type(model).__name__,
        model_digest=model_digest,
        **properties_of(model.config, dtype),
    )


def _check_unused(folder: Path, names: Iterable[str]) -> None:
    """Refuses tensors without which the weights mean something else.

    Args:
        names: of stored tensors that the model has no place for.

    Raises:
        CheckpointError: names the tensor.
    """
    for name in sorted(names):
        if name.endswith(_SCALE_SUFFIXES):
            raise CheckpointError(f"{folder} holds {name}: {NOT_QUANTISED_ALREADY}")
        if "lora_" in name:
            raise CheckpointError(
                f"{folder} holds {name}: LoRA adapters are not served: merge it into its model and "
                "serve that"
            )


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
