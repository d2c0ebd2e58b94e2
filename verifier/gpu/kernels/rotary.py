"""Norms and rotary embedding of a step's heads, and K/V into the cache, one program a head."""

import triton
import triton.language as tl

from verifier.gpu.kernels.overlapping_kernels import wait_for_kernel_before


@triton.jit
def rotate_and_store_kernel(
    qkv,  # [T, heads, head_dim]: query heads, key heads, value heads
    rotated,  # as qkv, written; another memory, since programs read what they rotate twice
    cos_sin,  # [T, 2, num_pairs] float32: cosines, sines
    head_norms,  # [NUM_NORMS, head_dim] float32, if there are any
    slot_mapping,  # [T] int64; rows with a slot under zero are not stored
    keys,  # [num_slots, num_kv_heads, head_dim], written
    values,  # the same
    is_bad,  # [T] int32, set to 1
    eps,
    num_heads,  # of queries
    num_kv_heads,
    head_dim,
    num_pairs,
    NUM_NORMS: tl.constexpr,  # of queries, keys, values
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
    if head < num_heads + num_kv_heads:
        is_rotated = at < 2 * num_pairs
        is_first = at < num_pairs
        partner_at = tl.where(is_first, at + num_pairs, at - num_pairs)
        partner = tl.load(qkv + start + partner_at, mask=is_rotated, other=0.0).to(tl.float32)
        if NUM_NORMS > 0:
            weight = head_norms + (head >= num_heads).to(tl.int32) * head_dim
            factor = tl.rsqrt(tl.sum(own * own, axis=0) / head_dim + eps)
            own = own * factor * tl.load(weight + at, mask=inside, other=0.0)
            partner = partner * factor * tl.load(weight + partner_at, mask=is_rotated, other=0.0)
        pair = cos_sin + token * 2 * num_pairs + tl.where(is_first, at, at - num_pairs)
        cos = tl.load(pair, mask=is_rotated, other=1.0)
        sin = tl.load(pair + num_pairs, mask=is_rotated, other=0.0)
        own = own * cos + tl.where(is_first, -partner, partner) * sin
    elif NUM_NORMS > 2:
        factor = tl.rsqrt(tl.sum(own * own, axis=0) / head_dim + eps)
        own = own * factor * tl.load(head_norms + 2 * head_dim + at, mask=inside, other=0.0)
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
