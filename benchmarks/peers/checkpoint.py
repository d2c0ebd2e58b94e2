"""Reads a Qwen3 checkpoint with numpy alone, for peers whose converters need a model written out.

Knows safetensors files of bfloat16 or float32 (https://github.com/huggingface/safetensors).
"""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class CheckpointError(Exception):
    """The checkpoint is none that this benchmark can convert."""


def read_config(model: Path) -> dict[str, Any]:
    """Returns config.json.

    Raises:
        CheckpointError: the architecture is not Qwen3, or attention slides.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3" or config.get("use_sliding_window"):
        raise CheckpointError(f"{model} is no plain Qwen3 model; only such are converted for peers")
    return config


def rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or config
    return float(parameters["rope_theta"])


def read_tensors(model: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yields name and tensor; bfloat16 as its bits, uint16. Arrays are views of the mapped file."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header_bytes = int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8 : 8 + header_bytes])
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            types = {"BF16": np.uint16, "F32": np.float32}
            if entry["dtype"] not in types:
                raise CheckpointError(f"{path}: {name} is {entry['dtype']}, not BF16 or F32")
            start, end = entry["data_offsets"]
            tensor = np.frombuffer(
                mapped,
                dtype=types[entry["dtype"]],
                count=(end - start) // np.dtype(types[entry["dtype"]]).itemsize,
                offset=8 + header_bytes + start,
            )
            yield name, tensor.reshape(entry["shape"])


def to_float32(tensor: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def to_bfloat16(tensor: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Returns the bits, rounded to the nearest even."""
    if tensor.dtype == np.uint16:
        return tensor
    bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
