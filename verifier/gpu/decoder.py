"""A target model of a GPU: attention by a backend, all else by `Operations`.

A step is one copy of its layout to the device (`device_batch.py`), one replay of a graph
(`graph_pool.py`) or, if it is large or the backend reads no tables on the device, a launch of every
kernel; then the product with the head, for the rows that need logits only, and sampling
(`device_step.py`), which are queued while the device computes the layers. Without a sampler, logits
come to the host.

The residual stream is float32, so that nothing overflows in it in float16; all else is of the
model's dtype.

Shape legend: T tokens of the step, R rows that need logits, H hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from verifier.attention.backend import (
    AttendsToTables,
    AttentionBackend,
    DeviceTables,
    StepAttention,
    to_device,
)
from verifier.attention.kv_cache import KVCache, KVHeads, MixedKVShape
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.batch.target_model import StepHandle
from verifier.checkpoint.model_config import ModelConfig
from verifier.gpu.current_device import current_device
from verifier.gpu.device_batch import BatchLimits, DeviceArrays, DeviceBatch
from verifier.gpu.device_model import DeviceModel, ForwardOutput, as_floats
from verifier.gpu.graph_pool import ROW_TILE, Capture, GraphLimits, GraphPool, buckets_within
from verifier.gpu.layers.experts import mix_beside_mlp, mix_experts, run_mlp
from verifier.gpu.layers.layer_inputs import make_inputs, take_input
from verifier.gpu.weights import Experts, GpuWeights, Layer
from verifier.sampling.logits_processing import History
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence

if TYPE_CHECKING:
    # Imports Triton, which a CPU needs not have.
    from verifier.gpu.device_step import StepSampler


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """How a decoder's steps are captured."""

    capture: Capture
    limits: GraphLimits


class _Hidden(NamedTuple):
    """What the layers leave, of which a head makes logits."""

    rows: torch.Tensor  # [R, H], of the model's dtype, normalised
    is_bad: torch.Tensor  # [T] int32, as in `Operations.rotate_and_store`
    is_bad_row: torch.Tensor  # [R], of the rows' tokens


class GpuDecoder(DeviceModel):
    """The decoder of all families that `verifier.checkpoint` describes.

    Attributes:
        row_tile: as in `TargetModel`: what steps are padded to, mostly.
        sampler: of the next launches; None: logits come to the host, and are sampled there.
    """

    row_tile = ROW_TILE

    def __init__(
        self,
        weights: GpuWeights,
        *,
        backend: AttentionBackend,
        cache: WrittenCache,
        limits: BatchLimits,
        sampler: "StepSampler | None" = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Args:
        limits: of every step.
        sampler: as the attribute.
        graphs: None: every kernel is launched; so, too, where the backend is none that
            `AttendsToTables`.
        """
        super().__init__(vocab_size=weights.config.vocab_size, device=weights.device)
        self._weights = weights
        self._backend = backend
        self._cache = cache
        self._operations = weights.operations
        self.sampler = sampler
        # Layers are queued by `launch` wherever the device samples.
        self.computes_at_launch |= sampler is not None
        self._batch = DeviceBatch(limits, device=weights.device)
        self._graphs: GraphPool[_Hidden] | None = None
        if graphs is not None and isinstance(backend, AttendsToTables):
            buckets = buckets_within(graphs.limits.buckets, limits.max_num_tokens)
            graph_limits = dataclasses.replace(graphs.limits, buckets=buckets)
            self._graphs = GraphPool(
                self._compute_bucket, capture=graphs.capture, limits=graph_limits
            )
            # What every graph leaves its results in.
            largest = max(buckets, default=0)
            self._kept = _Hidden(
                rows=weights.embeddings.new_empty(largest, weights.config.hidden_size),
                is_bad=torch.zeros(largest, dtype=torch.int32, device=weights.device),
                is_bad_row=torch.zeros(largest, dtype=torch.int32, device=weights.device),
            )

    def warm_up(self) -> None:
        """Captures graphs, and computes a step of one sampled token, which overwrites the first
        block of K/V: so requests wait for no compiler.
        """
        if self._graphs is not None:
            with torch.inference_mode(), current_device(self._weights.device):
                self._graphs.prepare()
        if self.sampler is None:
            return
        scheduled = ScheduledTokens(
            token_ids=[0], draft_token_ids=[], num_computed_tokens=0, block_table=[0]
        )
        sequence = JudgedSequence(
            sampling=Sampling(temperature=1.0), history=History(), first_position=1
        )
        step = self.launch(
            lay_out([scheduled], block_size=self._cache.block_size),
            [sequence],
        )
        step.wait()
        step.result()

    def forget_tables(self) -> None:
        """Must come between two engines that run this model: each numbers its tables from 1 on."""
        self._batch.forget_tables()

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        if self.sampler is None:
            return super().launch(layout, sequences)
        with torch.inference_mode(), current_device(self._weights.device):
            hidden = self._hidden(layout)
            output = ForwardOutput(
                rows=hidden.rows,
                logits=self._logits(hidden.rows),
                is_bad=hidden.is_bad,
                is_bad_row=hidden.is_bad_row,
            )
        return self.sampler.begin(layout, sequences, output)

    def forward_on_device(self, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(), current_device(self._weights.device):
            rows, is_bad, _ = self._hidden(layout)
            self.hidden_states = None
            if layout.wants_hidden_states:
                scored = to_device(layout.scored_logits_indices, self._weights.device)
                self.hidden_states = as_floats(rows[scored])
            return self._logits(rows), is_bad == 0

    def _hidden(self, layout: BatchLayout) -> _Hidden:
        """What the layers leave of a step, without its padding; valid until the next one."""
        bucket = None if self._graphs is None else self._graphs.bucket_of(layout.num_tokens)
        if not self._batch.fits(layout, bucket):
            bucket = None
        arrays = self._batch.load(layout, num_padded_tokens=bucket)
        if bucket is not None:
            assert self._graphs is not None
            rows, is_bad, is_bad_row = self._graphs.run(bucket)
            num_tokens, num_rows = layout.num_tokens, layout.num_rows
            return _Hidden(rows[:num_rows], is_bad[:num_tokens], is_bad_row[:num_rows])
        slots = arrays.slot_mapping.long()
        if isinstance(self._backend, AttendsToTables):
            attention = self._attention(arrays, slots, longest_k=int(layout.seq_lens.max()))
        else:
            attention = self._backend.prepare(layout, self._cache)
        return self._compute(arrays, slots, attention)

    def _compute_bucket(self, num_tokens: int) -> _Hidden:
        """A step of so many tokens, whatever is loaded; leaves its results in `_kept`."""
        arrays = self._batch.padded_arrays(num_tokens)
        slots = arrays.slot_mapping.long()
        limits = self._batch.limits
        longest_k = limits.max_table_blocks * self._cache.block_size
        attention = self._attention(arrays, slots, longest_k=longest_k)
        computed = self._compute(arrays, slots, attention)
        kept = _Hidden(*(each[:num_tokens] for each in self._kept))
        for to, made in zip(kept, computed, strict=True):
            to.copy_(made)
        return kept

    def _attention(
        self, arrays: DeviceArrays, slots: torch.Tensor, *, longest_k: int
    ) -> StepAttention:
        assert isinstance(self._backend, AttendsToTables)
        tables = DeviceTables(
            counts=arrays.counts,
            cu_seqlens_q=arrays.cu_seqlens_q,
            seq_lens=arrays.seq_lens,
            table_rows=arrays.table_rows,
            block_tables=arrays.block_tables,
            slot_mapping=slots,
            longest_k=longest_k,
        )
        return self._backend.prepare_tables(tables, self._cache)

    def _compute(
        self, arrays: DeviceArrays, slots: torch.Tensor, attention: StepAttention
    ) -> _Hidden:
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
            update = self._attend(index, layer, normed, step)
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
        return _Hidden(last, step.is_bad, step.is_bad[rows])

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, V] of normalised rows [R, H]."""
        logits = self._operations.linear(rows, self._weights.head)
        if (scale := self._weights.config.logits_scale) != 1.0:
            logits = logits.mul_(scale)
        if softcap := self._weights.config.logits_softcap:
            logits = (torch.tanh(logits.float() / softcap) * softcap).to(logits.dtype)
        return logits

    def _attend(
        self, index: int, layer: Layer, normed: torch.Tensor, step: "_Step"
    ) -> torch.Tensor:
        """Writes K/V of [T, H] and attends; the attention's output [T, H]."""
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
        )
        return self._update(layer.output(attended.reshape(num_tokens, num_heads * head_dim)))

    def _mlp(self, layer: Layer, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        mlp, config, operations = layer.mlp, self._weights.config, self._operations
        if not isinstance(mlp, Experts):
            return self._update(run_mlp(mlp, normed, config.activation, operations))
        if mlp.beside_mlp is None:
            return self._update(mix_experts(mlp, normed, config.activation))
        return mix_beside_mlp(
            mlp, normed, hidden, config.activation, operations, eps=config.norm_eps
        )

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


def kv_shape_of(config: ModelConfig, dtype: torch.dtype) -> MixedKVShape:
    """The dimensions of a model's K/V."""
    heads = [
        KVHeads(layer.num_kv_heads, layer.head_dim) if layer.has_kv else KVHeads(0, 0)
        for layer in config.layers
    ]
    return MixedKVShape(heads=heads, dtype=dtype)
