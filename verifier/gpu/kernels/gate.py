"""activation(gate) * up of a gated MLP, one program a piece of a row."""

import triton
import triton.language as tl

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.kernels.overlapping_kernels import wait_for_kernel_before

_GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
_CLAMPED = tl.constexpr(int(Activation.CLAMPED))


@triton.jit
def gated_by(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up of float32 numbers; ACTIVATION is the number of an `Activation`."""
    inner = gate
    if ACTIVATION == _GELU_TANH:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif ACTIVATION == _CLAMPED:
        # A minimum may leave NaN out.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        inner = 1.702 * gate
    return gate * tl.sigmoid(inner) * up


@triton.jit
def gate_kernel(
    gates,  # [T, size]
    ups,  # [T, size]
    gated,  # [T, size], contiguous, written
    size,
    gate_stride,  # from row to row
    up_stride,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gates + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    result = gated_by(gate, up, ACTIVATION)
    tl.store(gated + row * size + at, result.to(gated.dtype.element_ty), mask=inside)
