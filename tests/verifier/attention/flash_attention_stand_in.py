"""A STAND-IN for FlashAttention's kernel, which runs on GPUs only: flash_attn 2.8's
`flash_attn_varlen_func`.

It has the documented signature and meaning of the real one, computes by brute force, one query of
one sequence at a time, and refuses what the real kernel refuses. It checks layouts and arguments on
a CPU. Only tests/gpu/ checks the kernel itself.
"""

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """The part that Tandem uses: paged, no dropout, cap or slopes.

    As in the real one, `causal` bounds the window to the right, whatever bound it has there; and
    heads that share K/V are computed together in a decode only without bounds.
    """
    assert block_table is not None
    if -1 in window_size:
        assert window_size == (-1, -1), "the path for a decode of grouped heads is not taken"
    if causal:
        window_size = (window_size[0], 0)
    assert dropout_p == softcap == 0.0
    assert alibi_slopes is None
    assert not return_attn_probs
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_k == lengths.max()
    return brute_force(
        q,
        k,
        v,
        cu_seqlens_q,
        lengths.int(),
        block_table,
        max_seqlen_q=max_seqlen_q,
        scale=softmax_scale,
        window_size=window_size,
    )


def brute_force(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_seqlen_q: int,
    scale: float | None,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Query j of n, of a text of length L, is at position p = L - n + j; it sees [p - left, p]."""
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    assert keys.shape == values.shape
    assert block_size % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert queries.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    for indices in (cu_seqlens_q, seq_lens, block_table):
        assert indices.dtype is torch.int32
        assert indices.is_contiguous()
    assert ((block_table >= 0) & (block_table < num_blocks)).all()
    counts = cu_seqlens_q.diff()
    assert max_seqlen_q == counts.max()
    assert len(queries) == cu_seqlens_q[-1], "rows past the last sequence are left as they were"
    attended = torch.empty_like(queries)
    group = queries.shape[1] // num_kv_heads
    for i, length in enumerate(seq_lens.tolist()):
        used = block_table[i, : -(-length // block_size)].long()
        own = [
            cache[used].reshape(-1, num_kv_heads, head_dim)[:length].repeat_interleave(group, dim=1)
            for cache in (keys, values)
        ]
        start, end = cu_seqlens_q[i : i + 2].tolist()
        for row in range(start, end):
            at = length - end + row
            first = 0 if window_size[0] < 0 else max(0, at - window_size[0])
            last = length if window_size[1] < 0 else at + 1 + window_size[1]
            key, value = (cache[first:last] for cache in own)
            scores = torch.einsum("hd,lhd->hl", queries[row], key) * (scale or head_dim**-0.5)
            attended[row] = torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), value)
    return attended
