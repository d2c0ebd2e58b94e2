"""A mixture of experts: each token's MLP is the weighted sum of a few experts' MLPs.

Tokens are grouped by expert, so an expert's weights are read once. An output's chain does not know
how many tokens its expert has, and a token adds its experts in the order of their weights: so a
token's bits do not depend on the batch here either.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, store_i64
from verifier.cpu.kernels import rows, vectors
from verifier.cpu.kernels.products import PART_BYTES, accumulate, finish, multiply, round_rows
from verifier.cpu.kernels.threads import MARK_BYTES, arrive, take
from verifier.cpu.kernels.tiles import in_groups


@kernel
def mix_experts(
    linear: npt.NDArray[Any], other: npt.NDArray[Any], model: Any, step: Any, layer: Any, mark: int
) -> int:
    """Hidden += the experts' weighted sum, or update = it if a norm comes first; in six phases.

    Returns:
        The mark after those used.
    """
    num_tokens, per_token = step.num_tokens, model.num_experts_per_token
    while True:
        t = take(mark)
        if t >= num_tokens:
            break
        if in_groups(linear):
            _route(linear, model, layer, t)
        else:
            _route(other, model, layer, t)
    arrive(mark, model.num_threads)
    mark += MARK_BYTES

    if take(mark) == 0:
        _group(model, num_tokens)
    arrive(mark, model.num_threads)
    mark += MARK_BYTES

    while True:
        t = take(mark)
        if t >= num_tokens:
            break
        for k in range(per_token):
            place = load_i64(model.chosen + (t * per_token + k) * 16 + 8)
            rows.copy(model.expert_rows + place * model.hidden_row,
                      model.normed + t * model.hidden_row, model.hidden_size)  # fmt: skip
    arrive(mark, model.num_threads)
    mark += MARK_BYTES

    half = layer.gate_up.num_blocks // 2
    while True:
        expert = take(mark)
        if expert >= model.num_experts:
            break
        first, end = _rows_of(model, expert)
        if first == end:
            continue
        matrix = layer.gate_up
        weights, scales, bias = _of_expert(linear, matrix, expert)
        to = model.gate_up + first * model.gate_up_row
        _multiply_rows(linear, model, model.expert_rows, model.hidden_row, first, end, weights,
                       matrix, to, model.gate_up_row)  # fmt: skip
        if scales or bias:
            finish(to, model.gate_up_row, end - first, 0, matrix.num_blocks, scales, bias)
        for row in range(first, end):
            gates = model.gate_up + row * model.gate_up_row
            rows.gate(model.gated + row * model.gated_row, gates, gates + 64 * half, 16 * half,
                      model.activation)  # fmt: skip
        matrix = layer.down
        weights, scales, bias = _of_expert(linear, matrix, expert)
        to = model.expert_updates + first * model.hidden_row
        _multiply_rows(linear, model, model.gated, model.gated_row, first, end, weights, matrix,
                       to, model.hidden_row)  # fmt: skip
        if scales or bias:
            finish(to, model.hidden_row, end - first, 0, matrix.num_blocks, scales, bias)
    arrive(mark, model.num_threads)
    mark += MARK_BYTES

    while True:
        t = take(mark)
        if t >= num_tokens:
            break
        _combine(model, layer, t)
    arrive(mark, model.num_threads)
    return mark + MARK_BYTES


@kernel
def _route(marker: npt.NDArray[Any], model: Any, layer: Any, t: int) -> None:
    """Chooses the token's experts: the likeliest ones, the first of equals."""
    own = model.routing + t * model.routing_row
    matrix = layer.router
    x = (model.update if layer.router_norm else model.normed) + t * model.hidden_row
    multiply(marker, x, model.hidden_row, 0, 1, matrix.weights, matrix.depth, 0,
             matrix.num_blocks, own, model.routing_row)  # fmt: skip
    if matrix.bias:
        finish(own, model.routing_row, 1, 0, matrix.num_blocks, 0, matrix.bias)
    num_experts, per_token = model.num_experts, model.num_experts_per_token
    largest = np.float32(-np.inf)
    for e in range(num_experts):
        largest = max(largest, rows.load_f32(own + 4 * e))
    for e in range(num_experts, 16 * matrix.num_blocks):
        rows.store_f32(own + 4 * e, np.float32(-np.inf))
    top = vectors.fill(largest)
    total = vectors.fill(np.float32(0.0))
    for offset in range(0, 64 * matrix.num_blocks, 64):
        value = vectors.exp(vectors.subtract(vectors.load(own + offset), top))
        vectors.store(own + offset, value)
        total = vectors.add(total, value)
    divisor = vectors.sum_of(total)
    chosen_sum = np.float32(0.0)
    for k in range(per_token):
        best, best_weight = 0, np.float32(-1.0)
        for e in range(num_experts):
            weight = rows.load_f32(own + 4 * e)
            if weight > best_weight:
                best, best_weight = e, weight
        rows.store_f32(own + 4 * best, np.float32(-2.0))
        best_weight = best_weight / divisor
        chosen_sum += best_weight
        store_i64(model.chosen + (t * per_token + k) * 16, best)
        rows.store_f32(model.chosen_weights + (t * per_token + k) * 4, best_weight)
    if model.normalises_experts:
        for k in range(per_token):
            place = model.chosen_weights + (t * per_token + k) * 4
            rows.store_f32(place, rows.load_f32(place) / chosen_sum)
    if layer.expert_factors:
        for k in range(per_token):
            place = model.chosen_weights + (t * per_token + k) * 4
            expert = load_i64(model.chosen + (t * per_token + k) * 16)
            factor = rows.load_f32(layer.expert_factors + 4 * expert)
            rows.store_f32(place, rows.load_f32(place) * factor)


@kernel
def _group(model: Any, num_tokens: int) -> None:
    """Gives each choice a place among the rows of its expert."""
    num_choices = num_tokens * model.num_experts_per_token
    for e in range(model.num_experts + 1):
        store_i64(model.expert_starts + 8 * e, 0)
    for i in range(num_choices):
        after = model.expert_starts + 8 * load_i64(model.chosen + 16 * i) + 8
        store_i64(after, load_i64(after) + 1)
    for e in range(model.num_experts):
        after = model.expert_starts + 8 * e + 8
        store_i64(after, load_i64(after) + load_i64(after - 8))
    # The starts move on as places are given away, and are moved back at the end.
    for i in range(num_choices):
        start = model.expert_starts + 8 * load_i64(model.chosen + 16 * i)
        place = load_i64(start)
        store_i64(model.chosen + 16 * i + 8, place)
        store_i64(start, place + 1)
    for e in range(model.num_experts, 0, -1):
        before = load_i64(model.expert_starts + 8 * e - 8)
        store_i64(model.expert_starts + 8 * e, before)
    store_i64(model.expert_starts, 0)


@kernel
def _rows_of(model: Any, expert: int) -> tuple[int, int]:
    start = model.expert_starts + 8 * expert
    return load_i64(start), load_i64(start + 8)


@kernel
def _of_expert(linear: npt.NDArray[Any], matrix: Any, expert: int) -> tuple[int, int, int]:
    """Addresses of the expert's weights, scales and bias; 0 of those that there are not."""
    size = matrix.num_blocks * matrix.depth * 16 * linear.itemsize
    if in_groups(linear):
        size = matrix.num_parts * PART_BYTES
    offset = expert * matrix.num_blocks * 64
    scales = matrix.scales + offset if matrix.scales else 0
    bias = matrix.bias + offset if matrix.bias else 0
    return matrix.weights + expert * size, scales, bias


@kernel
def _multiply_rows(
    linear: npt.NDArray[Any], model: Any, x: int, x_row: int, first: int, end: int, weights: int,
    matrix: Any, out: int, out_row: int,
) -> None:  # fmt: skip
    """Products of the rows at places from `first` to before `end`."""
    x += first * x_row
    rounded = model.rounded + first * model.rounded_row
    if in_groups(linear):
        round_rows(x, x_row, 0, end - first, end - first, matrix.depth, rounded)
    multiply(linear, x, x_row, rounded, end - first, weights, matrix.depth, 0, matrix.num_blocks,
             out, out_row)  # fmt: skip


@kernel
def _combine(model: Any, layer: Any, t: int) -> None:
    per_token = model.num_experts_per_token
    for offset in range(0, 4 * model.hidden_size, 64):
        total = vectors.fill(np.float32(0.0))
        for k in range(per_token):
            place = load_i64(model.chosen + (t * per_token + k) * 16 + 8)
            weight = vectors.fill(rows.load_f32(model.chosen_weights + (t * per_token + k) * 4))
            value = vectors.load(model.expert_updates + place * model.hidden_row + offset)
            total = vectors.multiply_add(weight, value, total)
        if layer.mlp_output_norm:
            vectors.store(model.update + t * model.hidden_row + offset, total)
        else:
            to = model.hidden + t * model.hidden_row + offset
            vectors.store(to, vectors.add(vectors.load(to), total))
    if layer.router_norm:
        own = t * model.hidden_row
        rows.norm(model.update + own, model.update + own, layer.experts_output_norm,
                  model.hidden_size, model.norm_eps)  # fmt: skip
        accumulate(model.update + own, 0, model.shared_updates + own, 0, 1, 0,
                   model.hidden_size // 16)  # fmt: skip
