"""Gated delta nets, token by token: `verifier.gpu.layers.deltas` says what is computed.

`delta_kernel` computes states. A program holds COLUMNS columns of one head's state in registers,
through all rows of one sequence: the accepted drafts of the last step, then the step's tokens. It
stores them after the last certain row, so drafts leave nothing. What it does for a row depends on
that row and the state alone.

`keep_kernel` comes after it, since all programs of a sequence read the raw inputs that it writes
over.

Shape legend: as there; W = C + 2 * V, the numbers of a raw input.
"""

import triton
import triton.language as tl


@triton.jit
def _inputs_of(
    channels,  # as in `delta_kernel`
    recent,
    channel_stride,
    recent_width,
    rows,  # [N], counted from the accepted drafts on; negative: of the tokens before
    places,  # [M], among channels
    is_read,  # [N, M]
    first_token,
    num_accepted,
    is_known,  # whether there are states, and rows before
    NUM_BEFORE: tl.constexpr,
):
    """Raw inputs [N, M] float32."""
    is_old = (rows < num_accepted)[:, None]
    old = recent + (NUM_BEFORE + rows)[:, None] * recent_width + places[None, :]
    new = first_token + rows - num_accepted
    new = channels + new.to(tl.int64)[:, None] * channel_stride + places[None, :]
    return tl.where(
        is_old,
        tl.load(old, mask=is_read & is_old & is_known, other=0.0).to(tl.float32),
        tl.load(new, mask=is_read & (is_old == 0), other=0.0).to(tl.float32),
    )


@triton.jit
def _convolved(inputs, weights, is_last):
    """Silu of the sums over taps, and how many of the last tap's inputs are not finite."""
    total = tl.sum(inputs * weights, axis=0)
    # False for NaN, too.
    is_bad = is_last & ((tl.abs(inputs) < float("inf")) == 0)
    return total * tl.sigmoid(total), tl.sum(tl.sum(is_bad.to(tl.int32), axis=1), axis=0)


@triton.jit
def delta_kernel(
    channels,  # [T, C], rows `channel_stride` apart
    numbers,  # [T, 2 * V]
    convolution,  # [J, C] float32
    decay_rate,  # [V] float32
    decay_bias,  # [V] float32
    states,  # [slots, V, KEY_DIM, VALUE_DIM] float32, read and written
    recent,  # [slots, J - 1 + drafts, W]
    counts,  # [1 or more] int32: entries that are no padding
    cu_seqlens_q,  # [B + 1] int32
    entries,  # [B, 4] int32: slot, source, accepted drafts, drafts
    save_offsets,  # [B + 1] int32
    saves,  # [S, 2] int32: rows, slot
    outputs,  # [T, V, VALUE_DIM] float32, written
    is_bad,  # [T] int32, set to 1
    channel_stride,
    recent_slot,  # numbers of a slot of `recent`
    key_scale,  # KEY_DIM ** -0.5
    eps,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,  # J
    TAKES_TURNS: tl.constexpr,
    KEYS: tl.constexpr,  # a power of two, at least KEY_DIM
    COLUMNS: tl.constexpr,  # divides VALUE_DIM
    TAPS: tl.constexpr,  # a power of two, at least J
):
    entry = tl.program_id(0)
    if entry >= tl.load(counts):
        return
    head = tl.program_id(1)
    key_head = head % NUM_KEY_HEADS
    if not TAKES_TURNS:
        key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    slot = tl.load(entries + 4 * entry).to(tl.int64)
    source = tl.load(entries + 4 * entry + 1).to(tl.int64)
    num_accepted = tl.load(entries + 4 * entry + 2)
    first_token = tl.load(cu_seqlens_q + entry)
    num_rows = num_accepted + tl.load(cu_seqlens_q + entry + 1) - first_token
    num_certain = num_rows - tl.load(entries + 4 * entry + 3)
    save = tl.load(save_offsets + entry)
    end_save = tl.load(save_offsets + entry + 1)

    NUM_BEFORE: tl.constexpr = KERNEL_SIZE - 1
    NUM_QUERIES: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    NUM_CHANNELS: tl.constexpr = 2 * NUM_QUERIES + NUM_VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = NUM_CHANNELS + 2 * NUM_VALUE_HEADS
    taps = tl.arange(0, TAPS)
    is_tap = (taps < KERNEL_SIZE)[:, None]
    is_last = (taps == NUM_BEFORE)[:, None]
    keys = tl.arange(0, KEYS)
    is_key = keys < KEY_DIM
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    query_places = key_head * KEY_DIM + keys
    key_places = NUM_QUERIES + query_places
    value_places = 2 * NUM_QUERIES + head * VALUE_DIM + columns
    is_key_input = is_tap & is_key[None, :]
    is_value_input = is_tap & (columns < VALUE_DIM)[None, :]
    weights = convolution + taps[:, None] * NUM_CHANNELS
    query_weights = tl.load(weights + query_places[None, :], mask=is_key_input, other=0.0)
    key_weights = tl.load(weights + key_places[None, :], mask=is_key_input, other=0.0)
    value_weights = tl.load(weights + value_places[None, :], mask=is_value_input, other=0.0)
    rate, bias = tl.load(decay_rate + head), tl.load(decay_bias + head)

    is_known = source >= 0
    old = recent + tl.maximum(source, 0) * recent_slot
    place = (head * KEY_DIM + keys)[:, None] * VALUE_DIM + columns[None, :]
    SLOT: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    is_state = is_key[:, None] & (columns < VALUE_DIM)[None, :]
    state = tl.load(
        states + tl.maximum(source, 0) * SLOT + place, mask=is_state & is_known, other=0.0
    )
    for row in range(num_rows):
        rows = row - NUM_BEFORE + taps
        query, bad_queries = _convolved(
            _inputs_of(
                channels, old, channel_stride, WIDTH, rows, query_places, is_key_input,
                first_token, num_accepted, is_known, NUM_BEFORE,
            ),
            query_weights, is_last,
        )  # fmt: skip
        key, bad_keys = _convolved(
            _inputs_of(
                channels, old, channel_stride, WIDTH, rows, key_places, is_key_input,
                first_token, num_accepted, is_known, NUM_BEFORE,
            ),
            key_weights, is_last,
        )  # fmt: skip
        value, bad_values = _convolved(
            _inputs_of(
                channels, old, channel_stride, WIDTH, rows, value_places, is_value_input,
                first_token, num_accepted, is_known, NUM_BEFORE,
            ),
            value_weights, is_last,
        )  # fmt: skip
        token = (first_token + row - num_accepted).to(tl.int64)
        is_new = row >= num_accepted
        own = old + (NUM_BEFORE + row) * WIDTH + NUM_CHANNELS + head
        new = numbers + token * (2 * NUM_VALUE_HEADS) + head
        raw_step = tl.where(
            is_new,
            tl.load(new, mask=is_new, other=0.0).to(tl.float32),
            tl.load(own, mask=is_new == 0, other=0.0).to(tl.float32),
        )
        raw_decay = tl.where(
            is_new,
            tl.load(new + NUM_VALUE_HEADS, mask=is_new, other=0.0).to(tl.float32),
            tl.load(own + NUM_VALUE_HEADS, mask=is_new == 0, other=0.0).to(tl.float32),
        )
        shifted = raw_decay + bias
        # log(1 + exp(x)), whose power is 1 at most.
        softplus = tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))
        decay = tl.exp(-rate * softplus)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + eps) * key_scale
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + eps)
        seen = tl.sum(key[:, None] * state, axis=0)
        change = tl.sigmoid(raw_step) * (value - decay * seen)
        state = decay * state + key[:, None] * change[None, :]
        output = tl.sum(query[:, None] * state, axis=0)
        at = outputs + (token * NUM_VALUE_HEADS + head) * VALUE_DIM + columns
        tl.store(at, output, mask=is_new & (columns < VALUE_DIM))
        is_finite = (tl.abs(raw_step) < float("inf")) & (tl.abs(raw_decay) < float("inf"))
        num_bad = bad_queries + bad_keys + bad_values + (is_finite == 0).to(tl.int32)
        # Several programs may store it: all of them the same.
        tl.store(is_bad + token, 1, mask=is_new & (num_bad > 0))
        if row + 1 == num_certain:
            tl.store(states + slot * SLOT + place, state, mask=is_state)
        if row + 1 == tl.load(saves + 2 * save, mask=save < end_save, other=0):
            kept = tl.load(saves + 2 * save + 1).to(tl.int64)
            tl.store(states + kept * SLOT + place, state, mask=is_state)
            save += 1


@triton.jit
def keep_kernel(
    channels,  # as in `delta_kernel`
    numbers,
    recent,  # read and written
    counts,
    cu_seqlens_q,
    entries,
    save_offsets,
    saves,
    channel_stride,
    recent_slot,
    num_channels,
    num_numbers,  # 2 * V
    NUM_BEFORE: tl.constexpr,  # J - 1
    BLOCK: tl.constexpr,
):
    """Keeps BLOCK numbers of each raw input of one sequence that a later step needs."""
    entry = tl.program_id(0)
    if entry >= tl.load(counts):
        return
    slot = tl.load(entries + 4 * entry).to(tl.int64)
    source = tl.load(entries + 4 * entry + 1).to(tl.int64)
    num_accepted = tl.load(entries + 4 * entry + 2)
    num_drafts = tl.load(entries + 4 * entry + 3)
    first_token = tl.load(cu_seqlens_q + entry)
    num_rows = num_accepted + tl.load(cu_seqlens_q + entry + 1) - first_token
    num_certain = num_rows - num_drafts
    first_save = tl.load(save_offsets + entry)
    end_save = tl.load(save_offsets + entry + 1)
    width = num_channels + num_numbers
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    old = recent + tl.maximum(source, 0) * recent_slot
    own = recent + slot * recent_slot
    # What is read lies behind what is written, or is read before: first of other slots, then of
    # the tokens before, from the first on, then of drafts.
    for save in range(first_save, end_save):
        first = tl.load(saves + 2 * save) - NUM_BEFORE
        kept = recent + tl.load(saves + 2 * save + 1).to(tl.int64) * recent_slot
        for i in range(NUM_BEFORE):
            raw = _raw_input(
                channels, numbers, old, first + i, places, channel_stride, num_channels, width,
                first_token, num_accepted, source >= 0, NUM_BEFORE,
            )  # fmt: skip
            tl.store(kept + i * width + places, raw, mask=places < width)
    for i in range(NUM_BEFORE + num_drafts):
        raw = _raw_input(
            channels, numbers, old, num_certain - NUM_BEFORE + i, places, channel_stride,
            num_channels, width, first_token, num_accepted, source >= 0, NUM_BEFORE,
        )  # fmt: skip
        tl.store(own + i * width + places, raw, mask=places < width)


@triton.jit
def _raw_input(
    channels,
    numbers,
    recent,
    row,
    places,
    channel_stride,
    num_channels,
    width,
    first_token,
    num_accepted,
    is_known,
    NUM_BEFORE: tl.constexpr,
):
    """Numbers [BLOCK] of one raw input, in their dtype."""
    is_old = row < num_accepted
    token = (first_token + row - num_accepted).to(tl.int64)
    is_channel = places < num_channels
    old = tl.load(
        recent + (NUM_BEFORE + row) * width + places,
        mask=is_old & is_known & (places < width),
        other=0.0,
    )
    channel = tl.load(
        channels + token * channel_stride + places, mask=(is_old == 0) & is_channel, other=0.0
    )
    number = tl.load(
        numbers + token * (width - num_channels) + places - num_channels,
        mask=(is_old == 0) & (is_channel == 0) & (places < width),
        other=0.0,
    )
    return tl.where(is_old, old, tl.where(is_channel, channel, number))
