"""activation(gate) * up of a gated MLP, one program a piece of a row."""

import triton
import triton.language as tl

from verifier.gpu.kernels.overlapping_kernels import wait_for_kernel_before


@triton.jit
def activated(gate, IS_SILU: tl.constexpr):
    """SiLU, or GELU approximated by tanh, of float32 numbers."""
    if IS_SILU:
        inner = gate
    else:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner)


@triton.jit
def gate_kernel(
    gate_up,  # [T, 2 * size]: gate, then up
    gated,  # [T, size], written
    size,
    IS_SILU: tl.constexpr,  # else GELU, approximated by tanh
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    result = activated(gate, IS_SILU) * up
    tl.store(gated + row * size + at, result.to(gated.dtype.element_ty), mask=inside)
