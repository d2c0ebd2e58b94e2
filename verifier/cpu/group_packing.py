"""Packs weights in groups into blocks as `kernels.group_records` reads them."""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.checkpoint.group_formats import FORMATS, GROUP, SUPER_GROUPS, Bytes, GroupedRows
from verifier.checkpoint.weight_types import LANES
from verifier.cpu.kernels.group_records import group_bytes, head_bytes, record_bytes

# Of eight codes, of which none has more than 6 bits.
_LOW_BITS = 0x0F0F0F0F0F0F0F0F


def num_records(name: str, depth: int) -> int:
    """Records of a block of weights of a type, of `depth` inputs."""
    return depth // FORMATS[name].depth


def pack_groups(name: str, parts: GroupedRows, blocks: Bytes) -> None:
    """Packs rows of a type, a key of `FORMATS`.

    Args:
        blocks: [ceil(n / 16), records, bytes of a record], zero.
    """
    form = FORMATS[name]
    num_rows = len(parts.codes)
    heads = blocks[..., : head_bytes(form)]
    factors = [parts.factors] + ([] if parts.minima is None else [parts.minima])
    start = 0
    for factor in factors:
        end = start + factor.itemsize * LANES
        _put(heads[..., start:end], factor.view(f"u{factor.itemsize}")[..., None])
        start = end
    if form.is_float:
        _put(blocks[..., start:], parts.codes.reshape(num_rows, -1, GROUP))
        return
    if parts.zeros is not None:
        _put(heads[..., start:], parts.zeros[..., None])
    if parts.scales is not None:
        scales = parts.scales.reshape(num_rows, -1, SUPER_GROUPS, form.halves)
        if parts.minimum_scales is not None:
            minima = parts.minimum_scales.reshape(num_rows, -1, SUPER_GROUPS, 1)
            scales = np.concatenate((scales, minima), axis=-1)
        _put(heads[..., start:], scales.reshape(num_rows, scales.shape[1], -1))
    _pack_codes(
        parts.codes, blocks, head_bytes(form), group_bytes(form), form.depth // GROUP, form.bits
    )
    assert blocks.shape[-1] == record_bytes(form)


def _put(place: Bytes, values: npt.NDArray[np.integer]) -> None:
    """Values [n, records, numbers] of a record's outputs, to [n / 16, records, numbers, 16]."""
    num_rows, num_records_, num_values = values.shape
    padded = np.zeros((len(place) * LANES, num_records_, num_values), dtype=values.dtype)
    padded[:num_rows] = values
    lanes_last = padded.reshape(len(place), LANES, num_records_, num_values).transpose(0, 2, 3, 1)
    place[...] = (
        np.ascontiguousarray(lanes_last).reshape(len(place), num_records_, -1).view(np.uint8)
    )


@kernel
def _pack_codes(
    codes: Bytes, blocks: Bytes, head: int, per_group: int, groups_per_record: int, bits: int
) -> None:
    num_rows, depth = codes.shape
    # Of the processor's byte order, which is that of the blocks.
    eights, pairs = codes.view(np.int64), codes.view(np.uint16)
    fours, shorts = blocks.view(np.uint32), blocks.view(np.uint16)
    for row in range(num_rows):
        block, lane = row // 16, row % 16
        for group in range(depth // 32):
            record = group // groups_per_record
            start = head + group % groups_per_record * per_group
            if bits == 8:
                for step in range(16):
                    shorts[block, record, start // 2 + 16 * step + lane] = pairs[
                        row, 16 * group + step
                    ]
                continue
            # Four codes share an int16 of a vector of 32.
            high = 0
            for vector in range(4):
                eight = eights[row, 4 * group + vector]
                low = eight & _LOW_BITS
                twos = low | low >> 12
                fours[block, record, start // 4 + 16 * vector + lane] = (
                    twos & 0xFF | twos >> 24 & 0xFF00 | twos << 8 & 0xFF0000
                    | twos >> 16 & 0xFF000000
                )  # fmt: skip
                if bits > 4:
                    extra = eight >> 4 & _LOW_BITS
                    for i in range(8):
                        step = 4 * vector + i // 2
                        bit = (bits - 4) * step
                        moved = (extra >> (8 * i) & 3) << (
                            32 * (bit // 16) + 16 * (i % 2) + bit % 16
                        )
                        high |= moved
            if bits > 4:
                place = start // 4 + 64 + lane
                fours[block, record, place] = high & 0xFFFFFFFF
                if bits == 6:
                    fours[block, record, place + 16] = high >> 32
