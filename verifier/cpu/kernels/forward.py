"""One forward pass: token ids in, logits out, K/V written on the way.

Read `forward` first. Every thread runs it. It is a sequence of phases; the threads share a phase's
items and wait for each other at its end (`threads.py`). Phases of rows (norms, rotary embedding)
have some rows as an item, products some columns of all rows, attention some query rows of one K/V
head.

Shape legend: T tokens, R rows that need logits, B sequences.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, store_i64, store_u8
from verifier.cpu.kernels import rows
from verifier.cpu.kernels.attention import MAX_TASK_ROWS, attend
from verifier.cpu.kernels.delta import run_deltas
from verifier.cpu.kernels.experts import mix_experts
from verifier.cpu.kernels.products import (
    accumulate,
    cap,
    embed_parts,
    finish,
    multiply,
    round_rows,
)
from verifier.cpu.kernels.threads import MARK_BYTES, arrive, arrive_last, take
from verifier.cpu.kernels.tiles import in_groups

Records = npt.NDArray[Any]

_ROWS_PER_ITEM = 4
# Columns of an item are a multiple of the widest tile's.
_MIN_BLOCKS_PER_ITEM = 8
_ITEMS_PER_THREAD = 4
NUM_PHASES_PER_LAYER = 24
"""At most; each has a mark."""
NUM_OTHER_PHASES = 8


@kernel
def forward(
    linear: npt.NDArray[Any],
    other: npt.NDArray[Any],
    models: Records,
    layers: Records,
    steps: Records,
    thread: int,
) -> None:
    """One thread's part of the pass.

    Args:
        linear, other: markers of the types of the layers' weights, and of all other weights and
            K/V (see `tiles`).
        models, steps: one record each. layers: a record per layer.
        thread: from 0 to before the model's `num_threads`.
    """
    model, step = models[0], steps[0]
    mark = model.marks
    _begin(linear, other, model, step, mark)
    mark += MARK_BYTES
    if model.per_layer_projection.num_blocks:
        mark = _make_inputs(linear, other, model, step, thread, mark)
    for number in range(model.num_layers):
        layer = layers[number]
        previous_norm = layers[number - 1].update_norm if number else 0
        scale = layers[number - 1].scale if number else np.float32(1.0)
        _norm_rows(model, step, layer.input_norm, previous_norm, scale, 0, mark)
        mark += MARK_BYTES
        mark = _round_rows(linear, model, step.num_tokens, model.normed, model.hidden_row,
                           layer.qkv.depth, mark)  # fmt: skip
        _multiply_rows(linear, model, step, layer.qkv, model.normed, model.hidden_row, model.qkv,
                       model.qkv_row, mark)  # fmt: skip
        mark += MARK_BYTES
        if layer.convolution:
            run_deltas(model, step, layer, thread, mark)
        else:
            _rotate_and_store(other, model, step, layer, mark)
            mark += MARK_BYTES
            _attend(other, model, step, layer, thread, mark)
        mark += MARK_BYTES
        mark = _round_rows(linear, model, step.num_tokens, model.attended, model.attended_row,
                           layer.output.depth, mark)  # fmt: skip
        _update_hidden(linear, model, step, layer.output, model.attended, model.attended_row,
                       layer.attention_output_norm == 0, mark)  # fmt: skip
        mark += MARK_BYTES
        _norm_rows(model, step, layer.mlp_norm, layer.attention_output_norm, np.float32(1.0),
                   layer.shared_gate, mark)  # fmt: skip
        mark += MARK_BYTES
        if layer.router.num_blocks:
            if layer.shared_gate_up.num_blocks:
                mark = _run_mlp(linear, model, step, layer.shared_gate_up, layer.shared_down,
                                model.shared_factors if layer.shared_gate else 0, 0,
                                layer.router_norm == 0, mark)  # fmt: skip
            if layer.router_norm:
                _begin_mixture(model, step, layer, mark)
                mark += MARK_BYTES
            mark = mix_experts(linear, other, model, step, layer, mark)
        else:
            mark = _run_mlp(linear, model, step, layer.gate_up, layer.down, 0, 0,
                            layer.mlp_output_norm == 0, mark)  # fmt: skip
        if layer.input_gate.num_blocks:
            _norm_rows(model, step, 0, layer.mlp_output_norm, np.float32(1.0), 0, mark)
            mark += MARK_BYTES
            mark = _run_mlp(linear, model, step, layer.input_gate, layer.input_down, 0,
                            model.per_layer_inputs + 4 * number * model.per_layer_size, False,
                            mark)  # fmt: skip
    last = layers[model.num_layers - 1]
    _norm_last(model, step, last.update_norm, last.scale, mark)
    mark += MARK_BYTES
    mark = _round_rows(linear, model, step.num_rows, step.last_hidden, model.hidden_row,
                       model.hidden_size, mark)  # fmt: skip
    if in_groups(linear):
        _logits(linear, model, step, mark)
    else:
        _logits(other, model, step, mark)
    arrive_last(mark, model.num_threads, thread)


@kernel
def _begin(
    linear: npt.NDArray[Any], other: npt.NDArray[Any], model: Any, step: Any, mark: int
) -> None:
    """Embeddings and rotary embedding's angles of all tokens; the tasks of attention."""
    num_items = _num_row_items(step)
    pairs_bytes = 4 * model.num_pairs
    while True:
        item = take(mark)
        if item >= num_items + model.num_groupings:
            break
        if item >= num_items:
            grouping = model.groupings + 16 * (item - num_items)
            _list_tasks(step, load_i64(grouping), load_i64(grouping + 8))
            continue
        for t in range(item * _ROWS_PER_ITEM, min(step.num_tokens, (item + 1) * _ROWS_PER_ITEM)):
            store_u8(step.is_finite + t, np.uint8(1))
            embedding, token = model.hidden + t * model.hidden_row, load_i64(step.token_ids + 8 * t)
            if in_groups(linear):
                embed_parts(embedding, model.embeddings, token, model.hidden_size,
                            model.embedding_scale)  # fmt: skip
            else:
                rows.embed(other, embedding, model.embeddings, model.embeddings_are_packed, token,
                           model.hidden_size, model.embedding_scale)  # fmt: skip
            first_rotary = load_i64(step.uses_long_rope + 8 * t) * model.num_rotaries
            for rotary in range(model.num_rotaries):
                cos = model.cos_sin + (rotary * step.num_tokens + t) * 2 * pairs_bytes
                rows.cos_sin(
                    cos, cos + pairs_bytes, load_i64(step.positions + 8 * t),
                    model.inv_freq + (first_rotary + rotary) * pairs_bytes, model.num_pairs,
                    rows.load_f32(model.rotary_scaling + 4 * rotary),
                )  # fmt: skip
    arrive(mark, model.num_threads)


@kernel
def _list_tasks(step: Any, group: int, tasks: int) -> None:
    """Cuts each sequence's query rows, `group` of each token, into tasks."""
    place = tasks
    for sequence in range(step.num_sequences):
        start = load_i64(step.query_offsets + 8 * sequence)
        num_rows = (load_i64(step.query_offsets + 8 * sequence + 8) - start) * group
        num_tasks = (num_rows + MAX_TASK_ROWS - 1) // MAX_TASK_ROWS
        row = 0
        for task in range(num_tasks):
            own = (num_rows - row) // (num_tasks - task)
            store_i64(place, sequence)
            store_i64(place + 8, row)
            store_i64(place + 16, own)
            place += 24
            row += own
    store_i64(tasks - 8, (place - tasks) // 24)


@kernel
def _make_inputs(
    linear: npt.NDArray[Any], other: npt.NDArray[Any], model: Any, step: Any, thread: int, mark: int
) -> int:
    """All layers' inputs of all tokens. Returns the mark after those used."""
    matrix = model.per_layer_projection
    mark = _round_rows(linear, model, step.num_tokens, model.hidden, model.hidden_row,
                       matrix.depth, mark)  # fmt: skip
    _multiply_rows(linear, model, step, matrix, model.hidden, model.hidden_row,
                   model.per_layer_inputs, model.per_layer_row, mark)  # fmt: skip
    mark += MARK_BYTES
    scratch = model.scratch + thread * model.scratch_bytes
    size = model.per_layer_size
    all_sizes = model.num_layers * size
    scale = np.sqrt(np.float32(size))
    num_items = _num_row_items(step)
    while True:
        item = take(mark)
        if item >= num_items:
            break
        for t in range(item * _ROWS_PER_ITEM, min(step.num_tokens, (item + 1) * _ROWS_PER_ITEM)):
            own = model.per_layer_inputs + t * model.per_layer_row
            token = load_i64(step.token_ids + 8 * t)
            for layer in range(model.num_layers):
                x = own + 4 * layer * size
                rows.norm(x, x, model.per_layer_norm, size, model.norm_eps)
            if model.per_layer_embeddings_are_packed:
                embed_parts(scratch, model.per_layer_embeddings, token, all_sizes, scale)
            else:
                rows.embed(other, scratch, model.per_layer_embeddings, 0, token, all_sizes, scale)
            accumulate(own, 0, scratch, 0, 1, 0, all_sizes // 16)
            rows.scale(own, all_sizes, np.sqrt(np.float32(0.5)))
    arrive(mark, model.num_threads)
    return mark + MARK_BYTES


@kernel
def _run_mlp(
    linear: npt.NDArray[Any], model: Any, step: Any, gate_up: Any, down: Any, factors: int,
    ups: int, adds: bool, mark: int,
) -> int:  # fmt: skip
    """Update = a gated MLP of all tokens; hidden += it, if `adds`. Returns the mark after those
    used.

    Args:
        gate_up: the weights of gates alone, if there are `ups`.
        factors: address of each token's, by which its update is multiplied; 0: there are none.
        ups: address of the first token's, `per_layer_row` apart; 0: they are computed.
    """
    mark = _round_rows(linear, model, step.num_tokens, model.normed, model.hidden_row,
                       gate_up.depth, mark)  # fmt: skip
    _gate(linear, model, step, gate_up, factors, ups, mark)
    mark += MARK_BYTES
    mark = _round_rows(linear, model, step.num_tokens, model.gated, model.gated_row, down.depth,
                       mark)  # fmt: skip
    _update_hidden(linear, model, step, down, model.gated, model.gated_row, adds, mark)
    return mark + MARK_BYTES


@kernel
def _norm_rows(
    model: Any, step: Any, weight: int, update_norm: int, scale: Any, shared_gate: int, mark: int
) -> None:
    """Normed = norm(hidden), after hidden = (hidden + norm(update)) * scale if `update_norm` is the
    weight of one; a weight of 0: there is no norm. Shared factors = sigmoid(normed *
    `shared_gate`), if that is one.
    """
    num_items = _num_row_items(step)
    while True:
        item = take(mark)
        if item >= num_items:
            break
        for t in range(item * _ROWS_PER_ITEM, min(step.num_tokens, (item + 1) * _ROWS_PER_ITEM)):
            offset = t * model.hidden_row
            _add_update(model, offset, update_norm, scale)
            if weight:
                rows.norm(model.normed + offset, model.hidden + offset, weight, model.hidden_size,
                          model.norm_eps)  # fmt: skip
            else:
                rows.copy(model.normed + offset, model.hidden + offset, model.hidden_size)
            if shared_gate:
                factor = rows.sigmoid_of_product(model.normed + offset, shared_gate,
                                                 model.hidden_size)  # fmt: skip
                rows.store_f32(model.shared_factors + 4 * t, factor)
    arrive(mark, model.num_threads)


@kernel
def _begin_mixture(model: Any, step: Any, layer: Any, mark: int) -> None:
    """Keeps the norm of the MLP's update; then normed = what experts see of hidden, update = what
    their router sees.
    """
    size, eps = model.hidden_size, model.norm_eps
    num_items = _num_row_items(step)
    while True:
        item = take(mark)
        if item >= num_items:
            break
        for t in range(item * _ROWS_PER_ITEM, min(step.num_tokens, (item + 1) * _ROWS_PER_ITEM)):
            offset = t * model.hidden_row
            hidden, update = model.hidden + offset, model.update + offset
            rows.norm(model.shared_updates + offset, update, layer.shared_output_norm, size, eps)
            rows.norm(model.normed + offset, hidden, layer.experts_input_norm, size, eps)
            rows.norm(update, hidden, layer.router_norm, size, eps)
    arrive(mark, model.num_threads)


@kernel
def _add_update(model: Any, offset: int, update_norm: int, scale: Any) -> None:
    if update_norm:
        update = model.update + offset
        rows.norm(update, update, update_norm, model.hidden_size, model.norm_eps)
        accumulate(model.hidden + offset, 0, update, 0, 1, 0, model.hidden_size // 16)
        if scale != 1:
            rows.scale(model.hidden + offset, model.hidden_size, scale)


@kernel
def _round_rows(
    linear: npt.NDArray[Any], model: Any, num_rows: int, x: int, x_row: int, depth: int, mark: int
) -> int:
    """The inputs of a product in groups. Returns the mark after those used."""
    if not in_groups(linear):
        return mark
    while True:
        first = take(mark) * _ROWS_PER_ITEM
        if first >= num_rows:
            break
        end = min(first + _ROWS_PER_ITEM, num_rows)
        round_rows(x, x_row, first, end, num_rows, depth, model.rounded)
    arrive(mark, model.num_threads)
    return mark + MARK_BYTES


@kernel
def _multiply_rows(
    marker: npt.NDArray[Any], model: Any, step: Any, matrix: Any, x: int, x_row: int, out: int,
    out_row: int, mark: int,
) -> None:  # fmt: skip
    """Out = x * weights, with scales and bias, for all tokens."""
    per_item = _blocks_per_item(model, matrix.num_blocks)
    while True:
        first = take(mark) * per_item
        if first >= matrix.num_blocks:
            break
        end = min(first + per_item, matrix.num_blocks)
        multiply(marker, x, x_row, model.rounded, step.num_tokens,
                 matrix.weights, matrix.depth, first, end, out, out_row)  # fmt: skip
        if matrix.scales or matrix.bias:
            finish(out, out_row, step.num_tokens, first, end, matrix.scales, matrix.bias)
    arrive(mark, model.num_threads)


@kernel
def _update_hidden(
    marker: npt.NDArray[Any], model: Any, step: Any, matrix: Any, x: int, x_row: int, adds: bool,
    mark: int,
) -> None:  # fmt: skip
    """Update = x * weights; hidden += update, if `adds`: else a norm comes first."""
    per_item = _blocks_per_item(model, matrix.num_blocks)
    while True:
        first = take(mark) * per_item
        if first >= matrix.num_blocks:
            break
        end = min(first + per_item, matrix.num_blocks)
        multiply(marker, x, x_row, model.rounded, step.num_tokens,
                 matrix.weights, matrix.depth, first, end, model.update,
                 model.hidden_row)  # fmt: skip
        if matrix.scales or matrix.bias:
            finish(model.update, model.hidden_row, step.num_tokens, first, end, matrix.scales,
                   matrix.bias)  # fmt: skip
        if adds:
            accumulate(model.hidden, model.hidden_row, model.update, model.hidden_row,
                       step.num_tokens, first, end)  # fmt: skip
    arrive(mark, model.num_threads)


@kernel
def _rotate_and_store(
    other: npt.NDArray[Any], model: Any, step: Any, layer: Any, mark: int
) -> None:
    """Norms and rotates the heads of queries and keys; writes K/V to the cache."""
    num_items = _num_row_items(step)
    group = model.num_heads // layer.num_kv_heads
    head_bytes = 4 * layer.head_dim
    query_bytes = layer.query_bytes
    pairs_bytes = 4 * model.num_pairs
    cache_head_bytes = layer.head_dim * 16 * other.itemsize
    while True:
        item = take(mark)
        if item >= num_items:
            break
        for t in range(item * _ROWS_PER_ITEM, min(step.num_tokens, (item + 1) * _ROWS_PER_ITEM)):
            cos = model.cos_sin + (layer.rotary * step.num_tokens + t) * 2 * pairs_bytes
            sin = cos + pairs_bytes
            own = model.qkv + t * model.qkv_row
            if model.norms_projections:
                rows.norm(own, own, layer.query_norm, model.num_heads * layer.head_dim,
                          model.norm_eps)  # fmt: skip
                keys = own + model.num_heads * head_bytes
                rows.norm(keys, keys, layer.key_norm, layer.num_kv_heads * layer.head_dim,
                          model.norm_eps)  # fmt: skip
            for head in range(model.num_heads):
                x = own + head * query_bytes
                if layer.query_norm and not model.norms_projections:
                    rows.norm(x, x, layer.query_norm, layer.head_dim, model.norm_eps)
                row = (head // group * step.num_tokens + t) * group + head % group
                rows.rotate(model.queries + row * head_bytes, x, cos, sin, layer.num_pairs,
                            layer.head_dim)  # fmt: skip
            slot = load_i64(step.slots + 8 * t)
            block = layer.cache + slot // 16 * layer.block_bytes
            for head in range(layer.num_kv_heads if layer.has_kv else 0):
                x = own + model.num_heads * query_bytes + head * head_bytes
                if layer.key_norm and not model.norms_projections:
                    rows.norm(x, x, layer.key_norm, layer.head_dim, model.norm_eps)
                value = x + layer.num_kv_heads * head_bytes
                if layer.value_norm:
                    rows.norm(value, value, layer.value_norm, layer.head_dim, model.norm_eps)
                # The token's attention output is not computed yet: its place serves as scratch.
                key = model.attended + t * model.attended_row
                rows.rotate(key, x, cos, sin, layer.num_pairs, layer.head_dim)
                is_finite = rows.write_kv(
                    other, block + head * cache_head_bytes,
                    block + (layer.num_kv_heads + head) * cache_head_bytes, slot % 16, key, value,
                    layer.head_dim, model.largest_kv,
                )  # fmt: skip
                if not is_finite:
                    store_u8(step.is_finite + t, np.uint8(0))
    arrive(mark, model.num_threads)


@kernel
def _attend(
    other: npt.NDArray[Any], model: Any, step: Any, layer: Any, thread: int, mark: int
) -> None:
    num_items = load_i64(layer.tasks - 8) * layer.num_kv_heads
    group = model.num_heads // layer.num_kv_heads
    head_bytes = 4 * layer.head_dim
    cache_head_bytes = layer.head_dim * 16 * other.itemsize
    while True:
        item = take(mark)
        if item >= num_items:
            break
        head = item % layer.num_kv_heads
        task = layer.tasks + item // layer.num_kv_heads * 24
        sequence, first_row, num_rows = load_i64(task), load_i64(task + 8), load_i64(task + 16)
        start = load_i64(step.query_offsets + 8 * sequence)
        num_queries = load_i64(step.query_offsets + 8 * sequence + 8) - start
        attend(
            other,
            model.attended + start * model.attended_row + head * group * head_bytes,
            model.attended_row,
            model.queries + ((head * step.num_tokens + start) * group + first_row) * head_bytes,
            layer.cache + head * cache_head_bytes,
            layer.cache + (layer.num_kv_heads + head) * cache_head_bytes,
            step.tables + 4 * load_i64(step.table_offsets + 8 * sequence),
            layer.block_bytes,
            num_rows,
            group,
            first_row,
            load_i64(step.lengths + 8 * sequence) - num_queries,
            layer.head_dim,
            layer.sliding_window,
            model.attention_scaling,
            model.attention_softcap,
            layer.sinks + head * group * 4 if layer.sinks else 0,
            model.scratch + thread * model.scratch_bytes,
        )
        if layer.query_bytes > head_bytes:
            for row in range(first_row, first_row + num_rows):
                t, place = start + row // group, head * group + row % group
                gates = model.qkv + t * model.qkv_row + place * layer.query_bytes + head_bytes
                rows.multiply_by_sigmoid(model.attended + t * model.attended_row
                                         + place * head_bytes, gates, layer.head_dim)  # fmt: skip
    arrive(mark, model.num_threads)


@kernel
def _gate(
    linear: npt.NDArray[Any], model: Any, step: Any, matrix: Any, factors: int, ups: int, mark: int
) -> None:
    """Gated = activation(gate) * up, times the token's factor if there are `factors`."""
    half = matrix.num_blocks if ups else matrix.num_blocks // 2
    per_item = _blocks_per_item(model, half)
    while True:
        first = take(mark) * per_item
        if first >= half:
            break
        end = min(first + per_item, half)
        for begin in (first, half + first):
            if begin >= matrix.num_blocks:
                break
            to = begin + end - first
            multiply(linear, model.normed, model.hidden_row, model.rounded,
                     step.num_tokens, matrix.weights, matrix.depth, begin, to, model.gate_up,
                     model.gate_up_row)  # fmt: skip
            if matrix.scales or matrix.bias:
                finish(model.gate_up, model.gate_up_row, step.num_tokens, begin, to,
                       matrix.scales, matrix.bias)  # fmt: skip
        for t in range(step.num_tokens):
            gates = model.gate_up + t * model.gate_up_row + 64 * first
            own_ups = gates + 64 * half
            if ups:
                own_ups = ups + t * model.per_layer_row + 64 * first
            rows.gate(model.gated + t * model.gated_row + 64 * first, gates, own_ups,
                      16 * (end - first), model.activation)  # fmt: skip
            if factors:
                rows.scale(model.gated + t * model.gated_row + 64 * first, 16 * (end - first),
                           rows.load_f32(factors + 4 * t))  # fmt: skip
    arrive(mark, model.num_threads)


@kernel
def _norm_last(model: Any, step: Any, update_norm: int, scale: Any, mark: int) -> None:
    """The last norm of the rows that need logits, after what `_norm_rows` does first. A row may be
    wanted twice: so hidden stays.
    """
    while True:
        item = take(mark)
        if item >= step.num_rows:
            break
        row = load_i64(step.rows + 8 * item)
        offset = row * model.hidden_row
        x = model.hidden + offset
        if update_norm:
            x = model.normed + item * model.hidden_row
            rows.norm(x, model.update + offset, update_norm, model.hidden_size, model.norm_eps)
            accumulate(x, 0, model.hidden + offset, 0, 1, 0, model.hidden_size // 16)
            if scale != 1:
                rows.scale(x, model.hidden_size, scale)
        rows.norm(
            step.last_hidden + item * model.hidden_row, x, model.final_norm, model.hidden_size,
            model.norm_eps,
        )  # fmt: skip
    arrive(mark, model.num_threads)


@kernel
def _logits(marker: npt.NDArray[Any], model: Any, step: Any, mark: int) -> None:
    matrix = model.head
    per_item = _blocks_per_item(model, matrix.num_blocks)
    while True:
        first = take(mark) * per_item
        if first >= matrix.num_blocks:
            break
        end = min(first + per_item, matrix.num_blocks)
        multiply(marker, step.last_hidden, model.hidden_row, model.rounded,
                 step.num_rows, matrix.weights, matrix.depth, first, end, step.logits,
                 step.logits_row)  # fmt: skip
        if matrix.scales or matrix.bias:
            finish(step.logits, step.logits_row, step.num_rows, first, end, matrix.scales,
                   matrix.bias)  # fmt: skip
        if model.logits_softcap > 0:
            cap(step.logits, step.logits_row, step.num_rows, first, end, model.logits_softcap)


@kernel
def _num_row_items(step: Any) -> Any:
    return (step.num_tokens + _ROWS_PER_ITEM - 1) // _ROWS_PER_ITEM


@kernel
def _blocks_per_item(model: Any, num_blocks: int) -> Any:
    """One thread takes all columns at once; several take them in turns."""
    if model.num_threads == 1:
        return num_blocks
    fair = num_blocks // (model.num_threads * _ITEMS_PER_THREAD)
    return max(_MIN_BLOCKS_PER_ITEM, fair // _MIN_BLOCKS_PER_ITEM * _MIN_BLOCKS_PER_ITEM)
