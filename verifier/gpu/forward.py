"""The layers of one step.

The residual stream is float32, so that nothing overflows in it in float16; all else is of the
model's dtype, and what gated delta nets keep float32.

Shape legend: T tokens of the step, R rows that need logits, H hidden size, D head_dim of a layer, P
pairs of a rotary embedding.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from verifier.attention.backend import StepAttention
from verifier.attention.kv_cache import KVCache
from verifier.gpu.device_batch import DeviceArrays
from verifier.gpu.layers.deltas import run_delta
from verifier.gpu.layers.experts import mix_beside_mlp, mix_experts, mix_with_shared, run_mlp
from verifier.gpu.layers.layer_inputs import make_inputs, take_input
from verifier.gpu.layers.states import DeviceStates, StateTables
from verifier.gpu.weights import DeltaNet, Experts, GpuWeights, Layer


class Hidden(NamedTuple):
    """What the layers leave, of which a head makes logits."""

    rows: torch.Tensor  # [R, H], of the model's dtype, normalised
    is_bad: torch.Tensor  # [T] int32, as in `Operations.rotate_and_store`
    is_bad_row: torch.Tensor  # [R], of the rows' tokens


class ForwardPass:
    """Launches kernels; owns nothing."""

    def __init__(self, weights: GpuWeights, cache: KVCache, states: DeviceStates | None) -> None:
        """Args: states: None: the model has no recurrent ones."""
        self._weights = weights
        self._operations = weights.operations
        self._cache = cache
        self._states = states
        numbers = itertools.count()
        # Among layers that are gated delta nets.
        self._delta_numbers = [
            -1 if layer.delta is None else next(numbers) for layer in weights.layers
        ]

    def compute(
        self, arrays: DeviceArrays, slots: torch.Tensor, attention: StepAttention
    ) -> Hidden:
        """Launches all layers. A graph captures this: it must not wait for the device, nor depend
        on what lies there.
        """
        weights, config = self._weights, self._weights.config
        num_tokens = len(arrays.token_ids)
        step = _Step(
            attention=attention,
            cos_sin=self._cos_sin(arrays),
            slot_mapping=slots,
            is_bad=torch.zeros(num_tokens, dtype=torch.int32, device=weights.device),
            states=StateTables(
                counts=arrays.counts,
                cu_seqlens_q=arrays.cu_seqlens_q,
                entries=arrays.state_entries,
                save_offsets=arrays.save_offsets,
                saves=arrays.saves,
            ),
        )
        residual = weights.embeddings[arrays.token_ids].float()
        if config.embedding_scale != 1.0:
            residual.mul_(config.embedding_scale)
        inputs = None
        if weights.per_layer_inputs is not None:
            inputs = make_inputs(
                weights.per_layer_inputs,
                arrays.token_ids,
                residual,
                self._operations,
                eps=config.norm_eps,
                dtype=weights.dtype,
            )
        update = update_norm = None
        scale = 1.0
        for index, layer in enumerate(weights.layers):
            normed = self._add_norm(residual, update, update_norm, layer.input_norm, scale)
            if layer.delta is not None:
                mixed = self._run_delta(index, layer.delta, normed, step)
            else:
                mixed = self._attend(index, layer, normed, step)
            update = self._update(layer.output(mixed))
            normed = self._add_norm(residual, update, layer.attention_output_norm, layer.mlp_norm)
            update, update_norm = self._mlp(layer, normed, residual), layer.mlp_output_norm
            if inputs is not None and layer.layer_input is not None:
                hidden = self._add_norm(residual, update, update_norm, None)
                own, activation = inputs[:, index], config.activation
                update = take_input(layer.layer_input, hidden, own, activation, self._operations)
                update_norm = layer.layer_input.norm
            scale = layer.scale
        assert update is not None, "a model has layers"
        rows = arrays.logits_indices
        last = self._add_norm(residual[rows], update[rows], update_norm, weights.final_norm, scale)
        return Hidden(last, step.is_bad, step.is_bad[rows])

    def _attend(
        self, index: int, layer: Layer, normed: torch.Tensor, step: "_Step"
    ) -> torch.Tensor:
        """Writes K/V of [T, H] and attends; all heads' outputs [T, heads * D]."""
        assert layer.qkv is not None
        config = self._weights.config
        num_tokens, num_heads = len(normed), config.num_heads
        source, head_dim = config.layers[index].kv_layer, config.layers[index].head_dim
        if source is None:
            source, num_kv_heads = index, config.layers[index].num_kv_heads
            keys, values = self._cache.blocks(source)
        else:
            num_kv_heads = 0
            keys = values = normed.new_empty(0, 1, 0, head_dim)
        rotated = self._operations.rotate_and_store(
            layer.qkv(normed).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim),
            step.cos_sin[layer.rotary],
            layer.head_norms,
            norms_projections=config.family.norms_projections,
            eps=config.norm_eps,
            keys=keys.flatten(0, 1),
            values=values.flatten(0, 1),
            slot_mapping=step.slot_mapping,
            is_bad=step.is_bad,
        )
        heads = rotated.transpose(0, 1).split([num_heads, num_kv_heads, num_kv_heads])
        # What a family does not have, its attention backend needs not know.
        others: dict[str, Any] = {}
        if config.attention_softcap:
            others["softcap"] = config.attention_softcap
        if layer.sinks is not None:
            others["sinks"] = layer.sinks
        attended = step.attention.attend(
            source,
            *heads,
            scaling=config.attention_scaling,
            sliding_window=layer.sliding_window,
            **others,
        ).reshape(num_tokens, num_heads * head_dim)
        if layer.gates is None:
            return attended
        gates = layer.gates(normed).float().sigmoid_()
        return gates.mul_(attended.float()).to(attended.dtype)

    def _run_delta(
        self, index: int, net: DeltaNet, normed: torch.Tensor, step: "_Step"
    ) -> torch.Tensor:
        """All heads' outputs [T, V * value_dim] of rows [T, H]."""
        shape = self._weights.config.delta
        assert shape is not None
        assert self._states is not None
        return run_delta(
            net,
            normed,
            shape,
            self._states.layer(self._delta_numbers[index]),
            step.states,
            step.is_bad,
            self._operations,
            eps=self._weights.config.norm_eps,
        )

    def _mlp(self, layer: Layer, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        mlp, config, operations = layer.mlp, self._weights.config, self._operations
        if not isinstance(mlp, Experts):
            return self._update(run_mlp(mlp, normed, config.activation, operations))
        if mlp.beside_mlp is not None:
            eps = config.norm_eps
            return mix_beside_mlp(mlp, normed, hidden, config.activation, operations, eps=eps)
        if mlp.shared is not None:
            return self._update(mix_with_shared(mlp, normed, config.activation, operations))
        return self._update(mix_experts(mlp, normed, config.activation))

    def _update(self, output: torch.Tensor) -> torch.Tensor:
        """What is added to the residual stream."""
        scale = self._weights.config.residual_scale
        return output if scale == 1.0 else output.mul_(scale)

    def _add_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        update_norm: torch.Tensor | None,
        weight: torch.Tensor | None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return self._operations.add_norm(
            residual,
            update,
            update_norm,
            weight,
            eps=self._weights.config.norm_eps,
            dtype=self._weights.dtype,
            scale=scale,
        )

    def _cos_sin(self, arrays: DeviceArrays) -> list[torch.Tensor]:
        """Cosines and sines [T, 2, P] float32 of each rotary embedding."""
        cos_sin = []
        for rotary, inv_freq in zip(
            self._weights.config.rotaries, self._weights.inv_freqs, strict=True
        ):
            if len(inv_freq) > 1:
                inv_freq = inv_freq[arrays.uses_long_rope]
            angles = arrays.positions.float()[:, None] * inv_freq
            both = torch.stack((angles.cos(), angles.sin()), dim=1)
            cos_sin.append(both.mul_(rotary.scaling))
        return cos_sin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What all layers of a step share; `Operations.rotate_and_store` explains the tensors."""

    attention: StepAttention
    cos_sin: list[torch.Tensor]  # of each rotary embedding
    slot_mapping: torch.Tensor
    is_bad: torch.Tensor
    states: StateTables
