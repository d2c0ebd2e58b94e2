"""What a model's files hold: their architecture, and tensors by the type they are stored as."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from servicekit.gguf.folder import gguf_files
from servicekit.gguf.header import GgufError, read_header
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.tensor_files import TensorFiles


def contents_of(path: Path) -> dict[str, Any] | None:
    """Of a GGUF file or a folder, also of one that is not served; None: it cannot be read.

    Keys: architecture (null: it does not say), file_bytes, and types: a list of type, tensors (how
    many) and bytes, the most bytes first.
    """
    try:
        files = gguf_files(path)
        if files:
            headers = [read_header(file) for file in files]
            architecture = headers[0].metadata.get("general.architecture")
            stored = [
                (tensor.dtype, tensor.end - tensor.start)
                for header in headers
                for tensor in header.tensors.values()
            ]
        else:
            files = list(path.glob("*.safetensors"))
            config = json.loads((path / "config.json").read_bytes())
            architecture = next(iter(config.get("architectures") or ()), None)
            with TensorFiles(path) as opened:
                stored = [(each.dtype, each.end - each.start) for each in opened.tensors.values()]
    except (CheckpointError, GgufError, OSError, ValueError, AttributeError, TypeError):
        return None
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for dtype, num_bytes in stored:
        sizes[dtype].append(num_bytes)
    types = [
        {"type": dtype, "tensors": len(some), "bytes": sum(some)} for dtype, some in sizes.items()
    ]
    return {
        "architecture": architecture,
        "file_bytes": sum(file.stat().st_size for file in files),
        "types": sorted(types, key=lambda each: -each["bytes"]),
    }
