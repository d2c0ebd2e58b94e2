"""Adds an update to the residual stream and normalises the sum, one program a row."""

import triton
import triton.language as tl

from verifier.gpu.kernels.overlapping_kernels import wait_for_kernel_before


@triton.jit
def add_norm_kernel(
    residual,  # [T, size] float32, read and written
    update,  # [T, size], if HAS_UPDATE
    update_norm,  # [size] float32, if HAS_UPDATE_NORM
    weight,  # [size] float32, if HAS_WEIGHT
    normed,  # [T, size], written
    size,
    eps,
    scale,  # of the sum
    HAS_UPDATE: tl.constexpr,
    HAS_UPDATE_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,  # else the sum itself is written
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least size
):
    start = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    # All loads come before the sums, for which threads wait: so they are under way at once.
    if HAS_WEIGHT:
        factors = tl.load(weight + at, mask=inside, other=0.0)
    wait_for_kernel_before(OVERLAPS)
    total = tl.load(residual + start + at, mask=inside, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + start + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_UPDATE_NORM:
            update_factors = tl.load(update_norm + at, mask=inside, other=0.0)
            factor = tl.rsqrt(tl.sum(added * added, axis=0) / size + eps)
            added = added * factor * update_factors
        total = (total + added) * scale
        tl.store(residual + start + at, total, mask=inside)
    else:
        total *= scale
    if HAS_WEIGHT:
        factor = tl.rsqrt(tl.sum(total * total, axis=0) / size + eps)
        total = total * factor * factors
    tl.store(normed + start + at, total.to(normed.dtype.element_ty), mask=inside)
