"""Chooses the attention backend and its block size."""

import importlib.util
from dataclasses import dataclass

import torch

from servicekit.config import ConfigError
from verifier.attention import block_table
from verifier.attention.backend import AttentionBackend
from verifier.attention.sdpa import SdpaBackend

FLAG = "--attention-backend"
SDPA_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """A backend's name, and its tokens per K/V block."""

    name: str
    block_size: int


def choose_attention(
    name: str, *, block_size: int, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionChoice:
    """Resolves `--attention-backend` and `--block-size`.

    "auto" never chooses `torch_varlen`.

    Args:
        name: as configured, "auto" included.
        block_size: as configured; 0: the backend's default.

    Raises:
        ConfigError: the backend cannot run here, or not with this model or these blocks.
    """
    if name == "auto":
        is_served = (
            _obstacle("flash_attn", device=device, dtype=dtype, head_dim=head_dim) is None
            and block_size % block_table.BLOCK_SIZE_MULTIPLE == 0
        )
        name = "flash_attn" if is_served else "sdpa"
    elif obstacle := _obstacle(name, device=device, dtype=dtype, head_dim=head_dim):
        raise ConfigError(FLAG, f"{name}: {obstacle}")
    if name == "sdpa":
        return AttentionChoice(name=name, block_size=block_size or SDPA_BLOCK_SIZE)
    multiple = block_table.BLOCK_SIZE_MULTIPLE
    if block_size % multiple:
        raise ConfigError(
            "--block-size", f"{block_size}: {FLAG} {name} needs a multiple of {multiple}"
        )
    return AttentionChoice(name=name, block_size=block_size or multiple)


def make_backend(choice: AttentionChoice, *, device: torch.device) -> AttentionBackend:
    """The chosen backend; imports its package only here."""
    if choice.name == "flash_attn":
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        kernel = block_table.flash_attn_kernel(flash_attn_varlen_func)
        return block_table.BlockTableBackend(choice.name, kernel, device=device)
    if choice.name == "torch_varlen":
        from torch.nn.attention.varlen import varlen_attn

        kernel = block_table.torch_varlen_kernel(varlen_attn)
        return block_table.BlockTableBackend(choice.name, kernel, device=device)
    return SdpaBackend(device=device)


def _obstacle(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot serve the model here; None: it can."""
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return f"runs on a GPU only, and the model is on {device.type}"
    if name == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if name == "torch_varlen" and not _torch_has_block_tables():
        return f"torch {torch.__version__} has no varlen_attn with a block table; 2.12 has"
    if dtype not in block_table.DTYPES:
        return f"computes in float16 and bfloat16, and --dtype is {str(dtype).split('.')[1]}"
    if head_dim > block_table.LARGEST_HEAD_DIM or head_dim % block_table.HEAD_DIM_MULTIPLE:
        return f"cannot serve heads of {head_dim} dimensions"
    return None


def _torch_has_block_tables() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 12)
