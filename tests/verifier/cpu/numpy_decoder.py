"""The oracle of the decoder's loader and kernels: a forward pass from `DecoderWeights` in numpy.

In float64, one sequence, no cache: as short as the definition of each operation allows.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.weight_types import Activation, WeightType
from verifier.cpu.weights import DecoderWeights, Experts, Layer, Matrix, Part

Array = npt.NDArray[Any]

_ROUNDING = {WeightType.FLOAT32: 2**-24, WeightType.BFLOAT16: 2**-8, WeightType.FLOAT16: 2**-11}


def all_logits(
    weights: DecoderWeights,
    token_ids: list[int],
    stored: list[tuple[Array, Array]] | None = None,
) -> Array:
    """Logits [T, V] float64 of a text.

    Args:
        stored: K and V [num_kv_heads, T, head_dim] of each layer that has some, as a decoder has
            rounded and kept them. They must be this one's but for the rounding, and are attended to
            instead.
    """
    # Their own factors are those of logits.
    embeddings = unpacked(dataclasses.replace(weights.head, scales=None), weights.other_type)
    if isinstance(weights.embeddings, np.ndarray):
        embeddings = values(weights.embeddings, weights.other_type)
    hidden = embeddings[token_ids] * weights.embedding_scale
    inputs = _inputs(weights, hidden, token_ids)
    kept = iter(stored or ())
    keys_and_values: dict[int | None, tuple[Array, Array]] = {}
    for number, layer in enumerate(weights.layers):
        rows = _normed(hidden, layer.input_norm, weights.norm_eps)
        if layer.delta is not None:
            output = _delta(weights, layer, rows)
        else:
            if layer.has_kv:
                own = _keys_and_values(weights, layer, rows, next(kept) if stored else None)
                keys_and_values[number] = own
            source = number if layer.has_kv else layer.kv_layer
            output = _attention(weights, layer, rows, *keys_and_values[source])
        hidden = hidden + _normed(output, layer.attention_output_norm, weights.norm_eps)
        rows = _normed(hidden, layer.mlp_norm, weights.norm_eps)
        if layer.experts is not None:
            output = _mixture(weights, layer.experts, rows, hidden)
        else:
            assert layer.gate_up is not None
            assert layer.down is not None
            output = _gated(weights, layer.gate_up, layer.down, rows)
        hidden = hidden + _normed(output, layer.mlp_output_norm, weights.norm_eps)
        if layer.layer_input is not None:
            own_input = layer.layer_input
            gate = _product(hidden, own_input.gate, weights.linear_type)
            gated = _gelu(gate) * inputs[:, number]
            output = _product(gated, own_input.down, weights.linear_type)
            hidden = hidden + _normed(output, own_input.norm, weights.norm_eps)
        hidden = hidden * layer.scale
    hidden = _normed(hidden, weights.final_norm, weights.norm_eps)
    logits = _product(hidden, weights.head, weights.other_type)
    return _capped(logits, weights.logits_softcap)


def _inputs(weights: DecoderWeights, hidden: Array, token_ids: list[int]) -> Array:
    """Per-layer inputs [T, layers, P]."""
    own = weights.per_layer_inputs
    if own is None:
        return np.empty(0)
    assert isinstance(own.embeddings, np.ndarray)
    shape = (len(token_ids), len(weights.layers), own.size)
    embedded = values(own.embeddings, weights.other_type)[token_ids].reshape(shape)
    projected = _product(hidden, own.projection, weights.linear_type).reshape(shape)
    normed = _normed(projected, own.norm, weights.norm_eps)
    result: Array = (normed + embedded * math.sqrt(own.size)) / math.sqrt(2)
    return result


def values(bits: Array, weight_type: WeightType) -> Array:
    """The float64 values of stored weights of any shape, without their scales."""
    match weight_type:
        case WeightType.BFLOAT16:
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case WeightType.FLOAT16:
            return bits.view(np.float16).astype(np.float64)
        case WeightType.FP8:
            return np.array([fp8_value(byte) for byte in range(256)])[bits]
    return bits.astype(np.float64)


def fp8_value(byte: int) -> float:
    """An e4m3fn value: 1 bit of sign, 4 of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def unpacked(matrix: Matrix, weight_type: WeightType) -> Array:
    """Weights [N, K] of a packed matrix; of experts [E, N, K]."""
    blocks = values(matrix.blocks, weight_type)
    rows = np.moveaxis(blocks, -1, -2)  # [..., blocks, 16, K]
    rows = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])
    if matrix.scales is not None:
        rows = rows * matrix.scales[..., None]
    return rows[..., : matrix.num_outputs, :]


def _product(rows: Array, matrix: Matrix, weight_type: WeightType) -> Array:
    result = rows @ unpacked(matrix, weight_type).T
    return result if matrix.bias is None else result + matrix.bias[: matrix.num_outputs]


def _normed(rows: Array, weight: Array | None, eps: float) -> Array:
    if weight is None:
        return rows
    normed: Array = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps)
    return normed * weight


def _normed_heads(heads: Array, weight: Array | None, eps: float) -> Array:
    """[heads, T, D], each by itself, or all together if the weight is as long."""
    num_heads, num_tokens, size = heads.shape
    if weight is None or len(weight) == size:
        return _normed(heads, weight, eps)
    together = _normed(heads.swapaxes(0, 1).reshape(num_tokens, -1), weight, eps)
    return together.reshape(num_tokens, num_heads, size).swapaxes(0, 1)


def _capped(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def _heads(weights: DecoderWeights, layer: Layer, rows: Array) -> tuple[Array, Array, Array]:
    """Queries, each with its gate behind it, keys and values [heads, T, D]; none of the latter if
    they are another layer's.
    """
    qkv = _product(rows, layer.qkv, weights.linear_type)
    heads = qkv.reshape(len(rows), -1, layer.head_dim).swapaxes(0, 1)
    num_queries = weights.num_heads * (2 if weights.gates_attention else 1)
    query, key, value = np.split(heads, [num_queries, num_queries + layer.num_kv_heads])
    return query, key, value


def _keys_and_values(
    weights: DecoderWeights, layer: Layer, rows: Array, stored: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    _, key, value = _heads(weights, layer, rows)
    key = _rotated(weights, layer, _normed_heads(key, layer.key_norm, weights.norm_eps))
    value = _normed_heads(value, layer.value_norm, weights.norm_eps)
    if stored is not None:
        # Half the distance of two neighbours, and float32's errors.
        relative = _ROUNDING[weights.other_type] * 1.01
        for own, kept in zip((key, value), stored, strict=True):
            np.testing.assert_allclose(kept, own, rtol=relative, atol=2e-5 * np.abs(own).max())
        key, value = stored
    return key, value


def _attention(
    weights: DecoderWeights, layer: Layer, rows: Array, key: Array, value: Array
) -> Array:
    num_tokens = len(rows)
    query, *_ = _heads(weights, layer, rows)
    query, *gates = (query[i::2] for i in (0, 1)) if weights.gates_attention else (query,)
    query = _rotated(weights, layer, _normed_heads(query, layer.query_norm, weights.norm_eps))
    group = weights.num_heads // layer.num_kv_heads
    key, value = key.repeat(group, axis=0), value.repeat(group, axis=0)
    scores = _capped(
        query @ key.swapaxes(1, 2) * weights.attention_scaling, weights.attention_softcap
    )
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    is_seen = (distance >= 0) & (distance < (layer.sliding_window or num_tokens))
    scores = np.where(is_seen, scores, -np.inf)
    if layer.sinks is not None:
        sinks = np.broadcast_to(layer.sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate((scores, sinks), axis=-1)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    shares = shares[..., :num_tokens]
    mixed = shares @ value
    for gate in gates:
        mixed = mixed * _sigmoid(gate)
    mixed = mixed.swapaxes(0, 1).reshape(num_tokens, -1)
    return _product(mixed, layer.output, weights.linear_type)


def _delta(weights: DecoderWeights, layer: Layer, rows: Array) -> Array:
    """A gated delta net, token by token."""
    shape, delta = weights.delta, layer.delta
    assert shape is not None
    assert delta is not None
    num_tokens, num_heads = len(rows), shape.num_value_heads
    query, key, value, gate, step, decay = _delta_inputs(shape, weights, layer, rows)
    channels = [each.reshape(num_tokens, -1) for each in (query, key, value)]
    padded = np.pad(np.concatenate(channels, axis=1), ((shape.kernel_size - 1, 0), (0, 0)))
    mixed = sum(padded[j : j + num_tokens] * tap for j, tap in enumerate(delta.convolution))
    mixed = mixed * _sigmoid(mixed)
    ends = np.cumsum([each.shape[1] for each in channels])
    query, key, value = (
        each.reshape(num_tokens, -1, size)
        for each, size in zip(
            np.split(mixed, ends[:2], axis=1),
            (shape.key_dim, shape.key_dim, shape.value_dim),
            strict=True,
        )
    )
    heads = num_heads // shape.num_key_heads
    query, key = (
        each / np.sqrt((each**2).sum(axis=-1, keepdims=True) + 1e-6) for each in (query, key)
    )
    query, key = (
        np.tile(each, (1, heads, 1)) if shape.takes_turns else each.repeat(heads, axis=1)
        for each in (query, key)
    )
    query = query / math.sqrt(shape.key_dim)
    decay = np.exp(-delta.decay_rate * np.logaddexp(0, decay + delta.decay_bias))
    step = _sigmoid(step)
    state = np.zeros((num_heads, shape.key_dim, shape.value_dim))
    outputs = np.empty_like(value)
    for t in range(num_tokens):
        state = state * decay[t][:, None, None]
        seen = np.einsum("hk,hkv->hv", key[t], state)
        change = step[t][:, None] * (value[t] - seen)
        state = state + key[t][:, :, None] * change[:, None, :]
        outputs[t] = np.einsum("hk,hkv->hv", query[t], state)
    outputs = _normed(outputs, delta.norm, weights.norm_eps) * gate * _sigmoid(gate)
    return _product(outputs.reshape(num_tokens, -1), layer.output, weights.linear_type)


def _delta_inputs(
    shape: DeltaShape, weights: DecoderWeights, layer: Layer, rows: Array
) -> list[Array]:
    """Queries, keys, values, gates [T, heads, size] and steps, decays [T, heads]."""
    outputs = rows @ unpacked(layer.qkv, weights.linear_type).T
    groups, num_heads = shape.num_key_heads, shape.num_value_heads
    values, heads = num_heads * shape.value_dim, num_heads // groups
    width = shape.num_channels + values
    rest = outputs[:, width:]
    if shape.inputs[0] == "in_proj_qkvz":
        own = outputs[:, :width].reshape(len(rows), groups, -1)
        ends = np.cumsum([shape.key_dim, shape.key_dim, heads * shape.value_dim])
        parts = np.split(own, ends, axis=-1)
    else:
        keys = groups * shape.key_dim
        parts = np.split(outputs[:, :width], np.cumsum([keys, keys, values]), axis=-1)
    if shape.inputs[-1] == "in_proj_ba":
        parts += np.split(rest[:, : 2 * num_heads].reshape(len(rows), groups, -1), 2, axis=-1)
    else:
        parts += [each[:, :num_heads] for each in np.split(rest, 2, axis=-1)]
    sizes = [shape.key_dim] * 2 + [shape.value_dim] * 2
    split = [each.reshape(len(rows), -1, size) for each, size in zip(parts, sizes, strict=False)]
    return split + [each.reshape(len(rows), num_heads) for each in parts[4:]]


def _sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def _rotated(weights: DecoderWeights, layer: Layer, heads: Array) -> Array:
    """[heads, T, D]; pairs are (i, i + half) of the rotated dimensions."""
    rotary = weights.rotaries[layer.rotary]
    half = len(rotary.inv_freq)
    # As transformers: angles are rounded to float32.
    positions = np.arange(heads.shape[1], dtype=np.float32)
    angles = (positions[:, None] * rotary.inv_freq).astype(np.float64)
    cos, sin = np.cos(angles) * rotary.scaling, np.sin(angles) * rotary.scaling
    first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


def _gated(weights: DecoderWeights, gate_up: Matrix, down: Matrix, rows: Array) -> Array:
    gate, up = np.split(_product(rows, gate_up, weights.linear_type), 2, axis=-1)
    if weights.activation is Activation.SILU:
        gate = gate / (1 + np.exp(-gate))
    elif weights.activation is Activation.CLAMPED:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
        gate = gate / (1 + np.exp(-1.702 * gate))
    else:
        gate = _gelu(gate)
    return _product(gate * up, down, weights.linear_type)


def _gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def _mixture(weights: DecoderWeights, experts: Experts, rows: Array, hidden: Array) -> Array:
    """Args: rows: the normalised hidden state, of which an MLP beside the mixture sees it."""
    eps, beside, mlp_rows = weights.norm_eps, experts.beside_mlp, rows
    routed = rows
    if beside is not None:
        routed = _normed(hidden, beside.router_norm, eps)
        rows = _normed(hidden, beside.input_norm, eps)
    logits = _product(routed, experts.router, weights.other_type)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    result = np.zeros_like(rows)
    for token, share in enumerate(shares):
        chosen = np.argsort(-share, kind="stable")[: experts.num_per_token]
        total = share[chosen].sum() if experts.normalises else 1.0
        for expert in chosen:
            output = _gated(
                weights,
                _one_of(experts.gate_up, expert),
                _one_of(experts.down, expert),
                rows[token : token + 1],
            )
            factor = 1.0 if beside is None else beside.factors[expert]
            result[token] += output[0] * share[expert] / total * factor
    if beside is not None:
        assert experts.shared_gate_up is not None
        assert experts.shared_down is not None
        mlp = _gated(weights, experts.shared_gate_up, experts.shared_down, mlp_rows)
        result = _normed(result, beside.output_norm, eps)
        result += _normed(mlp, beside.mlp_output_norm, eps)
    if experts.shared_gate is not None:
        assert experts.shared_gate_up is not None
        assert experts.shared_down is not None
        shared = _gated(weights, experts.shared_gate_up, experts.shared_down, rows)
        result += shared * _sigmoid(rows @ experts.shared_gate)[:, None]
    return result


def _one_of(matrix: Matrix, expert: int) -> Matrix:
    scales, bias = (None if each is None else each[expert] for each in (matrix.scales, matrix.bias))
    parts = [Part(blocks=matrix.blocks[expert])]
    return dataclasses.replace(matrix, parts=parts, scales=scales, bias=bias)
