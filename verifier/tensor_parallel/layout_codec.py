"""A step's layout as one flat int32 array, and back. Pure.

The array holds, for every field in the order of the dataclass, its length and its values. The
values of `block_tables` are the number of tables, their lengths, and then all their blocks. A
boolean is one value, 0 or 1. New arrays in `BatchLayout` need no change here.

Worked example: `seq_lens = [4, 9]` is `2 4 9`; `block_tables = [[7], [3, 5]]` is `6 2 1 2 7 3 5`.
"""

import dataclasses
import itertools
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.batch.batch_layout import BatchLayout, BlockTable

# Tokens, positions and slots are far below 2^31: a cache of that many slots would take terabytes.
WireArray = npt.NDArray[np.int32]

# Models of several ranks have no recurrent states.
_FIELDS = [field for field in dataclasses.fields(BatchLayout) if field.name != "states"]
_TABLES = "block_tables"


def encode(layout: BatchLayout) -> WireArray:
    """The layout as one array."""
    parts: list[Any] = []
    for field in _FIELDS:
        value = getattr(layout, field.name)
        if field.name == _TABLES:
            lengths = [len(table) for table in value]
            parts += ((1 + len(value) + sum(lengths), len(value)), lengths, *value)
        elif isinstance(value, bool):
            parts.append((1, value))
        elif isinstance(value, np.ndarray):
            parts += ((len(value),), value)
        else:
            raise TypeError(f"BatchLayout.{field.name} has no form in a message: {field.type}")
    return np.concatenate(parts, dtype=np.int32, casting="unsafe")


def decode(encoded: WireArray) -> BatchLayout:
    """The layout that `encode` was given.

    Raises:
        ValueError: the array is not a whole layout.
    """
    values: dict[str, Any] = {}
    start = 0
    for field in _FIELDS:
        length = int(encoded[start]) if start < len(encoded) else -1
        value = encoded[start + 1 : start + 1 + length]
        if len(value) != length:
            raise ValueError(f"the message ends before {field.name} does")
        if field.name == _TABLES:
            values[field.name] = _tables(value)
        elif field.type is bool:
            values[field.name] = bool(value[0])
        else:
            values[field.name] = value.astype(np.int64)
        start += 1 + length
    if start != len(encoded):
        raise ValueError("the message holds more than a layout")
    return BatchLayout(**values)


def _tables(flat: WireArray) -> list[BlockTable]:
    count = int(flat[0])
    # The first table begins behind the lengths; each ends where the next one begins.
    borders = 1 + np.cumsum(flat[: count + 1], dtype=np.int64)
    return [
        array("i", flat[start:end].tobytes()) for start, end in itertools.pairwise(borders.tolist())
    ]
