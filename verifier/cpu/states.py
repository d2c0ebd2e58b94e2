"""Recurrent states of a decoder with gated delta nets: their memory, and where kernels find them.

What a slot holds, `verifier.batch.slot_lengths` and `kernels.delta` tell.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.batch.batch_layout import BatchLayout, IntArray
from verifier.batch.slot_lengths import SlotLengths
from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.weight_types import FloatArray
from verifier.cpu.kernels.delta import MIN_TILE_ROWS, padded, raw_size, scratch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Of one slot, in floats of one layer."""

    states: int
    recent: int

    @staticmethod
    def of(shape: DeltaShape, max_drafts: int) -> "StateSizes":
        heads = shape.num_value_heads // shape.num_key_heads
        raw = raw_size(shape.key_dim, shape.value_dim, heads)
        return StateSizes(
            states=shape.num_value_heads * shape.key_dim * shape.value_dim,
            recent=shape.num_key_heads * (shape.kernel_size - 1 + max_drafts) * raw,
        )


def slot_bytes(shape: DeltaShape, num_layers: int, max_drafts: int) -> int:
    """Memory of one sequence's states over so many layers."""
    sizes = StateSizes.of(shape, max_drafts)
    return 4 * num_layers * (sizes.states + sizes.recent)


class States:
    """Owned by the decoder."""

    def __init__(
        self, shape: DeltaShape, *, num_layers: int, num_slots: int, max_drafts: int
    ) -> None:
        sizes = StateSizes.of(shape, max_drafts)
        self.shape = shape
        self.lengths = SlotLengths(num_slots=num_slots, max_drafts=max_drafts)
        # By slot first: memory that nothing was written to takes no room.
        self.states: FloatArray = np.zeros((num_slots, num_layers, sizes.states), np.float32)
        self.recent: FloatArray = np.zeros((num_slots, num_layers, sizes.recent), np.float32)

    def describe(self, model: Any) -> int:
        """Writes sizes to the record of a model. Returns the bytes that a thread needs."""
        shape = self.shape
        heads = shape.num_value_heads // shape.num_key_heads
        raw = raw_size(shape.key_dim, shape.value_dim, heads)
        tile_rows = max(MIN_TILE_ROWS, self.lengths.max_drafts)
        for name, value in {
            "num_key_heads": shape.num_key_heads,
            "heads_per_key": heads,
            "key_dim": shape.key_dim,
            "value_dim": shape.value_dim,
            "kernel_size": shape.kernel_size,
            "tap_bytes": 4 * shape.num_channels,
            "raw_size": raw,
            "tile_rows": tile_rows,
            "max_drafts": self.lengths.max_drafts,
            "state_slot_bytes": self.states.strides[0],
            "recent_slot_bytes": self.recent.strides[0],
        }.items():
            model[name] = value
        return scratch_bytes(raw, shape.kernel_size, shape.key_dim, tile_rows)

    def begin(self, layout: BatchLayout, step: Any) -> list[IntArray]:
        """Writes a layout's states to the record of a step; returns arrays to keep alive.

        Raises:
            ValueError: as `SlotLengths.begin`.
        """
        made = self.lengths.begin(layout)
        # Of an empty one, there is no address.
        saves = made.saves if len(made.saves) else np.zeros((1, 2), dtype=np.int64)
        arrays = [made.entries, made.save_offsets, saves]
        for name, array in zip(("states", "save_offsets", "saves"), arrays, strict=True):
            step[name] = array.ctypes.data
        return arrays


def places(shape: DeltaShape) -> npt.NDArray[np.int64]:
    """[V, 7], a table as `kernels.delta` reads it, from the names and the order of inputs."""
    groups, key_dim, value_dim = shape.num_key_heads, shape.key_dim, shape.value_dim
    heads = shape.num_value_heads // groups
    starts: dict[str, int] = {}
    end = 0
    for name, size in zip(shape.inputs, shape.input_sizes, strict=True):
        starts[name] = end
        end += padded(size)
    result = []
    for group, place in itertools.product(range(groups), range(heads)):
        head = shape.value_head(group, place)
        if "in_proj_qkvz" in starts:
            # Key head by key head: its query, key, values and gates.
            query = starts["in_proj_qkvz"] + group * 2 * (key_dim + heads * value_dim)
            key = query + key_dim
            value = key + key_dim + place * value_dim
            gate = value + heads * value_dim
        else:
            query = starts["in_proj_qkv"] + group * key_dim
            key = query + groups * key_dim
            value = starts["in_proj_qkv"] + 2 * groups * key_dim + head * value_dim
            gate = starts["in_proj_z"] + head * value_dim
        if "in_proj_ba" in starts:
            step = starts["in_proj_ba"] + group * 2 * heads + place
            decay = step + heads
        else:
            step, decay = starts["in_proj_b"] + head, starts["in_proj_a"] + head
        result.append([*(4 * offset for offset in (query, key, value, gate, step, decay)), head])
    return np.array(result, dtype=np.int64)


def padded_heads(values: FloatArray, shape: DeltaShape) -> FloatArray:
    """Numbers of value heads [V] as kernels read them, key head by key head."""
    heads = shape.num_value_heads // shape.num_key_heads
    result = np.zeros((shape.num_key_heads, padded(heads)), dtype=np.float32)
    for group, place in itertools.product(range(shape.num_key_heads), range(heads)):
        result[group, place] = values[shape.value_head(group, place)]
    return result
