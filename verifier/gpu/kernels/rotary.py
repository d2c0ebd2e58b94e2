"""Norms and rotary embedding of a step's heads, and K/V into the cache, one program a head."""

import triton
import triton.language as tl

from verifier.gpu.kernels.overlapping_kernels import wait_for_kernel_before

# What a warp holds in registers.
_HEADS_AT_ONCE = tl.constexpr(8)


@triton.jit
def rotate_and_store_kernel(
    qkv,  # [T, heads, head_dim]: query heads, key heads, value heads
    rotated,  # as qkv, written; another memory, since programs read what they rotate twice
    cos_sin,  # [T, 2, num_pairs] float32: cosines, sines
    head_norms,  # [num_normed, head_dim] float32, if HAS_NORMS
    num_normed,  # heads that have a norm: the first ones
    slot_mapping,  # [T] int64; rows with a slot under zero are not stored
    keys,  # [num_slots, num_kv_heads, head_dim], written
    values,  # the same
    is_bad,  # [T] int32, set to 1
    eps,
    num_heads,  # of queries
    num_kv_heads,
    head_dim,
    num_pairs,
    HAS_NORMS: tl.constexpr,
    NORMS_PROJECTIONS: tl.constexpr,  # one norm of all query heads, and one of all key heads
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least head_dim
):
    wait_for_kernel_before(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < head_dim
    start = (token * (num_heads + 2 * num_kv_heads) + head) * head_dim
    own = tl.load(qkv + start + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if HAS_NORMS:
        weight = head_norms + head * head_dim
        if head < num_normed:
            if NORMS_PROJECTIONS:
                is_key = (head >= num_heads).to(tl.int32)
                factor = _projection_factor(
                    qkv + start - (head - is_key * num_heads) * head_dim,
                    tl.where(is_key > 0, num_kv_heads, num_heads),
                    head_dim,
                    eps,
                    BLOCK,
                )
            else:
                factor = tl.rsqrt(tl.sum(own * own, axis=0) / head_dim + eps)
            own = own * factor * tl.load(weight + at, mask=inside, other=0.0)
    if head < num_heads + num_kv_heads:
        is_rotated = at < 2 * num_pairs
        is_first = at < num_pairs
        partner_at = tl.where(is_first, at + num_pairs, at - num_pairs)
        partner = tl.load(qkv + start + partner_at, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_NORMS:
            partner = partner * factor * tl.load(weight + partner_at, mask=is_rotated, other=0.0)
        pair = cos_sin + token * 2 * num_pairs + tl.where(is_first, at, at - num_pairs)
        cos = tl.load(pair, mask=is_rotated, other=1.0)
        sin = tl.load(pair + num_pairs, mask=is_rotated, other=0.0)
        own = own * cos + tl.where(is_first, -partner, partner) * sin
    result = own.to(rotated.dtype.element_ty)
    if head >= num_heads:
        # False for NaN, too. Of the rounded value: a finite one may have overflowed.
        is_finite = tl.abs(result.to(tl.float32)) < float("inf")
        result = tl.where(is_finite, result, tl.zeros_like(result))
        num_bad = tl.sum((inside & (is_finite == 0)).to(tl.int32), axis=0)
        # Several programs may store it: all of them the same.
        tl.store(is_bad + token, 1, mask=num_bad > 0)
        slot = tl.load(slot_mapping + token)
        is_stored = at < tl.where(slot >= 0, head_dim, 0)
        if head < num_heads + num_kv_heads:
            place = (slot * num_kv_heads + head - num_heads) * head_dim
            tl.store(keys + place + at, result, mask=is_stored)
        else:
            place = (slot * num_kv_heads + head - num_heads - num_kv_heads) * head_dim
            tl.store(values + place + at, result, mask=is_stored)
    tl.store(rotated + start + at, result, mask=inside)


@triton.jit
def _projection_factor(heads, num_heads, head_dim, eps, BLOCK: tl.constexpr):
    """Of the norm of `num_heads` heads that lie side by side: 1 / the root of their mean square.

    Each head's program adds up all of them, in one order: so no program waits for another.
    """
    at = tl.arange(0, BLOCK)
    squares = tl.zeros([_HEADS_AT_ONCE, BLOCK], dtype=tl.float32)
    for first in range(0, num_heads, _HEADS_AT_ONCE):
        rows = first + tl.arange(0, _HEADS_AT_ONCE)
        inside = (rows < num_heads)[:, None] & (at < head_dim)[None, :]
        places = heads + rows[:, None] * head_dim + at[None, :]
        numbers = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        squares += numbers * numbers
    mean = tl.sum(tl.sum(squares, axis=1), axis=0) / (num_heads * head_dim)
    return tl.rsqrt(mean + eps)
