"""`python -m verifier.parity.reference FOLDER OUTPUT`: logits by transformers, as a file.

Runs as a child of the verifier; for the decoder for GPUs within it, on the GPU. The reference is
computed in float32, with the values that the weights have in their dtype and after quantisation. In
bfloat16 and float16 the text is computed a second time in that dtype: how far that lies from the
reference is what rounding costs. For the decoder for CPUs, which rounds K/V and nothing else, the
reference rounds K/V, too: otherwise that rounding alone would route tokens to other experts.

OUTPUT, in numpy's format: exact [T, V] float32, rounding (0 in float32).
"""

import argparse
import inspect
import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.checkpoint.weight_types import widened
from verifier.parity.comparison import NUM_TOKENS, WINDOW_TOKENS, probe_text
from verifier.parity.quantised_values import computed_in
from verifier.parity.transformers_check import shortened_windows
from verifier.transformers_model.config import read_config
from verifier.transformers_model.dtypes import DTYPES

_CPU = torch.device("cpu")
_EXPERT = re.compile(
    r"(model\.layers\.\d+\.(mlp\.)?experts\.)\d+\.(gate|up|down)_proj\.(weight|bias)"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--quantization", choices=["none", "fp8"], required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="end when standard input does"
    )
    options = parser.parse_args(arguments)
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    torch.set_num_threads(options.threads)
    try:
        exact, rounding = reference(
            options.folder,
            dtype=DTYPES[options.dtype],
            quantization=options.quantization,
            rounds_kv=True,
        )
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    np.savez(options.output, exact=exact.numpy(), rounding=rounding)
    return 0


def _end_with_stdin() -> None:
    """Ends the process when its parent, which holds the other end, is gone, killed even."""
    # Not through sys.stdin, whose lock would be held when the interpreter ends.
    while os.read(0, 1024):
        pass
    os._exit(1)


def reference(
    folder: Path,
    *,
    dtype: torch.dtype,
    quantization: str,
    device: torch.device = _CPU,
    rounds_kv: bool = False,
) -> tuple[torch.Tensor, float]:
    """Logits [T, V] float32 of the probe's text, on the device, and the distance that `dtype`
    costs.

    Args:
        rounds_kv: whether the logits are as the decoder for CPUs computes them: of K and V rounded
            to `dtype`, and of the values that quantised weights have in float32.

    Raises:
        CheckpointError: weights are missing.
    """
    model = _Model(
        folder,
        dtype=dtype,
        quantization=quantization,
        device=device,
        keeps_values=rounds_kv and quantization == "none",
    )
    exact = model.logits(torch.float32, kv_dtype=dtype if rounds_kv else None)
    return exact, 0.0 if dtype is torch.float32 else rounding_distance(model.logits(dtype), exact)


def fp8_reference(
    folder: Path, *, dtype: torch.dtype, device: torch.device = _CPU
) -> tuple[torch.Tensor, float, float]:
    """What `reference` returns, by widened FP8 weights; and the distance that products in FP8 cost.

    Raises:
        CheckpointError: weights are missing.
    """
    model = _Model(folder, dtype=dtype, quantization="fp8", device=device)
    exact = model.logits(torch.float32)
    rounding = 0.0 if dtype is torch.float32 else rounding_distance(model.logits(dtype), exact)
    in_fp8 = model.logits(torch.float32, rounds_rows=True)
    return exact, rounding, rounding_distance(in_fp8, exact)


def rounding_distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """The median over rows [T, V] of the root mean square difference from the exact row.

    In float16, transformers' residual stream may overflow, and the serving decoder's does not: rows
    that are not finite do not count. NaN, which nothing matches, if none is finite.
    """
    distances = (logits - exact).square().mean(dim=1).sqrt()
    finite = distances[distances.isfinite()]
    return float(finite.median()) if len(finite) else math.nan


def cache_name(model: PreTrainedModel) -> str:
    """The argument of its `forward` that takes a cache: `cache` since transformers 5.24."""
    is_new = "cache" in inspect.signature(model.forward).parameters
    return "cache" if is_new else "past_key_values"


class _RoundingCache(DynamicCache):
    """Gives attention K and V rounded to a dtype."""

    def __init__(self, dtype: torch.dtype, config: Any) -> None:
        # Windows' layers would drop tokens that the probe's later ones see.
        has_states = "linear_attention" in (getattr(config, "layer_types", None) or ())
        super().__init__(**({"config": config} if has_states else {}))
        self._dtype = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            states.to(self._dtype).to(states.dtype) for states in (key_states, value_states)
        )
        return super().update(keys, values, *arguments, **options)


# The plainest code, and the only one that knows softcaps; and grouped products refuse rows that are
# no multiple of 16 bytes.
_PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


def _loaded(
    folder: Path, dtype: torch.dtype, device: torch.device, *, keeps_values: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of weights that are missing.

    Args:
        keeps_values: whether the values of quantised weights are not rounded to `dtype`.
    """
    kind: Any = AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    with TensorFiles(folder) as files:
        config = read_config(folder, only_text=files.is_text_part)
        if files.quantization == "mxfp4":
            # transformers widens it, piece by piece; to bfloat16 exactly.
            config.quantization_config["dequantize"] = True
            if keeps_values and dtype is not torch.bfloat16:
                dtype = torch.float32
        elif files.is_text_part or files.quantization != "none":
            # Of Tandem's own reading: transformers' has a class for the whole, which is larger, or
            # would need other packages, and a GPU.
            vars(config).pop("quantization_config", None)
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            dtype = torch.float32 if keeps_values else dtype
            state = {
                name: torch.from_numpy(
                    np.array(widened(files.rows(tensor, 0, tensor.shape[0]), tensor.type))
                ).reshape(tensor.shape)
                for name, tensor in files.tensors.items()
            }
            state = in_order_of_heads(fused_experts(state), config, files.quantization)
            source = {"pretrained_model_name_or_path": None, "state_dict": state}
    loaded: Any = kind.from_pretrained(
        **source,
        config=config,
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        **_PLAIN,
    )
    return loaded[0], sorted(loaded[1]["missing_keys"])


def fused_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with experts as transformers' classes have them where it does not join them
    itself: GPT-OSS's all in one, by columns; Gemma 4's stacked.
    """
    result = {}
    by_layer: dict[str, dict[tuple[str, str], list[torch.Tensor]]] = {}
    for name, tensor in state.items():
        match = _EXPERT.fullmatch(name)
        if match is None or (match[2] and f"{match[1]}0.gate_proj.bias" not in state):
            result[name] = tensor
            continue
        by_layer.setdefault(match[1], {}).setdefault((match[3], match[4]), []).append(tensor)
    for prefix, parts in by_layer.items():
        for suffix, end in (("weight", ""), ("bias", "_bias")):
            if ("gate", suffix) not in parts:
                continue
            gate, up, down = (torch.stack(parts[part, suffix]) for part in ("gate", "up", "down"))
            is_stacked = ("gate", "bias") not in parts
            both = (
                torch.cat((gate, up), 1) if is_stacked else torch.stack((gate, up), 2).flatten(1, 2)
            )
            for own, whole in (("gate_up", both), ("down", down)):
                by_columns = whole.mT if suffix == "weight" and not is_stacked else whole
                result[f"{prefix}{own}_proj{end}"] = by_columns.contiguous()
    return result


def in_order_of_heads(
    state: dict[str, torch.Tensor], config: Any, quantization: str
) -> dict[str, torch.Tensor]:
    """The tensors, with those of gated delta nets from GGUF as transformers' classes have them."""
    result = dict(state)
    if quantization != "gguf":
        return result
    for sign in [name for name in state if name.endswith(".linear_attn.A_log")]:
        prefix = sign.removesuffix("A_log")
        keys, size = config.linear_num_key_heads, config.linear_value_head_dim
        channels = 2 * keys * config.linear_key_head_dim
        if prefix + "in_proj_ba.weight" not in state:
            for name, own, first, dim in (
                ("in_proj_qkv.weight", size, channels, 0),
                ("conv1d.weight", size, channels, 0),
                ("in_proj_z.weight", size, 0, 0),
                ("out_proj.weight", size, 0, 1),
                ("in_proj_a.weight", 1, 0, 0),
                ("in_proj_b.weight", 1, 0, 0),
                ("A_log", 1, 0, 0),
                ("dt_bias", 1, 0, 0),
            ):
                index = _from_turns(config, own, first)
                result[prefix + name] = state[prefix + name].index_select(dim, index)
        elif prefix + "in_proj_qkv.weight" in state:
            qkv = result.pop(prefix + "in_proj_qkv.weight")
            parts = (*qkv.tensor_split((channels // 2, channels)),
                     result.pop(prefix + "in_proj_z.weight"))  # fmt: skip
            of_key_heads = [part.reshape(keys, -1, part.shape[-1]) for part in parts]
            result[prefix + "in_proj_qkvz.weight"] = torch.cat(of_key_heads, dim=1).flatten(0, 1)
    return result


def _from_turns(config: Any, size: int, first: int) -> torch.Tensor:
    """Where rows stand that are in order: of value heads that take turns, of `size` rows each,
    behind `first` others.
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = torch.arange(values).reshape(values // keys, keys).T.flatten()
    own = heads[:, None] * size + torch.arange(size)
    return torch.cat((torch.arange(first), first + own.flatten()))


class _Model:
    """transformers' model, and the probe's text.

    Raises:
        CheckpointError: weights are missing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        quantization: str,
        device: torch.device,
        keeps_values: bool = False,
    ) -> None:
        """Args: keeps_values: as `_loaded` says."""
        transformers.logging.disable_progress_bar()
        model, missing = _loaded(folder, dtype, device, keeps_values=keeps_values)
        model = model.eval().requires_grad_(False)
        if missing:
            raise CheckpointError(f"weights are missing: {', '.join(missing[:3])}")
        text = probe_text(
            vocab_size=int(model.config.vocab_size),
            max_model_len=int(model.config.max_position_embeddings),
        )
        self._model = model
        self._input_ids = torch.tensor([text], device=device)
        self._quantization = quantization

    def logits(
        self,
        dtype: torch.dtype,
        *,
        rounds_rows: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """[T, V] float32, computed in `dtype`; `rounds_rows` as `computed_in` says. With longrope
        [2 * T, V]: by the short factors, then by the long ones.

        Args:
            kv_dtype: what K and V are rounded to; None: `dtype`.
        """
        model: Any = self._model
        quantization = self._quantization
        outputs = []
        with (
            shortened_windows(model, WINDOW_TOKENS),
            computed_in(model, dtype, quantization=quantization, rounds_rows=rounds_rows),
            torch.inference_mode(),
        ):
            for _ in _longropes(model.config):
                cache = (
                    {}
                    if kv_dtype is None
                    else {cache_name(model): _RoundingCache(kv_dtype, model.config)}
                )
                output = model(input_ids=self._input_ids, use_cache=bool(cache), **cache)
                outputs.append(output.logits[0].float())
        return torch.cat(outputs)


def _longropes(config: Any) -> Iterator[None]:
    """Makes transformers, which choose by the longest text of a batch, compute the probe's text by
    longrope's short factors, then by its long ones; once, as it is, with other embeddings.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        yield
        return
    told = config.original_max_position_embeddings
    for original in (NUM_TOKENS, 2):
        config.original_max_position_embeddings = original
        config.standardize_rope_params()
        yield
    config.original_max_position_embeddings = told
    config.standardize_rope_params()


if __name__ == "__main__":
    sys.exit(main())
