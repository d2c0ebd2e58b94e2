"""Chooses the attention backend and its block size."""

import importlib.util
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from servicekit.config import ConfigError
from verifier.attention.backend import AttentionBackend
from verifier.attention.flash_attention import BLOCK_SIZE_MULTIPLE, DTYPES, FlashAttentionBackend
from verifier.attention.sdpa import SdpaBackend

FLAG = "--attention-backend"
TRITON_DTYPES = (*DTYPES, torch.float32)
LARGEST_HEAD_DIMS = {"triton": 512, "flash_attn": 256}
HEAD_DIM_MULTIPLE = 8
GPU_BACKENDS = ("triton", "flash_attn")
"""In the order in which "auto" tries them."""

_BLOCK_SIZES = {"sdpa": 16, "triton": 16, "flash_attn": BLOCK_SIZE_MULTIPLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """A backend's name, and its tokens per K/V block."""

    name: str
    block_size: int


def choose_attention(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionChoice:
    """Resolves `--attention-backend`.

    "auto" is the first of `GPU_BACKENDS` that can serve the model, else "sdpa".

    Args:
        name: as configured, "auto" included.
        head_dim: of the layers with the largest heads.

    Raises:
        ConfigError: the backend cannot run here, or not with this model.
    """

    def obstacle_to(backend: str) -> str | None:
        return _obstacle(backend, device=device, dtype=dtype, head_dim=head_dim)

    if name == "auto":
        for backend in GPU_BACKENDS:
            if obstacle_to(backend) is None:
                name = backend
                break
        else:
            name = "sdpa"
    elif obstacle := obstacle_to(name):
        raise ConfigError(FLAG, f"{name}: {obstacle}")
    return AttentionChoice(name=name, block_size=_BLOCK_SIZES[name])


def make_backend(
    choice: AttentionChoice, *, device: torch.device, is_strict: bool = False
) -> AttentionBackend:
    """The chosen backend; imports its package only here.

    Args:
        is_strict: a row's bits must not depend on its step; only `triton` heeds it.

    Raises:
        ConfigError: its package cannot be imported.
    """
    if choice.name == "triton":
        from verifier.gpu.attention.triton_backend import TritonBackend

        return TritonBackend(device=device, is_strict=is_strict)
    if choice.name == "flash_attn":
        try:
            from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
        except ImportError as error:  # a build for another torch
            raise ConfigError(FLAG, f"flash_attn: cannot be imported: {error}") from error

        return FlashAttentionBackend(flash_attn_varlen_func, device=device)
    return SdpaBackend(device=device)


def _obstacle(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot serve the model here; None: it can."""
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return f"runs on a GPU only, and the model is on {device.type}"
    if name == "triton" and (lack := lack_of_triton()):
        return lack
    if name == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    dtypes = TRITON_DTYPES if name == "triton" else DTYPES
    if dtype not in dtypes:
        types = " and ".join(str(each).removeprefix("torch.") for each in dtypes)
        return f"computes in {types}, and --dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim > LARGEST_HEAD_DIMS[name] or head_dim % HEAD_DIM_MULTIPLE:
        return f"cannot serve heads of {head_dim} dimensions"
    return None


def lack_of_triton() -> str | None:
    """What is missing here of what Triton needs; None: nothing.

    It compiles at run time a C module that launches its kernels, with Python's headers.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not any(shutil.which(name) for name in ("gcc", "clang")):
        return "no C compiler is installed, which Triton needs"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are not installed, which Triton needs"
    return None
