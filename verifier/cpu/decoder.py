"""A target model of our own kernels: owns the K/V cache, the buffers and the threads."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.memory import address_of
from servicekit.logs import get_logger
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import SampledOnHost
from verifier.batch.slot_lengths import DEFAULT_MAX_DRAFTS
from verifier.checkpoint.weight_types import LANES, FloatArray, WeightType
from verifier.cpu.forward_threads import ForwardThreads
from verifier.cpu.kernels.attention import scratch_bytes
from verifier.cpu.kernels.forward import NUM_OTHER_PHASES, NUM_PHASES_PER_LAYER, forward
from verifier.cpu.kernels.group_panels import rounded_row_bytes
from verifier.cpu.kernels.group_records import (
    NUMBERS,
    PLAIN_BFLOAT16,
    PLAIN_FLOAT16,
    PLAIN_FLOAT32,
)
from verifier.cpu.kernels.products import PART_BYTES
from verifier.cpu.kernels.threads import MARK_BYTES
from verifier.cpu.kernels.tiles import FP8_FACTOR
from verifier.cpu.layout_checks import Limits, describe_step
from verifier.cpu.processor import TILES
from verifier.cpu.records import LAYER, MATRIX, MODEL, STEP
from verifier.cpu.states import States, padded_heads, places
from verifier.cpu.weights import (
    DecoderWeights,
    DeltaNet,
    Matrix,
    PerLayerInputs,
    deepest,
    gate_ups,
)

BLOCK_SIZE = 16
"""Tokens of a block as kernels see it."""

LARGEST_KV = {
    WeightType.FLOAT32: float(np.finfo(np.float32).max),
    WeightType.BFLOAT16: float.fromhex("0x1.fefffep127"),
    WeightType.FLOAT16: float.fromhex("0x1.ffdffep15"),
}
"""The largest float32 that rounds to a finite value of a cache's type."""
_SCRATCH_ALIGNMENT = 4096

logger = get_logger(__name__)


class CpuDecoder(SampledOnHost):
    """Implements `TargetModel`. Owned by the engine thread."""

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        num_blocks: int,
        block_size: int,
        num_threads: int,
        max_num_tokens: int,
        num_state_slots: int = 1,
        max_drafts: int = DEFAULT_MAX_DRAFTS,
    ) -> None:
        """Args:
        num_blocks: of the K/V cache; memory is committed as blocks are first written.
        block_size: tokens per block, a multiple of 16.
        num_threads: that compute, the caller's included.
        max_num_tokens: of a forward pass.
        num_state_slots: for recurrent states, if the model has them. A layout that does not tell
            slots has one sequence, whose slot is 0.
        max_drafts: of a sequence, if the model has recurrent states.

        Raises:
            ValueError: `block_size` is no multiple of 16, or another number is below 1.
        """
        if block_size % BLOCK_SIZE or min(num_blocks, block_size, num_threads, max_num_tokens) < 1:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens, {num_threads} threads, "
                f"{max_num_tokens} tokens at once"
            )
        self.vocab_size = weights.vocab_size
        self.block_size = block_size
        in_groups = weights.linear_type is WeightType.GROUPS
        self.row_tile = TILES.max_group_rows if in_groups else TILES.max_rows
        self.max_drafts = max_drafts
        self._weights = weights
        self._num_threads = num_threads
        pieces_per_block = block_size // BLOCK_SIZE
        self._limits = Limits(
            max_num_tokens=max_num_tokens,
            vocab_size=weights.vocab_size,
            num_slots=num_blocks * block_size,
            num_cache_blocks=num_blocks * pieces_per_block,
            block_size=block_size,
            pieces_per_block=pieces_per_block,
        )
        self._linear = np.empty(0, dtype=weights.linear_type.value)
        self._other = np.empty(0, dtype=weights.other_type.value)
        self._kept: list[npt.NDArray[Any]] = []
        self._models = np.zeros(1, dtype=MODEL)
        self._layers = np.zeros(len(weights.layers), dtype=LAYER)
        self._steps = np.zeros(1, dtype=STEP)
        self._hidden_stride = _stride(weights.hidden_size)
        self._logits = np.empty((0, weights.head.num_blocks * LANES), dtype=np.float32)
        self._last_hidden = np.empty((0, self._hidden_stride), dtype=np.float32)
        self._states: States | None = None
        if weights.delta is not None:
            self._states = States(
                weights.delta,
                num_layers=sum(layer.delta is not None for layer in weights.layers),
                num_slots=num_state_slots,
                max_drafts=max_drafts,
            )
        self._describe_layers(num_blocks * pieces_per_block)
        self._describe_model(max_num_tokens)
        self._is_closed = False
        self._threads = ForwardThreads(
            num_threads - 1,
            (self._linear, self._other, self._models, self._layers, self._steps),
        )

    def forward(self, layout: BatchLayout) -> FloatArray:
        """Logits [R, vocab_size] of the layout's rows; valid until the next call.

        Raises:
            ValueError: the layout does not fit the decoder, or contradicts itself.
            RuntimeError: the decoder was closed.
        """
        if self._is_closed:
            raise RuntimeError("the decoder was closed")
        is_finite = np.empty(layout.num_tokens, dtype=np.bool_)
        # Alive as long as kernels read them.
        arrays = describe_step(self._limits, layout, self._steps, is_finite)
        if self._states is not None:
            arrays += self._states.begin(layout, self._steps[0])
        self._grow_buffers(layout.num_rows)
        self._marks[:] = 0
        self._threads.start()
        forward(self._linear, self._other, self._models, self._layers, self._steps, 0)
        del arrays
        if self._states is not None:
            self._states.lengths.end(layout)
        self.kv_is_finite = is_finite
        self.hidden_states = None
        if layout.wants_hidden_states:
            rows = self._last_hidden[layout.scored_logits_indices]
            self.hidden_states = rows[:, : self._weights.hidden_size]
        # Copied only where the vocabulary is no multiple of 16: the sampler's kernels are compiled
        # for contiguous rows.
        return np.ascontiguousarray(self._logits[: layout.num_rows, : self.vocab_size])

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._is_closed = True
        self._threads.stop()

    def _grow_buffers(self, num_rows: int) -> None:
        if num_rows > len(self._logits):
            # No more than a step can have: a row has as many logits as the vocabulary has tokens.
            num_rows = max(num_rows, min(2 * len(self._logits), self._limits.max_num_tokens))
            self._logits = np.empty((num_rows, self._logits.shape[1]), dtype=np.float32)
            self._last_hidden = np.empty((num_rows, self._hidden_stride), dtype=np.float32)
            step = self._steps[0]
            step["logits"] = address_of(self._logits)
            step["logits_row"] = self._logits.strides[0]
            step["last_hidden"] = address_of(self._last_hidden)

    def _describe_layers(self, num_blocks: int) -> None:
        weights = self._weights
        cache_type = weights.other_type.value
        keeping = [layer for layer in weights.layers if layer.has_kv]
        sizes = [2 * each.num_kv_heads * each.head_dim * BLOCK_SIZE for each in keeping]
        # Memory that nothing was written to takes no room.
        cache = np.zeros(sum(sizes) * num_blocks, cache_type)
        ends = itertools.accumulate(size * num_blocks for size in sizes)
        self.kv_caches = [
            cache[end - size * num_blocks : end].reshape(num_blocks, size)
            for size, end in zip(sizes, ends, strict=True)
        ]
        own_caches, state_numbers = iter(self.kv_caches), itertools.count()
        for number, layer in enumerate(weights.layers):
            record = self._layers[number]
            for name in ("num_kv_heads", "head_dim", "scale", "sliding_window", "rotary"):
                record[name] = getattr(layer, name)
            record["query_bytes"] = 4 * layer.head_dim * (2 if weights.gates_attention else 1)
            record["num_pairs"] = len(weights.rotaries[layer.rotary].inv_freq)
            for name in (
                "input_norm", "query_norm", "key_norm", "value_norm", "attention_output_norm",
                "mlp_norm", "mlp_output_norm", "sinks",
            ):  # fmt: skip
                record[name] = self._address(getattr(layer, name))
            record["update_norm"] = record["mlp_output_norm"]
            if layer.layer_input is not None:
                record["input_gate"] = self._matrix(layer.layer_input.gate)
                record["input_down"] = self._matrix(layer.layer_input.down)
                record["update_norm"] = self._address(layer.layer_input.norm)
            record["qkv"] = self._matrix(layer.qkv)
            record["output"] = self._matrix(layer.output)
            experts = layer.experts
            source: Any = layer if experts is None else experts
            record["gate_up"] = self._matrix(source.gate_up)
            record["down"] = self._matrix(source.down)
            if experts is not None:
                record["router"] = self._matrix(experts.router)
                record["shared_gate"] = self._address(experts.shared_gate)
                record["shared_gate_up"] = self._matrix(experts.shared_gate_up)
                record["shared_down"] = self._matrix(experts.shared_down)
                if (beside := experts.beside_mlp) is not None:
                    record["router_norm"] = self._address(beside.router_norm)
                    record["experts_input_norm"] = self._address(beside.input_norm)
                    record["experts_output_norm"] = self._address(beside.output_norm)
                    record["shared_output_norm"] = self._address(beside.mlp_output_norm)
                    record["expert_factors"] = self._address(beside.factors)
            record["has_kv"] = layer.has_kv
            if layer.has_kv:
                cache = next(own_caches)
                record["cache"], record["block_bytes"] = address_of(cache), cache.strides[0]
            elif layer.kv_layer is not None:
                for name in ("cache", "block_bytes"):
                    record[name] = self._layers[layer.kv_layer][name]
            elif layer.delta is not None:
                self._describe_delta(record, layer.delta, next(state_numbers))

    def _describe_delta(self, record: Any, delta: DeltaNet, number: int) -> None:
        """Args: number: of the layer, among those that are gated delta nets."""
        states = self._states
        assert states is not None
        record["convolution"] = self._address(delta.convolution)
        for name in ("decay_rate", "decay_bias"):
            record[name] = self._address(padded_heads(getattr(delta, name), states.shape))
        record["delta_norm"] = self._address(delta.norm)
        record["states"] = address_of(states.states[0, number])
        record["recent"] = address_of(states.recent[0, number])

    def _describe_model(self, max_num_tokens: int) -> None:
        weights, model = self._weights, self._models[0]
        layers = weights.layers
        experts = next((layer.experts for layer in layers if layer.experts is not None), None)
        num_pairs = max(len(r.inv_freq) for r in weights.rotaries)
        inv_freq = np.zeros((2, len(weights.rotaries), num_pairs), dtype=np.float32)
        for number, rotary in enumerate(weights.rotaries):
            own = slice(len(rotary.inv_freq))
            short, long = rotary.inv_freq, rotary.long_inv_freq
            inv_freq[0, number, own] = short
            inv_freq[1, number, own] = short if long is None else long
        scaling = np.array([r.scaling for r in weights.rotaries], dtype=np.float32)
        for name in (
            "hidden_size", "num_heads", "norm_eps", "attention_scaling", "attention_softcap",
            "logits_softcap", "embedding_scale",
        ):  # fmt: skip
            model[name] = getattr(weights, name)
        model["num_layers"] = len(layers)
        query_norm = layers[0].query_norm
        model["norms_projections"] = query_norm is not None and len(query_norm) > layers[0].head_dim
        model["largest_kv"] = LARGEST_KV[weights.other_type]
        model["activation"] = weights.activation
        embeddings = weights.head if weights.embeddings is None else weights.embeddings
        model["embeddings_are_packed"] = isinstance(embeddings, Matrix)
        model["embeddings"] = (
            self._matrix(embeddings)["weights"]
            if isinstance(embeddings, Matrix)
            else self._address(embeddings)
        )
        model["final_norm"] = self._address(weights.final_norm)
        model["head"] = self._matrix(weights.head)
        model["num_rotaries"], model["num_pairs"] = len(weights.rotaries), num_pairs
        model["inv_freq"], model["rotary_scaling"] = self._address(inv_freq), self._address(scaling)

        num_inner_rows = max_num_tokens
        if experts is not None:
            num_choices = max_num_tokens * experts.num_per_token
            num_inner_rows = num_choices
            model["num_experts"] = experts.num_experts
            model["num_experts_per_token"] = experts.num_per_token
            model["normalises_experts"] = experts.normalises
            model["routing"] = self._buffer(max_num_tokens, experts.router.num_blocks * LANES)
            model["routing_row"] = _stride(experts.router.num_blocks * LANES) * 4
            model["chosen"] = self._buffer(num_choices, 4)
            model["chosen_weights"] = self._buffer(num_choices, 1)
            model["expert_starts"] = self._buffer(experts.num_experts + 1, 2)
            model["expert_rows"] = self._buffer(num_choices, weights.hidden_size)
            model["expert_updates"] = self._buffer(num_choices, weights.hidden_size)
            model["shared_factors"] = self._buffer(max_num_tokens, 1)
            if experts.beside_mlp is not None:
                model["shared_updates"] = self._buffer(max_num_tokens, weights.hidden_size)
        qkv_size = max(layer.qkv.num_blocks for layer in layers) * LANES
        head_dim = max(layer.head_dim for layer in layers)
        queries_size = weights.num_heads * head_dim
        attended_size = max(queries_size, *(layer.output.depth for layer in layers))
        inner = max(
            (m.num_blocks * LANES for layer in layers for m in gate_ups(layer)), default=LANES
        )
        scratch = scratch_bytes(head_dim)
        if weights.per_layer_inputs is not None:
            inner = max(inner, 2 * weights.per_layer_inputs.size)
            scratch = max(scratch, self._describe_inputs(weights.per_layer_inputs, max_num_tokens))
        model["hidden_row"] = self._hidden_stride * 4
        for name in ("hidden", "normed", "update"):
            model[name] = self._buffer(max_num_tokens, weights.hidden_size)
        for name, num_rows, size in (
            ("qkv", max_num_tokens, qkv_size),
            ("attended", max_num_tokens, attended_size),
            ("gate_up", num_inner_rows, inner),
            ("gated", num_inner_rows, inner // 2),
        ):
            model[name] = self._buffer(num_rows, size)
            model[f"{name}_row"] = _stride(size) * 4
        if weights.linear_type is WeightType.GROUPS:
            floats = _stride(rounded_row_bytes(deepest(weights)) // 4)
            model["rounded"] = self._address(np.zeros((num_inner_rows, floats), np.float32))
            model["rounded_row"] = 4 * floats
        model["queries"] = self._buffer(max_num_tokens, queries_size)
        model["cos_sin"] = self._buffer(max_num_tokens * len(weights.rotaries) * 2, num_pairs)
        groups = [weights.num_heads // layer.num_kv_heads for layer in layers]
        # The first place holds their number.
        tasks = {group: self._buffer(max_num_tokens * group + 2, 6) + 8 for group in set(groups)}
        self._layers["tasks"] = [tasks[group] for group in groups]
        model["num_groupings"] = len(tasks)
        model["groupings"] = self._address(np.array(list(tasks.items()), dtype=np.int64))
        if self._states is not None:
            scratch = max(scratch, self._states.describe(model))
            model["places"] = self._address(places(self._states.shape))
        scratch = -(-scratch // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        model["scratch_bytes"] = scratch
        model["scratch"] = self._buffer(self._num_threads, scratch // 4)
        num_phases = len(layers) * NUM_PHASES_PER_LAYER + NUM_OTHER_PHASES
        self._marks = np.zeros(num_phases * MARK_BYTES // 8, dtype=np.int64)
        model["marks"], model["num_threads"] = address_of(self._marks), self._num_threads

    def _describe_inputs(self, inputs: PerLayerInputs, max_num_tokens: int) -> int:
        """Returns the bytes of scratch that they take."""
        model, size = self._models[0], inputs.projection.num_outputs
        model["per_layer_size"] = inputs.size
        model["per_layer_projection"] = self._matrix(inputs.projection)
        model["per_layer_norm"] = self._address(inputs.norm)
        is_packed = isinstance(inputs.embeddings, Matrix)
        model["per_layer_embeddings_are_packed"] = is_packed
        model["per_layer_embeddings"] = (
            self._matrix(inputs.embeddings)["weights"]
            if isinstance(inputs.embeddings, Matrix)
            else self._address(inputs.embeddings)
        )
        model["per_layer_inputs"] = self._buffer(max_num_tokens, size)
        model["per_layer_row"] = 4 * _stride(size)
        return 4 * size

    def _matrix(self, matrix: Matrix | None) -> npt.NDArray[Any]:
        record = np.zeros((), dtype=MATRIX)
        if matrix is not None:
            scales = matrix.scales
            first = matrix.parts[0]
            # Bytes in groups are codes of other types.
            is_fp8 = first.form is None and first.blocks.dtype == WeightType.FP8.value
            if scales is not None and is_fp8:
                scales = scales * np.float32(FP8_FACTOR)
            in_groups = self._weights.linear_type is WeightType.GROUPS
            weights = _parts_table(matrix) if in_groups else matrix.blocks
            self._kept += [part.blocks for part in matrix.parts]
            record["weights"], record["num_parts"] = self._address(weights), len(matrix.parts)
            record["depth"], record["num_blocks"] = matrix.depth, matrix.num_blocks
            record["scales"] = self._address(scales)
            record["bias"] = self._address(matrix.bias)
        return record

    def _address(self, array: npt.NDArray[Any] | None) -> int:
        if array is None:
            return 0
        assert array.flags.c_contiguous
        self._kept.append(array)
        # `address_of` would be compiled for each shape and type.
        return int(array.ctypes.data)

    def _buffer(self, num_rows: int, size: int) -> int:
        """The address of rows of floats, `_stride(size)` apart."""
        return self._address(np.zeros((num_rows, _stride(size)), dtype=np.float32))


_PLAIN = {
    WeightType.FLOAT32.value: PLAIN_FLOAT32,
    WeightType.BFLOAT16.value: PLAIN_BFLOAT16,
    WeightType.FLOAT16.value: PLAIN_FLOAT16,
}


def _parts_table(matrix: Matrix) -> npt.NDArray[np.int64]:
    """A table of parts as `kernels.products` reads it, of experts one after another."""
    ends = np.cumsum([part.num_blocks for part in matrix.parts])
    num_experts = len(matrix.parts[0].blocks) if matrix.parts[0].blocks.ndim == 4 else 1
    table = np.empty((num_experts, len(matrix.parts), 4), dtype=np.int64)
    for i, (part, end) in enumerate(zip(matrix.parts, ends, strict=True)):
        assert part.blocks.flags.c_contiguous
        form = _PLAIN[part.blocks.dtype.type] if part.form is None else NUMBERS[part.form]
        table[:, i] = end, form, part.blocks.ctypes.data, part.blocks.strides[-3]
        if num_experts > 1:
            table[:, i, 2] += np.arange(num_experts) * part.blocks.strides[0]
    assert table.strides[1] == PART_BYTES
    return table


def _stride(size: int) -> int:
    """Floats from row to row: an odd number of cache lines, so that rows do not compete for the
    same places of a cache.
    """
    return (-(-size // LANES) | 1) * LANES
