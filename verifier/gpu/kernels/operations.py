"""Launches the kernels on tensors. Imports Triton, so only where there is a GPU."""

import torch
import torch.nn.functional
import triton

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.groups import GroupedWeight
from verifier.gpu.kernels.fusion import FUSED
from verifier.gpu.kernels.gate import gate_kernel
from verifier.gpu.kernels.norm import add_norm_kernel
from verifier.gpu.kernels.overlapping_kernels import overlap_options
from verifier.gpu.kernels.product import (
    FAST_FOR_FEW_ROWS,
    FEW_ROWS,
    GROUPED_TILES,
    PRODUCT_TILES,
    ROOMY_SHARED_MEMORY,
    SMALLEST_SHARED_MEMORY,
    ProductTile,
    arguments_of,
    product_kernel,
    tile_for,
)
from verifier.gpu.kernels.rotary import rotate_and_store_kernel

_GATE_BLOCK = 1024


class TritonOperations:
    """Implements `Operations`. Kernels run on the thread's current GPU.

    Strict or not, all but products are the same: one program reduces a whole row.
    """

    def __init__(
        self,
        *,
        is_strict: bool = False,
        shared_memory: int = SMALLEST_SHARED_MEMORY,
        overlaps: bool = False,
    ) -> None:
        """Chooses kernels; launches none.

        Args:
            is_strict: all products by a kernel, else those of many rows by torch.
            shared_memory: bytes of one multiprocessor of the GPU.
            overlaps: kernels begin as `overlapping_kernels.py` says, which the GPU must be able to.
        """
        self.is_strict = is_strict
        self._is_roomy = shared_memory >= ROOMY_SHARED_MEMORY
        self._overlaps = overlaps

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        is_fast = len(rows) <= FEW_ROWS and rows.dtype in FAST_FOR_FEW_ROWS and rows.is_contiguous()
        if not (self.is_strict or is_fast):
            return torch.nn.functional.linear(rows, weight, bias)
        assert rows.is_contiguous()
        assert weight.is_contiguous()
        return self._multiply(rows, weight, bias, PRODUCT_TILES[rows.dtype])

    def grouped_linear(
        self, rows: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if rows.dtype not in FAST_FOR_FEW_ROWS:
            return self.linear(rows, weight.widened(rows.dtype), bias)
        return self._multiply(rows.contiguous(), weight, bias, GROUPED_TILES)

    def _multiply(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | GroupedWeight,
        bias: torch.Tensor | None,
        tiles: tuple[ProductTile, ...],
    ) -> torch.Tensor:
        (num_rows, num_inputs), num_outputs = rows.shape, weight.shape[0]
        product = rows.new_empty(num_rows, num_outputs)
        if num_rows:
            tile = tile_for(num_rows, tiles)
            num_stages = (self._is_roomy and tile.num_roomy_stages) or tile.num_stages
            grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs))
            *arguments, constants = arguments_of(weight)
            product_kernel[grid](
                rows,
                *arguments,
                bias,
                product,
                num_rows,
                num_inputs,
                num_outputs,
                **constants,
                HAS_BIAS=bias is not None,
                TILE_ROWS=tile.rows,
                TILE_OUTPUTS=tile.outputs,
                TILE_INPUTS=tile.inputs,
                num_warps=tile.num_warps,
                num_stages=num_stages,
                **FUSED,
                **overlap_options(self._overlaps, num_rows),
            )
        return product

    def add_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        update_norm: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        eps: float,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> torch.Tensor:
        num_rows, size = residual.shape
        normed = torch.empty_like(residual, dtype=dtype)
        block = triton.next_power_of_2(size)
        # A grid without programs is an error.
        if num_rows:
            add_norm_kernel[(num_rows,)](
                residual,
                update,
                update_norm,
                weight,
                normed,
                size,
                eps,
                scale,
                HAS_UPDATE=update is not None,
                HAS_UPDATE_NORM=update_norm is not None,
                HAS_WEIGHT=weight is not None,
                BLOCK=block,
                num_warps=min(max(block // 256, 1), 16),
                **FUSED,
                **overlap_options(self._overlaps, num_rows),
            )
        return normed

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        head_norms: torch.Tensor | None,
        *,
        norms_projections: bool,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        slot_mapping: torch.Tensor,
        is_bad: torch.Tensor,
    ) -> torch.Tensor:
        num_tokens, all_heads, head_dim = qkv.shape
        num_kv_heads = keys.shape[1]
        rotated = torch.empty_like(qkv)
        if num_tokens:
            rotate_and_store_kernel[(num_tokens, all_heads)](
                qkv,
                rotated,
                cos_sin,
                head_norms,
                0 if head_norms is None else len(head_norms),
                slot_mapping,
                keys,
                values,
                is_bad,
                eps,
                all_heads - 2 * num_kv_heads,
                num_kv_heads,
                head_dim,
                cos_sin.shape[2],
                HAS_NORMS=head_norms is not None,
                NORMS_PROJECTIONS=norms_projections,
                BLOCK=triton.next_power_of_2(head_dim),
                num_warps=1,
                **FUSED,
                **overlap_options(self._overlaps, num_tokens),
            )
        return rotated

    def gate(
        self, gate_up: torch.Tensor, activation: Activation, ups: torch.Tensor | None = None
    ) -> torch.Tensor:
        gates, ups = gate_up.chunk(2, dim=1) if ups is None else (gate_up, ups)
        num_rows, size = gates.shape
        assert gates.stride(1) == ups.stride(1) == 1
        gated = gates.new_empty(num_rows, size)
        if num_rows:
            gate_kernel[(num_rows, triton.cdiv(size, _GATE_BLOCK))](
                gates,
                ups,
                gated,
                size,
                gates.stride(0),
                ups.stride(0),
                ACTIVATION=int(activation),
                BLOCK=_GATE_BLOCK,
                **FUSED,
                **overlap_options(self._overlaps, num_rows),
            )
        return gated
