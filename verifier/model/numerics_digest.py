"""A digest that two verifiers share if they continue a sequence with the same tokens.

It covers everything known to decide the bits of logits and of sampling noise: software versions,
processor and settings. For what is not known, such as a library's environment variable, it covers
the logits of the parity probe's text. The number of threads is left out: under `strict`, one thread
and two gave the same bits wherever tried (the bundled model, float32 and bfloat16). If threads made
a difference, the probe's logits would differ.
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
    """The digest of a model that runs in this process, on a CPU.

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
    """The versions that compute (sdpa is torch's own), define the model, and make the noise."""
    return (
        f"torch {torch.__version__} {torch.version.git_version}",
        f"transformers {transformers.__version__}",
        f"numba {numba.__version__}",
        f"numpy {np.__version__}",
        " ".join(platform.libc_ver()),
    )


def _processor() -> tuple[str, ...]:
    """Its features decide the kernels of torch and its libraries; its name, their block sizes."""
    lines = cpu_lines()
    return (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        lines.get("model name", platform.processor()),
        " ".join(sorted(lines.get("flags", lines.get("Features", "")).split())),
    )
