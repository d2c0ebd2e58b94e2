"""Reads how a checkpoint's linear weights are quantised: `quantization_config` of its config.json.

Which layers are quantised, the tensors tell. What is not known is refused by its key.
"""

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifier.checkpoint.group_formats import GROUP
from verifier.checkpoint.inert_keys import is_inert
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.text_part import text_config

_KEY = "quantization_config"
# By key, values that are served; None: the key is absent.
_Allowed = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How quantised weights are stored.

    Attributes:
        method: `quant_method`.
        schemes: bits of a code, inputs of a group (None: all of a row), of any layer.
        zero_offset: by how much zeros are larger than they are stored.
        block: rows and columns that share a scale of FP8, where they are not all of a row.
    """

    method: str
    schemes: frozenset[tuple[int, int | None]]
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def read_quantization(folder: Path) -> Quantization | None:
    """None: the configuration tells of no quantised weights, or cannot be read.

    Raises:
        CheckpointError: they are not served; its message names the key.
    """
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        # What needs the file says so.
        return None
    options = text_config(content).get(_KEY) if isinstance(content, dict) else None
    if not options:
        return None
    where = f"{folder / 'config.json'}: {_KEY}: "
    readers = {
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
    }
    method = _object(options, where).get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise _not_served(where, "quant_method", method)
    return readers[method](options, where)


_CT_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)
_CT_INERT = frozenset(
    {"config_groups", "global_compression_ratio", "ignore", "quant_method", "version"}
)
_CT_WEIGHT_INERT = frozenset(
    {"block_structure", "group_size", "observer", "observer_kwargs", "scale_dtype", "symmetric"}
    | {"zp_dtype"}
)


def _compressed_tensors(options: Mapping[str, Any], where: str) -> Quantization:
    sparsity = _object(options.get("sparsity_config") or {}, f"{where}sparsity_config ")
    _check(
        {**options, "sparsity_config": sparsity.get("format")},
        {
            "format": _CT_FORMATS,
            "quantization_status": (None, "compressed", "frozen"),
            "sparsity_config": (None, "dense"),
        },
        _CT_INERT,
        where,
    )
    schemes, blocks = set(), set()
    groups = _object(options.get("config_groups"), f"{where}config_groups ")
    for name, group in groups.items():
        within = f"{where}{name}: "
        weights = _object(_object(group, within).get("weights"), f"{within}weights: ")
        is_float = weights.get("type") == "float"
        # Activations stay as they are: rounding them to FP8 would serve speed alone.
        inert = {"targets", "weights", "input_activations"} if is_float else {"targets", "weights"}
        _check(group, {"format": (None, *_CT_FORMATS)}, inert, within)
        within += "weights: "
        _check(
            weights,
            {
                "actorder": (None, "static", "weight"),
                "num_bits": (8,) if is_float else (4, 8),
                "strategy": ("tensor", "channel", "block") if is_float else ("group", "channel"),
                "type": ("int", "float"),
            },
            _CT_WEIGHT_INERT,
            within,
        )
        if is_float:
            if weights["strategy"] == "block":
                blocks.add(_block(weights, "block_structure", within))
            continue
        size = -1 if weights["strategy"] == "channel" else weights.get("group_size")
        schemes.add((weights["num_bits"], _group_size(size, within)))
    if len(blocks) > 1:
        raise _not_served(where, "block_structure", blocks)
    return Quantization(
        method="compressed-tensors",
        schemes=frozenset(schemes),
        block=next(iter(blocks), None),
    )


# What decided how codes were chosen, and how other programs compute with them. What `sym` and
# `desc_act` tell is in the tensors, too.
_GPTQ_INERT = frozenset(
    {"act_group_aware", "batch_size", "block_name_to_quantize", "cache_block_outputs"}
    | {"damp_auto_increment", "damp_percent", "dataset", "desc_act", "exllama_config"}
    | {"fuse_max_seq_len", "group_size", "lm_head", "max_input_length", "meta"}
    | {"model_file_base_name", "model_name_or_path", "model_seqlen", "modules_to_not_convert"}
    | {"module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id"}
    | {"quant_method", "quantizer", "static_groups", "sym", "tokenizer", "true_sequential"}
    | {"use_cuda_fp16", "use_exllama"}
)
_GPTQ_FORMATS = (None, "gptq", "gptq_v2")


def _gptq(options: Mapping[str, Any], where: str) -> Quantization:
    _check(
        options,
        {
            "bits": (4, 8),
            "checkpoint_format": _GPTQ_FORMATS,
            "format": _GPTQ_FORMATS,
            "pack_dtype": (None, "int32"),
        },
        _GPTQ_INERT | {"backend"},
        where,
    )
    size = _group_size(options.get("group_size"), where)
    is_second = "gptq_v2" in (options.get("checkpoint_format"), options.get("format"))
    return Quantization(
        method="gptq",
        schemes=frozenset({(options["bits"], size)}),
        zero_offset=0 if is_second else 1,
    )


def _awq(options: Mapping[str, Any], where: str) -> Quantization:
    _check(
        options,
        {
            "backend": (None, "auto", "autoawq"),
            "bits": (4,),
            "format": (None, "gemm"),
            "version": (None, "gemm", "GEMM"),
            "zero_point": (True,),
        },
        _GPTQ_INERT,
        where,
    )
    size = _group_size(options.get("group_size"), where)
    return Quantization(method="awq", schemes=frozenset({(4, size)}))


def _fp8(options: Mapping[str, Any], where: str) -> Quantization:
    _check(
        options,
        {"activation_scheme": (None, "dynamic", "static"), "fmt": (None, "e4m3")},
        frozenset(
            {"ignored_layers", "modules_to_not_convert", "quant_method", "scale_fmt"}
            | {"weight_block_size"}
        ),
        where,
    )
    block = None
    if options.get("weight_block_size") is not None:
        block = _block(options, "weight_block_size", where)
    return Quantization(method="fp8", schemes=frozenset(), block=block)


def _mxfp4(options: Mapping[str, Any], where: str) -> Quantization:
    _check(options, {}, frozenset({"modules_to_not_convert", "quant_method"}), where)
    return Quantization(method="mxfp4", schemes=frozenset())


def _block(options: Mapping[str, Any], key: str, where: str) -> tuple[int, int]:
    match options.get(key):
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and not columns % GROUP:
            return rows, columns
    raise _not_served(where, key, options.get(key))


def _group_size(size: Any, where: str) -> int | None:
    if size == -1:
        return None
    if type(size) is not int or size < 1 or size % GROUP:
        raise _not_served(where, "group_size", size)
    return size


def _check(
    options: Mapping[str, Any], allowed: _Allowed, inert: AbstractSet[str], where: str
) -> None:
    """Refuses other values than the allowed ones, and other keys unless they are off.

    Args:
        inert: keys that are read elsewhere, or decide no value.
    """
    for key, values in allowed.items():
        if options.get(key) not in values:
            raise _not_served(where, key, options.get(key))
    for key, value in options.items():
        if key not in allowed and key not in inert and not is_inert(key, value):
            raise _not_served(where, key, value)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}is no JSON object")
    return value


def _not_served(where: str, key: str, value: object) -> CheckpointError:
    return CheckpointError(f"{where}{key} {str(value)[:100]} is not served")
