"""A gated delta net, which some models have in place of attention in most layers.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024. Each value
head keeps a state S [key_dim, value_dim], from zeros on. A token has a query q and a key k, both of
length 1 (q / sqrt(key_dim)), shared by some value heads, and of each of these a value v, a decay
d = exp(-rate * softplus(a + bias)) and a step b = sigmoid(b'):

    S = d S + k b (v - d k S),  output = q S

Queries, keys and values are sums over the last J tokens' inputs (a causal convolution by channel),
then silu. Outputs are normed head by head and multiplied by silu of a gate.

States are computed token by token: an entry of a product with S is a chain over key_dim, and no bit
depends on how a text is cut. A slot holds a sequence's states after its last token that is certain,
and raw inputs: of the J - 1 tokens up to that one, then of the drafts of the last pass. A pass
first takes in those of them that were accepted. Drafts run on a copy of the states, piece by piece.

Shape legend: J inputs that a convolution sees, G key heads, r value heads of each.
"""

from typing import Any

import numpy as np

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, store_u8
from verifier.cpu.kernels import rows, vectors
from verifier.cpu.kernels.rows import load_f32, store_f32
from verifier.cpu.kernels.threads import arrive, take

PIECE_COLUMNS = 32
"""Of a state, computed at a time: they fit into a first-level cache. `value_dim` is a multiple."""
MIN_TILE_ROWS = 32
PLACE_BYTES = 56
"""Of a value head's entry in a table of where a token's inputs lie, int64: bytes from the token's
first output of the product to its query, its key, its value, its gate, b' and a; then its number
among all heads as their channels and outputs lie. Entries are key head by key head.
"""
STATE_BYTES = 32
"""Of a sequence's entry of a step, int64: its slot; the slot that holds its states so far, -1: none
does; how many of its last drafts were accepted; how many drafts it has now.
"""
_SILU, _EPS = 0, np.float32(1e-6)


def raw_size(key_dim: int, value_dim: int, heads_per_key: int) -> int:
    """Floats of a token's raw inputs of one key head: query, key, values, r times b', r times a."""
    return 2 * key_dim + heads_per_key * value_dim + 2 * padded(heads_per_key)


def padded(count: int) -> int:
    return -(-count // 16) * 16


def scratch_bytes(raw: int, kernel_size: int, key_dim: int, tile_rows: int) -> int:
    """What a thread needs: raw inputs, what is made of them, and a copy of a piece of a state."""
    return 4 * raw * (kernel_size - 1 + 2 * tile_rows) + 4 * PIECE_COLUMNS * key_dim


@kernel
def run_deltas(model: Any, step: Any, layer: Any, thread: int, mark: int) -> None:
    """Attended = the net's outputs of all tokens. A key head of a sequence is an item."""
    num_heads = model.num_key_heads
    while True:
        item = take(mark)
        if item >= step.num_sequences * num_heads:
            break
        _run(model, step, layer, item // num_heads, item % num_heads,
             model.scratch + thread * model.scratch_bytes)  # fmt: skip
    arrive(mark, model.num_threads)


@kernel
def _run(model: Any, step: Any, layer: Any, sequence: int, head: int, scratch: int) -> None:
    entry = step.states + sequence * STATE_BYTES
    slot, source = load_i64(entry), load_i64(entry + 8)
    num_accepted, num_drafts = load_i64(entry + 16), load_i64(entry + 24)
    first_token = load_i64(step.query_offsets + 8 * sequence)
    num_new = load_i64(step.query_offsets + 8 * sequence + 8) - first_token
    save = load_i64(step.save_offsets + 8 * sequence)
    last_save = load_i64(step.save_offsets + 8 * sequence + 8)
    raw_bytes = 4 * model.raw_size
    num_before = model.kernel_size - 1
    tile, made = scratch, scratch + (num_before + model.tile_rows) * raw_bytes
    copy = made + model.tile_rows * raw_bytes
    recent_size = (num_before + model.max_drafts) * raw_bytes
    recent = layer.recent + slot * model.recent_slot_bytes + head * recent_size
    head_bytes = 4 * model.key_dim * model.value_dim
    own_states = head * model.heads_per_key * head_bytes
    states = layer.states + slot * model.state_slot_bytes + own_states
    states_size = model.heads_per_key * model.key_dim * model.value_dim
    if source >= 0:
        before = layer.recent + source * model.recent_slot_bytes + head * recent_size
        rows.copy(tile, before, num_before * model.raw_size)
        if source != slot:
            rows.copy(states, layer.states + source * model.state_slot_bytes + own_states,
                      states_size)  # fmt: skip
    else:
        _clear(tile, num_before * model.raw_size)
        _clear(states, states_size)
    # Rows are the accepted drafts, then the pass's tokens.
    num_rows = num_accepted + num_new
    num_certain, row = num_rows - num_drafts, 0
    while row < num_rows:
        end = min(row + model.tile_rows, num_certain if row < num_certain else num_rows)
        if save < last_save:
            end = min(end, load_i64(step.saves + 16 * save))
        for r in range(row, end):
            to = tile + (num_before + r - row) * raw_bytes
            if r < num_accepted:
                rows.copy(to, recent + (num_before + r) * raw_bytes, model.raw_size)
            elif not _gather(model, to, model.qkv + (first_token + r - num_accepted)
                             * model.qkv_row, head):  # fmt: skip
                store_u8(step.is_finite + first_token + r - num_accepted, np.uint8(0))
            if r >= num_certain:
                rows.copy(recent + (num_before + r - num_certain) * raw_bytes, to, model.raw_size)
        _convolve(model, layer, head, tile, made, end - row)
        _take_in(model, states, copy, made, end - row, row >= num_certain)
        for r in range(max(row, num_accepted), end):
            _put_out(model, layer, head, made + (r - row) * raw_bytes,
                     first_token + r - num_accepted)  # fmt: skip
        rows.copy(tile, tile + (end - row) * raw_bytes, num_before * model.raw_size)
        row = end
        if row == num_certain:
            rows.copy(recent, tile, num_before * model.raw_size)
        if save < last_save and row == load_i64(step.saves + 16 * save):
            kept = load_i64(step.saves + 16 * save + 8)
            rows.copy(layer.states + kept * model.state_slot_bytes + own_states, states,
                      states_size)  # fmt: skip
            rows.copy(layer.recent + kept * model.recent_slot_bytes + head * recent_size, tile,
                      num_before * model.raw_size)  # fmt: skip
            save += 1


@kernel
def _clear(to: int, size: int) -> None:
    zero = vectors.fill(np.float32(0.0))
    for offset in range(0, 4 * size, 64):
        vectors.store(to + offset, zero)


@kernel
def _gather(model: Any, to: int, outputs: int, head: int) -> bool:
    """A token's raw inputs of a key head, from its row of the product. Returns whether all are
    finite.
    """
    count, key_bytes = model.heads_per_key, 4 * model.key_dim
    places = model.places + head * count * PLACE_BYTES
    zero = vectors.fill(np.float32(0.0))
    # NaN from the first number that is not finite on.
    probe = _copy_probing(to, outputs + load_i64(places), model.key_dim, zero)
    probe = _copy_probing(to + key_bytes, outputs + load_i64(places + 8), model.key_dim, probe)
    to += 2 * key_bytes
    numbers = to + 4 * count * model.value_dim
    padding = 4 * ((count + 15) // 16 * 16)
    _clear(numbers, padding // 2)
    for i in range(count):
        place = places + i * PLACE_BYTES
        own = to + 4 * i * model.value_dim
        probe = _copy_probing(own, outputs + load_i64(place + 16), model.value_dim, probe)
        store_f32(numbers + 4 * i, load_f32(outputs + load_i64(place + 32)))
        store_f32(numbers + padding + 4 * i, load_f32(outputs + load_i64(place + 40)))
    for offset in range(0, 2 * padding, 64):
        probe = vectors.multiply_add(vectors.load(numbers + offset), zero, probe)
    return bool(vectors.sum_of(probe) == np.float32(0.0))


@kernel
def _copy_probing(to: int, source: int, size: int, probe: Any) -> Any:
    zero = vectors.fill(np.float32(0.0))
    for offset in range(0, 4 * size, 64):
        value = vectors.load(source + offset)
        vectors.store(to + offset, value)
        probe = vectors.multiply_add(value, zero, probe)
    return probe


@kernel
def _convolve(model: Any, layer: Any, head: int, tile: int, made: int, num_rows: int) -> None:
    """Made = of `num_rows` rows: queries and keys of length 1, values, steps b, decays d. The tile
    begins with the J - 1 rows before.
    """
    key_dim, num_values = model.key_dim, model.heads_per_key * model.value_dim
    key_bytes, raw_bytes = 4 * key_dim, 4 * model.raw_size
    keys = 4 * model.num_key_heads * key_dim
    _convolve_channels(model, layer, head * key_bytes, tile, made, num_rows, key_dim)
    _convolve_channels(model, layer, keys + head * key_bytes, tile + key_bytes, made + key_bytes,
                       num_rows, key_dim)  # fmt: skip
    for i in range(model.heads_per_key):
        number = _number(model, head * model.heads_per_key + i)
        offset = 2 * key_bytes + 4 * i * model.value_dim
        _convolve_channels(model, layer, 2 * keys + 4 * number * model.value_dim, tile + offset,
                           made + offset, num_rows, model.value_dim)  # fmt: skip
    one, zero = vectors.fill(np.float32(1.0)), vectors.fill(np.float32(0.0))
    scale = np.float32(1.0) / np.sqrt(np.float32(key_dim))
    numbers = 2 * key_bytes + 4 * num_values
    padding = 4 * ((model.heads_per_key + 15) // 16 * 16)
    for n in range(num_rows):
        own = made + n * raw_bytes
        _to_length(own, key_dim, scale)
        _to_length(own + key_bytes, key_dim, np.float32(1.0))
        raw = tile + (n + model.kernel_size - 1) * raw_bytes + numbers
        for offset in range(0, padding, 64):
            x = vectors.load(raw + offset)
            below = vectors.add(one, vectors.exp(vectors.subtract(zero, x)))
            vectors.store(own + numbers + offset, vectors.divide(one, below))
            places = head * padding + offset
            x = vectors.load(raw + padding + offset)
            x = _softplus(vectors.add(x, vectors.load(layer.decay_bias + places)))
            x = vectors.multiply(vectors.load(layer.decay_rate + places), x)
            x = vectors.exp(vectors.subtract(zero, x))
            vectors.store(own + numbers + padding + offset, x)


@kernel
def _convolve_channels(
    model: Any, layer: Any, channel_bytes: int, tile: int, made: int, num_rows: int, size: int
) -> None:
    raw_bytes = 4 * model.raw_size
    one, zero = vectors.fill(np.float32(1.0)), vectors.fill(np.float32(0.0))
    for offset in range(0, 4 * size, 64):
        weights = layer.convolution + channel_bytes + offset
        for n in range(num_rows):
            x = tile + n * raw_bytes + offset
            total = vectors.multiply(vectors.load(weights), vectors.load(x))
            for j in range(1, model.kernel_size):
                weight = vectors.load(weights + j * model.tap_bytes)
                total = vectors.multiply_add(weight, vectors.load(x + j * raw_bytes), total)
            below = vectors.add(one, vectors.exp(vectors.subtract(zero, total)))
            vectors.store(made + n * raw_bytes + offset, vectors.divide(total, below))


@kernel
def _to_length(x: int, size: int, length: Any) -> None:
    """Makes a vector of floats, in place, as long as `length`, unless it is next to nothing."""
    squares = vectors.fill(np.float32(0.0))
    for offset in range(0, 4 * size, 64):
        value = vectors.load(x + offset)
        squares = vectors.multiply_add(value, value, squares)
    factor = np.float32(1.0) / np.sqrt(vectors.sum_of(squares) + _EPS)
    factors = vectors.fill(factor * length)
    for offset in range(0, 4 * size, 64):
        vectors.store(x + offset, vectors.multiply(vectors.load(x + offset), factors))


@kernel
def _softplus(x: Any) -> Any:
    """log(1 + exp(x)), within 3e-7 of it."""
    zero, one = vectors.fill(np.float32(0.0)), vectors.fill(np.float32(1.0))
    opposite = vectors.subtract(zero, x)
    # NaN stays: it is the second one.
    above = vectors.maximum(zero, x)
    power = vectors.exp(vectors.subtract(vectors.subtract(zero, above),
                                         vectors.maximum(zero, opposite)))  # fmt: skip
    # log(1 + p) = 2 artanh(p / (2 + p)), and the latter is 1 / 3 at most.
    ratio = vectors.divide(power, vectors.add(power, vectors.add(one, one)))
    square = vectors.multiply(ratio, ratio)
    series = vectors.fill(np.float32(1.0 / 15.0))
    series = vectors.multiply_add(series, square, vectors.fill(np.float32(1.0 / 13.0)))
    series = vectors.multiply_add(series, square, vectors.fill(np.float32(1.0 / 11.0)))
    series = vectors.multiply_add(series, square, vectors.fill(np.float32(1.0 / 9.0)))
    series = vectors.multiply_add(series, square, vectors.fill(np.float32(1.0 / 7.0)))
    series = vectors.multiply_add(series, square, vectors.fill(np.float32(1.0 / 5.0)))
    series = vectors.multiply_add(series, square, vectors.fill(np.float32(1.0 / 3.0)))
    series = vectors.multiply_add(series, square, one)
    return vectors.multiply_add(vectors.add(ratio, ratio), series, above)


@kernel
def _take_in(model: Any, states: int, copy: int, made: int, num_rows: int, is_draft: bool) -> None:
    """Updates a key head's states by some rows, whose values it replaces by their outputs. Drafts'
    updates go to a copy, of a piece of the states at a time.
    """
    key_dim, value_dim, raw_bytes = model.key_dim, model.value_dim, 4 * model.raw_size
    values = 8 * key_dim
    numbers = values + 4 * model.heads_per_key * value_dim
    padding = 4 * ((model.heads_per_key + 15) // 16 * 16)
    for i in range(model.heads_per_key):
        for column in range(i * value_dim, (i + 1) * value_dim, PIECE_COLUMNS):
            piece = states + 4 * column * key_dim
            if is_draft:
                rows.copy(copy, piece, PIECE_COLUMNS * key_dim)
                piece = copy
            _update(piece, key_dim, made, raw_bytes, num_rows, values + 4 * column,
                    numbers + 4 * i, numbers + padding + 4 * i)  # fmt: skip


@kernel
def _update(
    state: int, key_dim: int, row: int, row_bytes: int, num_rows: int, values: int, step: int,
    decay: int,
) -> None:  # fmt: skip
    """32 columns of a state [2, key_dim, 16], by rows in which values, step and decay are at these
    offsets.
    """
    second = state + 64 * key_dim
    zero = vectors.fill(np.float32(0.0))
    for n in range(num_rows):
        own = row + n * row_bytes
        keys, value = own + 4 * key_dim, own + values
        decays, steps = vectors.fill(load_f32(own + decay)), vectors.fill(load_f32(own + step))
        seen0, seen1 = zero, zero
        for i in range(key_dim):
            key = vectors.fill(load_f32(keys + 4 * i))
            seen0 = vectors.multiply_add(key, vectors.load(state + 64 * i), seen0)
            seen1 = vectors.multiply_add(key, vectors.load(second + 64 * i), seen1)
        change0 = _change(value, seen0, decays, steps)
        change1 = _change(value + 64, seen1, decays, steps)
        output0, output1 = zero, zero
        for i in range(key_dim):
            key = vectors.fill(load_f32(keys + 4 * i))
            query = vectors.fill(load_f32(own + 4 * i))
            x = vectors.multiply(decays, vectors.load(state + 64 * i))
            x = vectors.multiply_add(key, change0, x)
            vectors.store(state + 64 * i, x)
            output0 = vectors.multiply_add(query, x, output0)
            x = vectors.multiply(decays, vectors.load(second + 64 * i))
            x = vectors.multiply_add(key, change1, x)
            vectors.store(second + 64 * i, x)
            output1 = vectors.multiply_add(query, x, output1)
        vectors.store(value, output0)
        vectors.store(value + 64, output1)


@kernel
def _change(value: int, seen: Any, decays: Any, steps: Any) -> Any:
    """The column's `b (v - d k S)`."""
    rest = vectors.subtract(vectors.load(value), vectors.multiply(decays, seen))
    return vectors.multiply(steps, rest)


@kernel
def _put_out(model: Any, layer: Any, head: int, made: int, t: int) -> None:
    """A token's outputs of a key head, normed and gated."""
    count, size = model.heads_per_key, model.value_dim
    for i in range(head * count, (head + 1) * count):
        output = made + 8 * model.key_dim + 4 * (i - head * count) * size
        rows.norm(output, output, layer.delta_norm, size, model.norm_eps)
        gates = model.qkv + t * model.qkv_row + load_i64(model.places + i * PLACE_BYTES + 24)
        to = model.attended + t * model.attended_row + 4 * _number(model, i) * size
        rows.gate(to, gates, output, size, _SILU)


@kernel
def _number(model: Any, entry: int) -> Any:
    return load_i64(model.places + entry * PLACE_BYTES + 48)
