"""Recurrent states of gated delta nets on the device.

A slot holds a sequence's states after its last certain token, and raw inputs: of the J - 1 tokens
up to that one, then of the drafts of the last step. A step first takes in those of them that were
accepted; so no state is ever taken back. `verifier.batch.slot_lengths` knows how far slots are.

Shape legend: J inputs that a convolution sees, C its channels, V value heads, B entries.
"""

from typing import NamedTuple

import torch

from verifier.batch.slot_lengths import SlotLengths
from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.model_config import ModelConfig


class LayerStates(NamedTuple):
    """Of one layer."""

    states: torch.Tensor  # [slots, V, key_dim, value_dim] float32, contiguous
    # [slots, J - 1 + drafts, C + 2 * V] of the model's dtype, contiguous: channels, then each value
    # head's two numbers.
    recent: torch.Tensor


class StateTables(NamedTuple):
    """What a step does with states: as `StateEntries`, int32 on the device; where its rows are."""

    counts: torch.Tensor  # [1 or more]: the entries that are no padding
    cu_seqlens_q: torch.Tensor  # [B + 1]
    entries: torch.Tensor  # [B, 4]
    save_offsets: torch.Tensor  # [B + 1]
    saves: torch.Tensor  # [at least S, 2]


class DeviceStates:
    """Memory of all slots. Owned by the engine thread.

    Of several decoders over the same states, the last one that ran may go on.

    Attributes:
        lengths: how far slots are.
    """

    def __init__(
        self,
        shape: DeltaShape,
        *,
        num_layers: int,
        num_slots: int,
        max_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args:
        num_layers: that are gated delta nets.
        dtype: of raw inputs.
        """
        self.lengths = SlotLengths(num_slots=num_slots, max_drafts=max_drafts)
        sizes = shape.num_value_heads, shape.key_dim, shape.value_dim
        self._states = torch.zeros((num_layers, num_slots, *sizes), device=device)
        recent = num_layers, num_slots, *_recent_size(shape, max_drafts)
        self._recent = torch.zeros(recent, dtype=dtype, device=device)

    def layer(self, number: int) -> LayerStates:
        """Args: number: of the layer, among those that are gated delta nets."""
        return LayerStates(self._states[number], self._recent[number])


def states_of(
    config: ModelConfig, *, num_slots: int, max_drafts: int, dtype: torch.dtype,
    device: torch.device,
) -> DeviceStates | None:  # fmt: skip
    """The states of a model; None: it has none."""
    if config.delta is None:
        return None
    return DeviceStates(
        config.delta,
        num_layers=sum(layer.is_delta for layer in config.layers),
        num_slots=num_slots,
        max_drafts=max_drafts,
        dtype=dtype,
        device=device,
    )


def slot_bytes(config: ModelConfig, max_drafts: int, dtype: torch.dtype) -> int:
    """Memory of one sequence's states; 0: the model has none."""
    if (shape := config.delta) is None:
        return 0
    num_layers = sum(layer.is_delta for layer in config.layers)
    num_rows, row = _recent_size(shape, max_drafts)
    states = 4 * shape.num_value_heads * shape.key_dim * shape.value_dim
    return num_layers * (states + num_rows * row * dtype.itemsize)


def _recent_size(shape: DeltaShape, max_drafts: int) -> tuple[int, int]:
    row = shape.num_channels + 2 * shape.num_value_heads
    return shape.kernel_size - 1 + max_drafts, row
