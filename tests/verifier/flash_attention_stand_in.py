"""STAND-INS for FlashAttention's kernels, which run on GPUs only.

Each has the documented signature and meaning of the real one, computes by brute force, one query
of one sequence at a time, and refuses what the real kernels refuse. They check layouts and
arguments on a CPU. Only tests/gpu/ checks the kernels themselves.

Sources: flash_attn 2.8, `flash_attn_varlen_func`; torch 2.13, `aten::_flash_attention_forward` as
called by `torch.nn.attention.varlen.varlen_attn`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def torch_kernel() -> Iterator[None]:
    """Within the context, torch's own FlashAttention operator has an implementation on CPU.

    `varlen_attn`, the function that Tandem calls, is then torch's own, with its checks.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _flash_attention_forward, "CPU")
        yield


def _flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    assert seqused_k is not None
    assert block_table is not None
    assert window_size_left is not None
    assert window_size_right == 0
    assert is_causal == (window_size_left == -1)
    assert num_splits == 1
    assert alibi_slopes is None
    assert max_k == seqused_k.max()
    assert torch.equal(cum_seq_k.diff(), seqused_k)
    attended = brute_force(
        query,
        key,
        value,
        cum_seq_q,
        seqused_k,
        block_table,
        max_seqlen_q=max_q,
        scale=scale,
        window_size=(window_size_left, window_size_right),
    )
    rest: Any = [torch.zeros(()) for _ in range(4)]
    return attended, *rest


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
