"""Triton kernels over K/V in blocks: write a step's K/V, attend, combine splits.

Each kernel reads queries per sequence, sequence lengths and block tables on the device. The launch
depends only on bounds of them, so a captured launch (a CUDA graph) can be replayed for other steps.

Attention is computed by *splits*, which begin at the same positions in every sequence: the first
NUM_EQUAL of them have SPLIT tokens each, as many after them 2 * SPLIT, and so on. With a window, a
tile reads num_splits of them at most, so the results of split j lie at j % num_splits. A row's
splits are reduced one by one, each from nothing, and folded together in their order by `_fold`. One
program does both for all splits of its rows, or several share the first, each some of the splits,
and `combine` does the second. The operations on a row are the same, so its bits do not depend on
that, nor on what else is in the batch. A key that a row does not see counts as exactly zero, so
they do not depend on the other rows of its tile either.

Shape legend: T rows of the step, B sequences, H heads, G key heads (GROUP = H / G), D = DIM, a
power of two from DIM on is DIMS. A tile has ROWS rows: TILE_TOKENS tokens times the GROUP heads
that share a key head, so that these read K/V once. Exponents are of base 2.
"""

import triton
import triton.language as tl

from verifier.gpu.kernels.overlapping_kernels import wait_for_kernel_before


@triton.jit
def write_kv(
    keys,  # [G, T, D]
    values,  # [G, T, D]
    slot_mapping,  # [T] int64; negative: a row of padding, which is not stored
    cached_keys,  # [slots, G, D], contiguous
    cached_values,  # [slots, G, D], contiguous
    row_sums,  # [T] float32, out: of all values of a row; finite if they are
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Stores K and V of one token; what is not finite as zero."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    is_value = (heads < NUM_KV_HEADS) & (dims < DIM)
    key = tl.load(
        keys + heads * key_head_stride + token * key_token_stride + dims, mask=is_value, other=0.0
    )
    value = tl.load(
        values + heads * value_head_stride + token * value_token_stride + dims,
        mask=is_value,
        other=0.0,
    )
    wide_key, wide_value = key.to(tl.float32), value.to(tl.float32)
    tl.store(row_sums + token, tl.sum(tl.sum(wide_key + wide_value, axis=1), axis=0))
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        place = slot * (NUM_KV_HEADS * DIM) + heads * DIM + dims
        key = tl.where(tl.abs(wide_key) < float("inf"), key, tl.zeros_like(key))
        value = tl.where(tl.abs(wide_value) < float("inf"), value, tl.zeros_like(value))
        tl.store(cached_keys + place, key, mask=is_value)
        tl.store(cached_values + place, value, mask=is_value)


# Of arguments that differ from step to step, kernels do not depend on the alignment, or on being 1:
# else such a step would wait for the compiler.
_INDICES = ["counts", "cu_seqlens_q", "seq_lens", "window", "num_splits"]


@triton.jit(do_not_specialize=[*_INDICES, "block_tables", "table_rows", "table_stride"])
def attend(
    queries,  # [H, T, D]
    cached_keys,  # [num_blocks, BLOCK_SIZE, G, D], contiguous
    cached_values,  # [num_blocks, BLOCK_SIZE, G, D], contiguous
    block_tables,  # [tables, table_stride] int32
    table_rows,  # [B] int32, each sequence's row of `block_tables`
    counts,  # [3] int32: sequences, rows, the longest length; what is behind them is padding
    cu_seqlens_q,  # [B + 1] int32
    seq_lens,  # [B] int32
    sinks,  # [H] float32, if HAS_SINKS: logits of a token without a value, which all rows see
    output,  # [T, H, D], out unless IS_SPLIT
    partial_tops,  # [T, H, num_splits] float32, out if IS_SPLIT
    partial_totals,  # [T, H, num_splits] float32, out if IS_SPLIT
    partial_sums,  # [T, H, num_splits, D] float32, out if IS_SPLIT
    query_head_stride,
    query_token_stride,
    table_stride,
    scale,  # of scores, times log2(e); with a softcap, divided by that instead
    softcap,  # times log2(e)
    window,  # tokens that a token sees, itself included; 0: all before it
    num_splits,  # the most that a tile reads
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_EQUAL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One tile of queries of one sequence, for one key head; of some splits only, if IS_SPLIT."""
    wait_for_kernel_before(OVERLAPS)
    # A launch has programs for as many tiles as there may be. Those that have nothing to do take
    # the time of these loads.
    num_sequences = tl.load(counts)
    num_tiles = tl.load(counts + 1) // TILE_TOKENS + num_sequences
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    # The nth of those that share a tile's splits.
    nth_program = 0
    num_programs = 1
    if IS_SPLIT:
        # As many as the launch has for each tile, but no more than the longest sequence has splits.
        longest = tl.load(counts + 2)
        most_splits = split_at(tl.maximum(longest - 1, 0), SPLIT, NUM_EQUAL) + 1
        num_programs = tl.num_programs(0) // tl.maximum(num_tiles, 1)
        num_programs = tl.minimum(num_programs, tl.minimum(most_splits, num_splits))
        # Divides by num_tiles, in few rounds: nth_program becomes the quotient, tile the remainder.
        # A division of Triton 3.7's takes 33 more registers of a thread, with heads of 64.
        while (tile >= num_tiles) & (nth_program < num_programs):
            tile -= num_tiles
            nth_program += 1
        # What begins first takes the most: of equal splits, the first ones of some programs are one
        # more than those of others; where splits grow, the last ones are the longest.
        if (most_splits > NUM_EQUAL) & (nth_program < num_programs):
            nth_program = num_programs - 1 - nth_program
    if (tile >= num_tiles) | (nth_program >= num_programs):
        return
    sequence = _sequence_of_tile(cu_seqlens_q, num_sequences, tile, TILE_TOKENS)
    first_row = tl.load(cu_seqlens_q + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - first_row
    first_query = (tile - first_row // TILE_TOKENS - sequence) * TILE_TOKENS
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens + sequence)
    first_position = seq_len - num_queries + first_query
    # The keys that any row of the tile sees: [begin, end).
    end = tl.minimum(seq_len, first_position + TILE_TOKENS)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
    first_split = split_at(begin, SPLIT, NUM_EQUAL) + nth_program
    end_split = split_at(end - 1, SPLIT, NUM_EQUAL) + 1
    if first_split >= end_split:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    query_offsets = first_query + rows // GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (query_offsets < num_queries)
    positions = seq_len - num_queries + query_offsets
    tokens = (first_row + query_offsets).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    is_value = is_row[:, None] & (dims < DIM)[None, :]
    query = tl.load(
        queries
        + (heads.to(tl.int64) * query_head_stride + tokens * query_token_stride)[:, None]
        + dims[None, :],
        mask=is_value,
        other=0.0,
    )
    out_rows = tokens * (NUM_KV_HEADS * GROUP) + heads
    table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
    # Softmax over the keys so far: the largest score, the sum of exponentials relative to it, and
    # that of values weighted by them.
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIMS], tl.float32)
    for split in range(first_split, end_split, num_programs):
        split_top = tl.full([ROWS], float("-inf"), tl.float32)
        split_total = tl.zeros([ROWS], tl.float32)
        split_weighted = tl.zeros([ROWS, DIMS], tl.float32)
        # From the window's first tile of keys on. That both are multiples of TILE_KEYS, and the
        # larger one is not negative, must be plain to the compiler: else addresses take it half as
        # many registers again, and fewer programs fit on a multiprocessor.
        start = start_of(split, SPLIT // TILE_KEYS, NUM_EQUAL) * TILE_KEYS
        low = tl.maximum(start, begin // TILE_KEYS * TILE_KEYS)
        high = tl.minimum(start_of(split + 1, SPLIT, NUM_EQUAL), end)
        for first_key in range(low, high, TILE_KEYS):
            key_positions = first_key + tl.arange(0, TILE_KEYS)
            is_key = key_positions < high
            block = tl.load(table + key_positions // BLOCK_SIZE, mask=is_key, other=0)
            slots = block.to(tl.int64) * BLOCK_SIZE + key_positions % BLOCK_SIZE
            kv_places = (slots * (NUM_KV_HEADS * DIM) + kv_head * DIM)[:, None] + dims[None, :]
            is_read = is_key[:, None] & (dims < DIM)[None, :]
            key = tl.load(cached_keys + kv_places, mask=is_read, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # softcap * tanh(scores); 2.885... is 2 * log2(e).
                scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * 2.8853900817779268)))
            sees = key_positions[None, :] <= positions[:, None]
            if HAS_WINDOW:
                sees = sees & (key_positions[None, :] > positions[:, None] - window)
            scores = tl.where(sees, scores, float("-inf"))
            new_top = tl.maximum(split_top, tl.max(scores, axis=1))
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - anchor[:, None])
            kept = tl.exp2(split_top - anchor)
            split_top = new_top
            split_total = split_total * kept + tl.sum(weights, axis=1)
            value = tl.load(cached_values + kv_places, mask=is_read, other=0.0)
            split_weighted = tl.dot(
                weights.to(value.dtype),
                value,
                split_weighted * kept[:, None],
                input_precision="ieee",
            )
        if IS_SPLIT:
            places = out_rows * num_splits + (split % num_splits if HAS_WINDOW else split)
            tl.store(partial_tops + places, split_top, mask=is_row)
            tl.store(partial_totals + places, split_total, mask=is_row)
            tl.store(
                partial_sums + places[:, None] * DIM + dims[None, :], split_weighted, mask=is_value
            )
        else:
            top, total, weighted = _fold(
                top, total, weighted, split_top, split_total, split_weighted
            )

    if not IS_SPLIT:
        if HAS_SINKS:
            top, total, weighted = _fold_sinks(top, total, weighted, sinks + heads, is_row)
        attended = (weighted / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + out_rows[:, None] * DIM + dims[None, :], attended, mask=is_value)


@triton.jit(do_not_specialize=_INDICES)
def combine(
    partial_tops,  # [T, H, num_splits] float32
    partial_totals,  # [T, H, num_splits] float32
    partial_sums,  # [T, H, num_splits, D] float32
    counts,  # as in `attend`
    cu_seqlens_q,  # [B + 1] int32
    seq_lens,  # [B] int32
    sinks,  # as in `attend`
    output,  # [T, H, D], out
    window,  # as in `attend`
    num_splits,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_EQUAL: tl.constexpr,
    UNROLLED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Folds the splits of HEADS heads of one token."""
    wait_for_kernel_before(OVERLAPS)
    token = tl.program_id(0)
    num_sequences = tl.load(counts)
    if token >= tl.load(counts + 1):
        return
    sequence = _sequence_of_row(cu_seqlens_q, num_sequences, token)
    position = tl.load(seq_lens + sequence) - tl.load(cu_seqlens_q + sequence + 1) + token
    first_split = 0
    if HAS_WINDOW:
        first_split = split_at(tl.maximum(position - window + 1, 0), SPLIT, NUM_EQUAL)
    end_split = split_at(position, SPLIT, NUM_EQUAL) + 1

    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    is_head = heads < NUM_HEADS
    is_value = is_head[:, None] & (dims < DIM)[None, :]
    rows = token.to(tl.int64) * NUM_HEADS + heads
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, DIMS], tl.float32)
    for first in range(first_split, end_split, UNROLLED):
        # Several at once, so that their loads wait together. Past the last one: empty, which
        # changes nothing.
        for nth in tl.static_range(UNROLLED):
            split = first + nth
            places = rows * num_splits + (split % num_splits if HAS_WINDOW else split)
            is_split = is_head & (split < end_split)
            split_top = tl.load(partial_tops + places, mask=is_split, other=float("-inf"))
            split_total = tl.load(partial_totals + places, mask=is_split, other=0.0)
            split_weighted = tl.load(
                partial_sums + places[:, None] * DIM + dims[None, :],
                mask=is_value & is_split[:, None],
                other=0.0,
            )
            top, total, weighted = _fold(
                top, total, weighted, split_top, split_total, split_weighted
            )
    if HAS_SINKS:
        top, total, weighted = _fold_sinks(top, total, weighted, sinks + heads, is_head)
    attended = (weighted / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + rows[:, None] * DIM + dims[None, :], attended, mask=is_value)


@triton.jit
def _fold(top, total, weighted, other_top, other_total, other_weighted):
    """Softmax over two disjoint sets of keys. An empty one changes no bit of the other."""
    new_top = tl.maximum(top, other_top)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept = tl.exp2(top - anchor)
    added = tl.exp2(other_top - anchor)
    return (
        new_top,
        total * kept + other_total * added,
        weighted * kept[:, None] + other_weighted * added[:, None],
    )


@triton.jit
def _fold_sinks(top, total, weighted, sinks, is_row):
    """Softmax with each row's sink, too. `sinks` are pointers."""
    # 1.44... is log2(e).
    sink = tl.load(sinks, mask=is_row, other=0.0) * 1.4426950408889634
    one = tl.zeros_like(total) + 1.0
    return _fold(top, total, weighted, sink, one, tl.zeros_like(weighted))


@triton.jit
def split_at(position, SPLIT: tl.constexpr, NUM_EQUAL: tl.constexpr):
    """The split that a position lies in."""
    start = 0
    doublings = 0
    while position - start >= NUM_EQUAL * SPLIT << doublings:
        start += NUM_EQUAL * SPLIT << doublings
        doublings += 1
    return doublings * NUM_EQUAL + ((position - start) // SPLIT >> doublings)


@triton.jit
def start_of(split, SPLIT: tl.constexpr, NUM_EQUAL: tl.constexpr):
    """The first position of a split; all of fewer tokens end before (size - SPLIT) * NUM_EQUAL."""
    size = SPLIT << (split // NUM_EQUAL)
    return (size - SPLIT) * NUM_EQUAL + split % NUM_EQUAL * size


@triton.jit
def _sequence_of_tile(cu_seqlens_q, num_sequences, tile, TILE_TOKENS: tl.constexpr):
    """The sequence that a tile may belong to; its first query may be past the last one.

    Sequence i has the tiles from cu_seqlens_q[i] // TILE_TOKENS + i on: as many as it needs or one
    more, so the number of tiles is known from T and B alone.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _sequence_of_row(cu_seqlens_q, num_sequences, row):
    """The sequence of a row: the last one that begins at it or before."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) <= row:
            low = middle
        else:
            high = middle
    return low
