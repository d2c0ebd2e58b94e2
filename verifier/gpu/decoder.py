"""A target model of a GPU: attention by a backend, all else by `Operations`.

A step is one copy of its layout to the device (`device_batch.py`), one replay of a graph
(`graph_pool.py`) or, if it is large or the backend reads no tables on the device, a launch of every
kernel; then the product with the head, for the rows that need logits only, and sampling
(`device_step.py`), which are queued while the device computes the layers. Without a sampler, logits
come to the host.

Shape legend: T tokens of the step, R rows that need logits, H hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from verifier.gpu.forward import ForwardPass, Hidden
from verifier.gpu.graph_pool import Capture, GraphLimits, GraphPool, buckets_within
from verifier.gpu.layers.states import DeviceStates
from verifier.gpu.weights import GpuWeights
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


class GpuDecoder(DeviceModel):
    """The decoder of all families that `verifier.checkpoint` describes.

    Attributes:
        sampler: of the next launches; None: logits come to the host, and are sampled there.
    """

    def __init__(
        self,
        weights: GpuWeights,
        *,
        backend: AttentionBackend,
        cache: WrittenCache,
        limits: BatchLimits,
        states: DeviceStates | None = None,
        sampler: "StepSampler | None" = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Args:
        limits: of every step.
        states: of a model that has recurrent ones; a layout that does not tell slots has one
            sequence, whose slot is 0.
        sampler: as the attribute.
        graphs: None: every kernel is launched; so, too, where the backend is none that
            `AttendsToTables`.
        """
        super().__init__(vocab_size=weights.config.vocab_size, device=weights.device)
        self._weights = weights
        self._backend = backend
        self._cache = cache
        self._states = states
        self._forward = ForwardPass(weights, cache, states)
        self._operations = weights.operations
        self.sampler = sampler
        # Layers are queued by `launch` wherever the device samples.
        self.computes_at_launch |= sampler is not None
        self._batch = DeviceBatch(limits, device=weights.device)
        self._graphs: GraphPool[Hidden] | None = None
        if graphs is not None and isinstance(backend, AttendsToTables):
            buckets = buckets_within(graphs.limits.buckets, limits.max_num_tokens)
            graph_limits = dataclasses.replace(graphs.limits, buckets=buckets)
            self._graphs = GraphPool(
                self._compute_bucket, capture=graphs.capture, limits=graph_limits
            )
            # What every graph leaves its results in.
            largest = max(buckets, default=0)
            self._kept = Hidden(
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

    def assume_states(self, layout: BatchLayout) -> None:
        """Before a step that is only measured: its sequences may begin anywhere."""
        if self._states is not None:
            self._states.lengths.assume(layout)

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

    def _hidden(self, layout: BatchLayout) -> Hidden:
        """What the layers leave of a step, without its padding; valid until the next one."""
        bucket = None if self._graphs is None else self._graphs.bucket_of(layout.num_tokens)
        if not self._batch.fits(layout, bucket):
            bucket = None
        entries = None if self._states is None else self._states.lengths.begin(layout)
        arrays = self._batch.load(layout, num_padded_tokens=bucket, states=entries)
        if self._states is not None:
            # Later steps' kernels run after this one's.
            self._states.lengths.end(layout)
        if bucket is not None:
            assert self._graphs is not None
            rows, is_bad, is_bad_row = self._graphs.run(bucket)
            num_tokens, num_rows = layout.num_tokens, layout.num_rows
            return Hidden(rows[:num_rows], is_bad[:num_tokens], is_bad_row[:num_rows])
        slots = arrays.slot_mapping.long()
        if isinstance(self._backend, AttendsToTables):
            attention = self._attention(arrays, slots, longest_k=int(layout.seq_lens.max()))
        else:
            attention = self._backend.prepare(layout, self._cache)
        return self._forward.compute(arrays, slots, attention)

    def _compute_bucket(self, num_tokens: int) -> Hidden:
        """A step of so many tokens, whatever is loaded; leaves its results in `_kept`."""
        arrays = self._batch.padded_arrays(num_tokens)
        slots = arrays.slot_mapping.long()
        limits = self._batch.limits
        longest_k = limits.max_table_blocks * self._cache.block_size
        attention = self._attention(arrays, slots, longest_k=longest_k)
        computed = self._forward.compute(arrays, slots, attention)
        kept = Hidden(*(each[:num_tokens] for each in self._kept))
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

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, V] of normalised rows [R, H]."""
        logits = self._operations.linear(rows, self._weights.head)
        if (scale := self._weights.config.logits_scale) != 1.0:
            logits = logits.mul_(scale)
        if softcap := self._weights.config.logits_softcap:
            logits = (torch.tanh(logits.float() / softcap) * softcap).to(logits.dtype)
        return logits


def kv_shape_of(config: ModelConfig, dtype: torch.dtype) -> MixedKVShape:
    """The dimensions of a model's K/V."""
    heads = [
        KVHeads(layer.num_kv_heads, layer.head_dim) if layer.has_kv else KVHeads(0, 0)
        for layer in config.layers
    ]
    return MixedKVShape(heads=heads, dtype=dtype)
