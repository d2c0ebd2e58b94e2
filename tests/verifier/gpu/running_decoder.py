"""Decoders for GPUs, on any device, run chunk by chunk over block tables."""

import dataclasses
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from tests.verifier.chunks import Chunk, lay_out_chunks, rows_in_chunks
from tests.verifier.gpu.capped_attention import CappedBackend
from verifier.attention.backend import AttentionBackend
from verifier.attention.sdpa import SdpaBackend
from verifier.batch.batch_layout import BatchLayout
from verifier.checkpoint.description import describe_decoder
from verifier.gpu.decoder import GpuDecoder, Graphs, WrittenCache, kv_shape_of
from verifier.gpu.device_batch import BatchLimits
from verifier.gpu.layers.states import states_of
from verifier.gpu.loading.loader import load_weights
from verifier.gpu.operations import Operations
from verifier.gpu.weights import GpuWeights

CPU = torch.device("cpu")


def load(
    folder: Path,
    dtype: str = "auto",
    device: torch.device = CPU,
    operations: Operations | None = None,
    quantization: str = "none",
) -> GpuWeights:
    return load_weights(
        describe_decoder(folder),
        dtype=dtype,
        device=device,
        operations=operations,
        quantization=quantization,
    )


def backend_for(weights: GpuWeights) -> AttentionBackend:
    """One in plain torch that serves the model."""
    is_plain = not weights.config.attention_softcap and not weights.config.family.has_sinks
    return SdpaBackend(device=weights.device) if is_plain else CappedBackend()


class RunningGpuDecoder:
    """A decoder and its cache; `run` is one step."""

    def __init__(
        self,
        weights: GpuWeights,
        *,
        backend: AttentionBackend | None = None,
        block_size: int = 16,
        num_blocks: int = 64,
        operations: Operations | None = None,
        graphs: Graphs | None = None,
        max_num_tokens: int = 512,
        max_table_blocks: int = 64,
        num_state_slots: int = 1,
        max_drafts: int = 64,
    ) -> None:
        self.backend = backend = backend or backend_for(weights)
        self.cache = WrittenCache(
            kv_shape_of(weights.config, weights.dtype),
            num_blocks=num_blocks,
            block_size=block_size,
            device=weights.device,
        )
        if operations is not None:
            # `Linear` layers have their own.
            weights = dataclasses.replace(weights, operations=operations)
        self.decoder = GpuDecoder(
            weights,
            backend=backend,
            cache=self.cache,
            limits=BatchLimits(
                max_num_tokens=max_num_tokens,
                max_num_tables=64,
                max_table_blocks=max_table_blocks,
                num_state_slots=num_state_slots,
            ),
            states=states_of(
                weights.config,
                num_slots=num_state_slots,
                max_drafts=max_drafts,
                dtype=weights.dtype,
                device=weights.device,
            ),
            graphs=graphs,
        )

    def lay_out(self, *chunks: Chunk, is_expanded: bool = False) -> BatchLayout:
        """`is_expanded`: tokens that stand for drafts attend one by one."""
        return lay_out_chunks(chunks, block_size=self.cache.block_size, is_expanded=is_expanded)

    def run(self, *chunks: Chunk, is_expanded: bool = False) -> list[torch.Tensor]:
        """One step over all chunks; returns each one's logits [num_rows, vocab_size], float32."""
        logits = self.decoder.forward(self.lay_out(*chunks, is_expanded=is_expanded))
        return list(torch.from_numpy(logits.copy()).split([chunk.num_rows for chunk in chunks]))

    def run_in_chunks(
        self, token_ids: list[int], sizes: SequenceOf[int], block_table: list[int]
    ) -> torch.Tensor:
        """All logits of the text, computed from position 0 in chunks of these sizes in rotation."""
        return torch.cat(rows_in_chunks(self.run, token_ids, sizes, block_table))
