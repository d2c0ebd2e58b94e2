"""The desk: what the kernels of live batches work on, named by one array of int64.

Unpacking one array for a call takes a fraction of a microsecond, and a batch's kernels work on
some twenty, in call after call. So whatever lasts from one call to the next lies at addresses that
a desk holds, with the sizes, the settings, and what came of the last call. Who owns it keeps the
arrays alive (`live_answerer.py`).
"""

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from drafter.batch.scan import FIELDS, POOL_DRAFT
from drafter.history.id_table import MAX_ID_BYTES, RECORD_WORDS, SequenceTable
from drafter.kernels.jit import kernel
from drafter.kernels.memory import as_pointer
from drafter.pool_index.arena import Arena

MOST_ROWS = 512
"""A batch of more sequences is not answered in one call: that would take too long."""

(
    # Addresses. The message, and its answer:
    REQUEST,
    ANSWER,
    # One row per sequence of the batch, `MOST_ROWS` of them; see `take_plain`:
    ROWS,
    SLOTS,
    HEADERS,
    WANTED,
    IS_WANTED,
    STATUSES,  # of those that `index_live` left
    BEHIND,  # the slots of those that have come to lack so much that they are to be indexed
    FEEDING,  # the slots of those that have grown so long that they are to feed their pools
    # What an answer has room for per sequence, by the number of sequences:
    MOST_DRAFT_TOKENS,
    # Of the sequence table, and of all pools:
    BUCKETS,
    IDS,
    RECORDS,
    LAST_USED_S,
    ENDS,
    ARENA,
    # Sizes and settings.
    NUM_BUCKETS,
    MOST_SEQUENCES,
    ARENA_WORDS,
    GENERATION,
    HASH_BASE,
    MOST_TOKENS,
    MOST_PLAIN_TOKENS,
    MOST_LACKING_WHEN_TAKEN,
    MOST_LACKING_WHEN_ANSWERED,
    BUDGET,
    INDEX_BUDGET,
    # Results: rows; the batch id and the number of releases; rows taken; bytes of the answer.
    NUM_ROWS,
    HEADS,
    _NUM_RELEASES,
    NUM_TAKEN,
    NUM_BYTES,
    NUM_BEHIND,
    NUM_FEEDING,
    # How many rows came to each of `batch_wire.OPEN` and so on, as far as `POOL_DRAFT`.
    NUM_BY_OUTCOME,
) = range(36)
DESK_WORDS = NUM_BY_OUTCOME + POOL_DRAFT + 1

Desk = npt.NDArray[np.int64]


@kernel
def numbers_of(desk: Desk, name: int, count: int) -> npt.NDArray[np.int64]:
    """Returns the first of the numbers that the desk has an address of."""
    return carray(as_pointer(desk[name]), (count,), np.int64)


@kernel
def request_of(desk: Desk, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns the message, of so many bytes."""
    return carray(as_pointer(desk[REQUEST]), (num_bytes,), np.uint8)


@kernel
def rows_of(desk: Desk) -> npt.NDArray[np.int64]:
    """Returns the batch's rows, see `batch_wire.FIELDS`."""
    return carray(as_pointer(desk[ROWS]), (MOST_ROWS, FIELDS), np.int64)


@kernel
def is_wanted_of(desk: Desk) -> npt.NDArray[np.bool_]:
    """Returns whether each row asks for a draft."""
    return carray(as_pointer(desk[IS_WANTED]), (MOST_ROWS,), np.bool_)


@kernel
def table_of(desk: Desk) -> SequenceTable:
    """Returns the known sequences."""
    most = desk[MOST_SEQUENCES]
    return SequenceTable(
        carray(as_pointer(desk[BUCKETS]), (desk[NUM_BUCKETS],), np.int32),
        carray(as_pointer(desk[IDS]), (most, MAX_ID_BYTES), np.uint8),
        carray(as_pointer(desk[RECORDS]), (most, RECORD_WORDS), np.int64),
        carray(as_pointer(desk[LAST_USED_S]), (most,), np.float64),
        carray(as_pointer(desk[ENDS]), (5,), np.int64),
        np.uint64(desk[HASH_BASE]),
    )


@kernel
def arena_of(desk: Desk) -> Arena:
    """Returns the memory of all pools."""
    return carray(as_pointer(desk[ARENA]), (desk[ARENA_WORDS],), np.uint32)
