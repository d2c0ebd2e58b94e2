"""Recurrent states of a decoder with gated delta nets: their memory, and how far each slot is.

A slot holds the states of one sequence after its last certain token, and the raw inputs of the
tokens around it (`kernels.delta`); or states that were kept for others to begin with.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.batch.batch_layout import BatchLayout, StateUse
from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.weight_types import FloatArray
from verifier.cpu.kernels.delta import MIN_TILE_ROWS, padded, raw_size, scratch_bytes

DEFAULT_MAX_DRAFTS = 31
_SAME = StateUse(slot=0)


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
    """Owned by the decoder.

    Invariant: slot i holds states after `_lengths[i]` tokens, then `_num_drafts[i]` drafts' raw
    inputs; a length of -1: nothing that is known.
    """

    def __init__(
        self, shape: DeltaShape, *, num_layers: int, num_slots: int, max_drafts: int
    ) -> None:
        sizes = StateSizes.of(shape, max_drafts)
        self.shape = shape
        self.max_drafts = max_drafts
        self.num_slots = num_slots
        # By slot first: memory that nothing was written to takes no room.
        self.states: FloatArray = np.zeros((num_slots, num_layers, sizes.states), np.float32)
        self.recent: FloatArray = np.zeros((num_slots, num_layers, sizes.recent), np.float32)
        self._lengths = [-1] * num_slots
        self._num_drafts = [0] * num_slots

    def describe(self, model: Any) -> int:
        """Writes sizes to the record of a model. Returns the bytes that a thread needs."""
        shape = self.shape
        heads = shape.num_value_heads // shape.num_key_heads
        raw = raw_size(shape.key_dim, shape.value_dim, heads)
        tile_rows = max(MIN_TILE_ROWS, self.max_drafts)
        for name, value in {
            "num_key_heads": shape.num_key_heads,
            "heads_per_key": heads,
            "key_dim": shape.key_dim,
            "value_dim": shape.value_dim,
            "kernel_size": shape.kernel_size,
            "tap_bytes": 4 * shape.num_channels,
            "raw_size": raw,
            "tile_rows": tile_rows,
            "max_drafts": self.max_drafts,
            "state_slot_bytes": self.states.strides[0],
            "recent_slot_bytes": self.recent.strides[0],
        }.items():
            model[name] = value
        return scratch_bytes(raw, shape.kernel_size, shape.key_dim, tile_rows)

    def begin(self, layout: BatchLayout, step: Any) -> list[npt.NDArray[np.int64]]:
        """Writes a layout's states to the record of a step; returns arrays to keep alive.

        Raises:
            ValueError: the layout contradicts itself, or what is known of a slot.
        """
        uses = layout.states or [_SAME] * len(layout.seq_lens)
        starts = layout.positions[layout.cu_seqlens_q[:-1]].tolist()
        num_drafts = layout.num_draft_tokens.tolist()
        entries, saves, offsets = [], [], [0]
        written: set[int] = set()
        for use, start, drafts, end in zip(
            uses, starts, num_drafts, layout.seq_lens.tolist(), strict=True
        ):
            if use is None:
                raise ValueError("the layout has a sequence without a place for its states")
            num_accepted = self._num_accepted(use, start)
            if drafts > self.max_drafts:
                raise ValueError(f"the layout has {drafts} drafts, over {self.max_drafts}")
            source = -1 if start == 0 else use.slot if use.source < 0 else use.source
            entries.append((use.slot, source, num_accepted, drafts))
            slots = [use.slot, *(slot for _, slot in use.saves)]
            if not written.isdisjoint(slots) or len(set(slots)) < len(slots):
                raise ValueError("the layout writes states twice to one slot")
            written.update(slots)
            first = start - num_accepted
            ends = [length for length, _ in use.saves]
            if ends != sorted(set(ends)) or any(
                not first < length <= end - drafts or not 0 <= slot < self.num_slots
                for length, slot in use.saves
            ):
                raise ValueError("the layout saves states of no certain token, or to no slot")
            saves += [(length - first, slot) for length, slot in use.saves]
            offsets.append(len(saves))
        if any(use.source in written for use in uses if use and use.source != use.slot):
            raise ValueError("the layout overwrites states that it begins with")
        arrays = [
            np.array(values, dtype=np.int64) for values in (entries, offsets, saves or [(0, 0)])
        ]
        for name, array in zip(("states", "save_offsets", "saves"), arrays, strict=True):
            step[name] = array.ctypes.data
        return arrays

    def end(self, layout: BatchLayout) -> None:
        """After the pass of a layout: notes how far its slots are."""
        uses = layout.states or [_SAME] * len(layout.seq_lens)
        for use, end, drafts in zip(
            uses, layout.seq_lens.tolist(), layout.num_draft_tokens.tolist(), strict=True
        ):
            assert use is not None
            self._lengths[use.slot], self._num_drafts[use.slot] = end - drafts, drafts
            for length, slot in use.saves:
                self._lengths[slot], self._num_drafts[slot] = length, 0

    def _num_accepted(self, use: StateUse, start: int) -> int:
        """How many drafts of the last step a sequence that goes on at a position has accepted."""
        own = use.source in (-1, use.slot)
        slot = use.slot if own else use.source
        if not (0 <= slot < self.num_slots and 0 <= use.slot < self.num_slots):
            raise ValueError("the layout has a slot for states that there is not")
        if start == 0:
            return 0
        ahead = start - self._lengths[slot]
        if self._lengths[slot] < 0 or not 0 <= ahead <= (self._num_drafts[slot] if own else 0):
            raise ValueError(
                f"the layout goes on at token {start}, and slot {slot} has states after "
                f"{self._lengths[slot]} tokens and {self._num_drafts[slot]} drafts"
            )
        return ahead


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
