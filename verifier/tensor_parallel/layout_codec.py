"""A step's layout as one flat int32 array, and back. Pure.

The array holds, for every field in the order of the dataclass, its length and its values. The
values of a list of lists are the number of lists, their lengths, and then all their values. New
fields of `BatchLayout` of these two kinds need no change here.

Worked example: `seq_lens = [4, 9]` is `2 4 9`; `block_tables = [[7], [3, 5]]` is `6 2 1 2 7 3 5`.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.batch.batch_layout import BatchLayout, IntArray

# Tokens, positions and slots are far below 2^31: a cache of that many slots would take terabytes.
WireArray = npt.NDArray[np.int32]

_FIELDS = dataclasses.fields(BatchLayout)


def encode(layout: BatchLayout) -> WireArray:
    """The layout as one array."""
    parts: list[Any] = []
    for field in _FIELDS:
        value = getattr(layout, field.name)
        if _holds_lists(field):
            flat = [len(value), *map(len, value)]
            for items in value:
                flat += items
            value = flat
        elif not isinstance(value, np.ndarray):
            raise TypeError(f"BatchLayout.{field.name} has no form in a message: {field.type}")
        parts += ((len(value),), value)
    return np.concatenate(parts, dtype=np.int32, casting="unsafe")


def decode(encoded: WireArray) -> BatchLayout:
    """The layout that `encode` was given.

    Raises:
        ValueError: the array is not a whole layout.
    """
    wide = encoded.astype(np.int64)
    values: dict[str, Any] = {}
    start = 0
    for field in _FIELDS:
        length = int(wide[start]) if start < len(wide) else -1
        value = wide[start + 1 : start + 1 + length]
        if len(value) != length:
            raise ValueError(f"the message ends before {field.name} does")
        values[field.name] = _lists(value) if _holds_lists(field) else value
        start += 1 + length
    if start != len(wide):
        raise ValueError("the message holds more than a layout")
    return BatchLayout(**values)


def _holds_lists(field: "dataclasses.Field[Any]") -> bool:
    return field.type == list[list[int]]


def _lists(flat: IntArray) -> list[list[int]]:
    count, *rest = flat.tolist()
    lists, start = [], count
    for length in rest[:count]:
        lists.append(rest[start : start + length])
        start += length
    return lists
