"""Launches the kernel of FP8 rows. Imports Triton, so only where there is a GPU."""

import torch

from verifier.gpu.kernels.fp8 import quantise_rows_kernel

_BLOCK = 2048


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `verifier.gpu.fp8.quantised`, with the same bits."""
    num_rows, size = rows.shape
    rows = rows.contiguous()
    values = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty((num_rows, 1), dtype=torch.float32)
    # A grid without programs is an error.
    if num_rows:
        quantise_rows_kernel[(num_rows,)](rows, values, scales, size, BLOCK=_BLOCK)
    return values, scales
