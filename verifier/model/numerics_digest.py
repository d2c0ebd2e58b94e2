"""The digest by which one tells that two verifiers continue a sequence with the same tokens.

It is made of all that decides the bits of logits and of the noise that tokens are drawn with, as
far as it is known: software versions, processor, settings, and, for what is not known (a library's
environment variable, say), the very logits of the parity probe's text. The number of threads is not
in it: under `strict`, one thread and two gave the same bits wherever it was tried (the bundled
model, float32 and bfloat16); where it made a difference, the probe's logits would tell.
"""

import hashlib
import platform

import numba
import numpy as np
import torch
import transformers

from verifier.model.cpu_kernels import cpu_lines


def numerics_digest(
    *,
    dtype: torch.dtype,
    quantization: str,
    numerics: str,
    attention_backend: str,
    tensor_parallel_size: int,
    probe_logits: torch.Tensor,
) -> str:
    """Of a model that runs in this process, on a CPU.

    Args:
        probe_logits: [T, V], of the parity probe's text.
    """
    parts = (
        str(dtype),
        quantization,
        numerics,
        attention_backend,
        f"tp={tensor_parallel_size}",
        *_software(),
        *_processor(),
        hashlib.sha256(probe_logits.float().cpu().numpy().tobytes()).hexdigest(),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _software() -> tuple[str, ...]:
    """What computes (sdpa is torch's own), defines the model, and makes the noise."""
    return (
        f"torch {torch.__version__} {torch.version.git_version}",
        f"transformers {transformers.__version__}",
        f"numba {numba.__version__}",
        f"numpy {np.__version__}",
        " ".join(platform.libc_ver()),
    )


def _processor() -> tuple[str, ...]:
    """By its features, torch and its libraries pick their kernels; by its name, block sizes."""
    lines = cpu_lines()
    return (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        lines.get("model name", platform.processor()),
        " ".join(sorted(lines.get("flags", lines.get("Features", "")).split())),
    )
