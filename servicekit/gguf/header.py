"""Reads the header of a GGUF file: its metadata, and where its tensors are.

Files are not trusted: every length, count, type and offset is checked before it is used, so time
and memory are bounded by the file's size.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_LARGEST_ALIGNMENT = 1 << 20
_LARGEST_NUMBER = 1 << 48
_MAX_DIMENSIONS = 4
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
            11: "<i8", 12: "<f8"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# Name → number in a file, items of a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}


class GgufError(ValueError):
    """A file is not what the format says, or holds what is not served; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor's place.

    Attributes:
        shape: the last number is of the values that lie side by side, as in torch.
        start: its first byte in the file; so `end`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a file says of itself.

    Attributes:
        metadata: by key; strings, numbers, lists of strings, or numpy arrays of numbers.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises: GgufError: it cannot be read, or is broken."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except GgufError:
        raise
    # ValueError: an empty file.
    except (OSError, ValueError) as error:
        raise GgufError(f"{path}: {error}") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4, "magic") != _MAGIC:
            raise GgufError(f"{self._path}: is no GGUF file")
        version = self._number("<u4", "version")
        if version not in _VERSIONS:
            raise GgufError(f"{self._path}: has version {version} of the format")
        num_tensors = self._count("tensors", 24)
        num_keys = self._count("metadata", 12)
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._string(f"key {index}")
            if key in metadata:
                raise GgufError(f"{self._path}: {key}: is there twice")
            metadata[key] = self._value(key)
        places = [self._tensor(index) for index in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT:
            raise GgufError(f"{self._path}: {_ALIGNMENT_KEY}: {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, dtype, shape, offset, size in places:
            if name in tensors:
                raise GgufError(f"{self._path}: {name}: is there twice")
            if offset % alignment or start + offset + size > len(self._data):
                raise GgufError(
                    f"{self._path}: {name}: {size} bytes at offset {offset}, of a file of "
                    f"{len(self._data)} bytes with alignment {alignment}"
                )
            tensors[name] = GgufTensor(
                name=name, dtype=dtype, shape=shape, start=start + offset,
                end=start + offset + size,
            )  # fmt: skip
        return GgufHeader(path=self._path, metadata=metadata, tensors=tensors)

    def _tensor(self, index: int) -> tuple[str, str, tuple[int, ...], int, int]:
        name = self._string(f"tensor {index}")
        num_dimensions = self._number("<u4", name)
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise GgufError(f"{self._path}: {name}: has {num_dimensions} dimensions")
        sizes = [self._number("<u8", name) for _ in range(num_dimensions)]
        number, offset = self._number("<u4", name), self._number("<u8", name)
        if not all(0 < size <= _LARGEST_NUMBER for size in sizes) or offset > _LARGEST_NUMBER:
            raise GgufError(f"{self._path}: {name}: has sizes {sizes} at offset {offset}")
        if number not in _TYPES:
            raise GgufError(f"{self._path}: {name}: is stored as type {number}, which is not read")
        dtype, per_block, block_bytes = _TYPES[number]
        if per_block > 1 and num_dimensions == 1:
            raise GgufError(f"{self._path}: {name}: a vector is stored as {dtype}")
        if sizes[0] % per_block:
            raise GgufError(f"{self._path}: {name}: rows of {sizes[0]} are no blocks of {dtype}")
        size = math.prod(sizes) // per_block * block_bytes
        return name, dtype, tuple(reversed(sizes)), offset, size

    def _value(self, key: str) -> Any:
        kind = self._number("<u4", key)
        if kind == _STRING:
            return self._string(key)
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], key)
        if kind != _ARRAY:
            raise GgufError(f"{self._path}: {key}: has a value of type {kind}")
        kind = self._number("<u4", key)
        if kind == _STRING:
            return self._strings(self._count(key, _LENGTH.size), key)
        if kind not in _NUMBERS:
            raise GgufError(f"{self._path}: {key}: is a list of type {kind}")
        item = np.dtype(_NUMBERS[kind])
        count = self._count(key, item.itemsize)
        return np.frombuffer(self._take(count * item.itemsize, key), dtype=item)

    def _count(self, what: str, least_bytes: int) -> int:
        """A number of items, each of at least so many bytes of the file."""
        count: int = self._number("<u8", what)
        if count > (len(self._data) - self._at) // least_bytes:
            raise GgufError(f"{self._path}: {what}: tells {count} items, more than the file has")
        return count

    def _number(self, kind: str, what: str) -> Any:
        item = np.dtype(kind)
        return np.frombuffer(self._take(item.itemsize, what), dtype=item)[0].item()

    def _string(self, what: str) -> str:
        return self._strings(1, what)[0]

    def _strings(self, count: int, what: str) -> list[str]:
        # Vocabularies have hundreds of thousands.
        data, at, end = self._data, self._at, len(self._data)
        found = []
        try:
            for _ in range(count):
                start = at + _LENGTH.size
                at = start + _LENGTH.unpack_from(data, at)[0]
                if at > end:
                    raise struct.error
                found.append(data[start:at].decode())
        except struct.error:
            raise GgufError(f"{self._path}: {what}: ends beyond the file's end") from None
        except UnicodeDecodeError as error:
            raise GgufError(f"{self._path}: {what}: is no UTF-8: {error}") from error
        self._at = at
        return found

    def _take(self, count: int, what: str) -> bytes:
        if count > len(self._data) - self._at:
            raise GgufError(f"{self._path}: {what}: ends beyond the file's end")
        content = self._data[self._at : self._at + count]
        self._at += count
        return content
