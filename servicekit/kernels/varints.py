"""Numbers in protobuf messages: base-128 varints.

https://protobuf.dev/programming-guides/encoding/#varints
"""

import numpy as np

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_u8, signed

MAX_VARINT_BYTES = 5
"""Of a number under 2^32, as protobuf writes it."""
_MAX_VARINT64_BYTES = 10


@kernel
def read_varint(data: int, at: int, end: int) -> tuple[int, int]:
    """Returns (a number under 2^32, where it ends); (0, -1): it is irregular."""
    if at < end:
        byte = signed(load_u8(data + at))
        if byte < 0x80:
            return byte, at + 1
    value = 0
    for i in range(min(MAX_VARINT_BYTES, end - at)):
        byte = signed(load_u8(data + at + i))
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value >> 32:
                break
            return value, at + i + 1
    return 0, -1


@kernel
def read_varint64(data: int, at: int, end: int) -> tuple[int, int]:
    """Returns (the bits of a number under 2^64, where it ends); (0, -1): it is irregular."""
    value = np.uint64(0)
    for i in range(min(_MAX_VARINT64_BYTES, end - at)):
        byte = np.uint64(load_u8(data + at + i))
        if i == _MAX_VARINT64_BYTES - 1 and byte > 1:
            break
        value |= (byte & np.uint64(0x7F)) << np.uint64(7 * i)
        if byte < 0x80:
            return signed(value), at + i + 1
    return 0, -1
