"""Launches the kernels of FP8 rows. Imports Triton, so only where there is a GPU."""

import torch
import triton

from verifier.gpu.kernels.fp8 import quantise_rows_kernel, rescale_kernel
from verifier.gpu.kernels.fusion import FUSED

_BLOCK = 2048
_RESCALE_BLOCK = 1024


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `verifier.gpu.fp8.quantised`, with the same bits."""
    num_rows, size = rows.shape
    rows = rows.contiguous()
    values = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty((num_rows, 1), dtype=torch.float32)
    # A grid without programs is an error.
    if num_rows:
        quantise_rows_kernel[(num_rows,)](rows, values, scales, size, BLOCK=_BLOCK, **FUSED)
    return values, scales


def rescale_product(
    product: torch.Tensor,
    row_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `verifier.gpu.fp8.rescaled`, with the same bits."""
    num_rows, size = product.shape
    rescaled = torch.empty_like(product, dtype=dtype)
    if num_rows:
        rescale_kernel[(num_rows, triton.cdiv(size, _RESCALE_BLOCK))](
            product,
            row_scale,
            scale,
            bias,
            rescaled,
            size,
            HAS_BIAS=bias is not None,
            BLOCK=_RESCALE_BLOCK,
            **FUSED,
        )
    return rescaled
