"""The dtype that a model of transformers is computed in."""

from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
