"""A target model of a GPU: attention by a backend, all else by `Operations`.

The residual stream is float32, so that nothing overflows in it in float16; all else is of the
model's dtype.

Shape legend: T tokens of the step, R rows that need logits, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verifier.attention.backend import AttentionBackend, StepAttention, to_device
from verifier.attention.kv_cache import KVCache, KVShape
from verifier.batch.batch_layout import BatchLayout
from verifier.cpu.loading.model_config import ModelConfig
from verifier.gpu.current_device import current_device
from verifier.gpu.device_model import DeviceModel, as_floats
from verifier.gpu.experts import mix_experts
from verifier.gpu.operations import Operations
from verifier.gpu.weights import Experts, GpuWeights, Layer


class WrittenCache(KVCache):
    """A cache that the decoder has written when attention begins."""

    is_written_by_attention = False

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Does nothing."""

    def finite_rows(self) -> torch.Tensor:
        """Not known here.

        Raises:
            NotImplementedError: always; the decoder knows it.
        """
        raise NotImplementedError


class GpuDecoder(DeviceModel):
    """The decoder of all families that `verifier.cpu.loading` describes."""

    def __init__(
        self,
        weights: GpuWeights,
        *,
        backend: AttentionBackend,
        cache: WrittenCache,
        operations: Operations | None = None,
    ) -> None:
        """`operations`: None: the weights'. `Linear` layers have their own in any case."""
        super().__init__(vocab_size=weights.config.vocab_size, device=weights.device)
        self._weights = weights
        self._backend = backend
        self._cache = cache
        self._operations = operations or weights.operations
        # Attention of a family without a softcap never gets the argument.
        softcap = weights.config.attention_softcap
        self._attention_arguments: dict[str, Any] = {"softcap": softcap} if softcap else {}

    def forward_on_device(self, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(), current_device(self._weights.device):
            return self._forward(layout)

    def _forward(self, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        weights, config = self._weights, self._weights.config
        # Backends that note sums of rows note them for this step only.
        self._cache.begin_step()
        # In one copy to the device.
        arrays = (
            layout.input_token_ids,
            layout.positions,
            layout.slot_mapping,
            layout.logits_indices,
        )
        indices = to_device(np.concatenate(arrays), weights.device)
        token_ids, positions, slot_mapping, rows = indices.split([len(a) for a in arrays])
        step = _Step(
            attention=self._backend.prepare(layout, self._cache),
            turns=self._turns(positions),
            slot_mapping=slot_mapping,
            is_bad=torch.zeros(len(token_ids), dtype=torch.int32, device=weights.device),
        )
        residual = weights.embeddings[token_ids].float()
        if config.embedding_scale != 1.0:
            residual.mul_(config.embedding_scale)
        update = update_norm = None
        for index, layer in enumerate(weights.layers):
            normed = self._add_norm(residual, update, update_norm, layer.input_norm)
            update = self._attend(index, layer, normed, step)
            normed = self._add_norm(residual, update, layer.attention_output_norm, layer.mlp_norm)
            update, update_norm = self._mlp(layer, normed), layer.mlp_output_norm
        assert update is not None, "a model has layers"
        last = self._add_norm(residual[rows], update[rows], update_norm, weights.final_norm)
        self.hidden_states = None
        if len(layout.hidden_state_indices):
            scored = to_device(layout.scored_logits_indices, weights.device)
            self.hidden_states = as_floats(last[scored])
        logits = self._operations.linear(last, weights.head)
        if config.logits_softcap:
            capped = torch.tanh(logits.float() / config.logits_softcap) * config.logits_softcap
            logits = capped.to(logits.dtype)
        return logits, step.is_bad == 0

    def _attend(
        self, index: int, layer: Layer, normed: torch.Tensor, step: "_Step"
    ) -> torch.Tensor:
        """Writes K/V of [T, H] and attends; the attention's output [T, H]."""
        config = self._weights.config
        num_tokens, num_heads, num_kv_heads = len(normed), config.num_heads, config.num_kv_heads
        keys, values = self._cache.blocks(index)
        rotated = self._operations.rotate_and_store(
            layer.qkv(normed).view(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim),
            step.turns[layer.rotary],
            layer.head_norms,
            eps=config.norm_eps,
            keys=keys.flatten(0, 1),
            values=values.flatten(0, 1),
            slot_mapping=step.slot_mapping,
            is_bad=step.is_bad,
        )
        heads = rotated.transpose(0, 1).split([num_heads, num_kv_heads, num_kv_heads])
        attended = step.attention.attend(
            index,
            *heads,
            scaling=config.attention_scaling,
            sliding_window=layer.sliding_window,
            **self._attention_arguments,
        )
        return layer.output(attended.reshape(num_tokens, num_heads * config.head_dim))

    def _mlp(self, layer: Layer, normed: torch.Tensor) -> torch.Tensor:
        mlp, activation = layer.mlp, self._weights.config.activation
        if isinstance(mlp, Experts):
            return mix_experts(mlp, normed, self._operations, activation)
        return mlp.down(self._operations.gate(mlp.gate_up(normed), activation))

    def _add_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        update_norm: torch.Tensor | None,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        return self._operations.add_norm(
            residual,
            update,
            update_norm,
            weight,
            eps=self._weights.config.norm_eps,
            dtype=self._weights.dtype,
        )

    def _turns(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """Cosines and sines [T, 2, P] float32 of each rotary embedding."""
        turns = []
        for rotary, inv_freq in zip(
            self._weights.config.rotaries, self._weights.inv_freqs, strict=True
        ):
            angles = positions.float()[:, None] * inv_freq
            both = torch.stack((angles.cos(), angles.sin()), dim=1)
            turns.append(both.mul_(rotary.scaling))
        return turns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What all layers of a step share; `Operations.rotate_and_store` explains the tensors."""

    attention: StepAttention
    turns: list[torch.Tensor]  # of each rotary embedding
    slot_mapping: torch.Tensor
    is_bad: torch.Tensor


def kv_shape_of(config: ModelConfig, dtype: torch.dtype) -> KVShape:
    """The dimensions of a model's K/V."""
    return KVShape(
        num_layers=len(config.layers),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
