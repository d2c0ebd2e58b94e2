"""What a layout must keep to, so that kernels read and write nothing outside their buffers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.cpu.weights import BitsArray

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a decoder.

    Attributes:
        num_slots: of the cache; also the most tokens of a sequence.
        num_cache_blocks: as kernels see them.
    """

    max_num_tokens: int
    vocab_size: int
    num_slots: int
    num_cache_blocks: int


# By the number that `_fault` returns.
_FAULTS = (
    "",
    "more tokens or rows than a forward pass has room for, or none",
    "arrays of different lengths",
    "a token id outside the vocabulary",
    "a position outside the cache",
    "a slot outside the cache",
    "a logits row that is no token's",
    "query offsets that do not rise from 0 up to the number of tokens",
    "a sequence that is longer than the cache, or shorter than its queries",
    "a block outside the cache",
)


def check_layout(
    limits: Limits,
    *,
    token_ids: IntArray,
    positions: IntArray,
    slots: IntArray,
    rows: IntArray,
    query_offsets: IntArray,
    lengths: IntArray,
    tables: BitsArray,
) -> None:
    """Arrays as in `verifier.cpu.records.STEP`; `tables` has all blocks of all `lengths`.

    Raises:
        ValueError: a kernel would leave its buffers.
    """
    fault = _fault(
        token_ids, positions, slots, rows, query_offsets, lengths, tables, limits.max_num_tokens,
        limits.vocab_size, limits.num_slots, limits.num_cache_blocks,
    )  # fmt: skip
    if fault:
        raise ValueError(f"the layout has {_FAULTS[fault]}")


@kernel
def _fault(
    token_ids: IntArray, positions: IntArray, slots: IntArray, rows: IntArray,
    query_offsets: IntArray, lengths: IntArray, tables: Any, max_num_tokens: int, vocab_size: int,
    num_slots: int, num_cache_blocks: int,
) -> int:  # fmt: skip
    """The place in `_FAULTS` of the first thing that is wrong; 0: nothing is."""
    num_tokens, num_sequences = len(token_ids), len(lengths)
    if not 0 < num_tokens <= max_num_tokens or len(rows) > max_num_tokens:
        return 1
    if len(positions) != num_tokens or len(slots) != num_tokens:
        return 2
    if len(query_offsets) != num_sequences + 1:
        return 2
    for t in range(num_tokens):
        if not 0 <= token_ids[t] < vocab_size:
            return 3
        if not 0 <= positions[t] < num_slots:
            return 4
        if not 0 <= slots[t] < num_slots:
            return 5
    for row in rows:
        if not 0 <= row < num_tokens:
            return 6
    if query_offsets[0] != 0 or query_offsets[num_sequences] != num_tokens:
        return 7
    for sequence in range(num_sequences):
        num_queries = query_offsets[sequence + 1] - query_offsets[sequence]
        if num_queries < 0:
            return 7
        if not num_queries <= lengths[sequence] <= num_slots:
            return 8
    for block in tables:
        if not 0 <= block < num_cache_blocks:
            return 9
    return 0
