"""Takes the plain deltas of a message: one kernel call for a run of them.

Owns what makes a delta plain, beside its form (`batch_wire.py`): the sequence is known, the delta
continues it exactly where it ends, there is room for the tokens where the others are, and its index
does not lack much. Then nothing can go wrong, and nothing but arrays is touched.
"""

import numpy as np
import numpy.typing as npt

from drafter.batch.scan import (
    BASE,
    ID_BYTES,
    ID_HASH,
    ID_START,
    IS_PLAIN,
    LENGTH_LIMIT,
    MOST_DRAFT_TOKENS,
    NUM_TOKENS,
    TOKENS_START,
)
from drafter.history.id_table import HEADER, SequenceTable, find_slot, home_bucket, touch
from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_i64, load_u8, prefetch, signed, store_i64, store_u32
from drafter.ngram.index import lacks
from drafter.ngram.table import CAPACITY, LENGTH, TABLE_WORDS, TABLES, TOKENS

_GROUP = 16


@kernel
def take_plain(
    payload: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    first: int,
    stop: int,
    table: SequenceTable,
    now_s: float,
    most_draft_tokens: int,
    most_lacking: int,
    slots: npt.NDArray[np.int64],
    headers: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.int64],
    is_wanted: npt.NDArray[np.bool_],
) -> int:
    """Appends the tokens of plain sequences, up to the first that is not.

    Args:
        payload: the message.
        rows: its sequences, see `batch_wire.FIELDS`.
        first: with which to begin.
        stop: with which to end.
        table: the known sequences.
        now_s: when they are used.
        most_draft_tokens: what the answer has room for, per sequence.
        most_lacking: a text that lacks more n-grams of a size is not taken.
        slots: takes the sequences' slots, at the places of their rows.
        headers: takes the addresses of their texts.
        wanted: takes how long each draft may be.
        is_wanted: takes whether a draft is asked for.

    Returns:
        The row after the last that was taken.
    """
    data = payload.ctypes.data
    buckets, records = table.buckets.ctypes.data, table.records.ctypes.data
    ids = table.ids.ctypes.data
    for group in range(first, stop, _GROUP):
        end = min(group + _GROUP, stop)
        for i in range(group, end):
            prefetch(buckets + 4 * home_bucket(table, rows[i, ID_HASH]))
        for i in range(group, end):
            slot = signed(table.buckets[home_bucket(table, rows[i, ID_HASH])]) - 1
            if slot >= 0:
                prefetch(records + 64 * slot)
                prefetch(ids + 64 * slot)
        for i in range(group, end):
            slots[i] = -1
            if rows[i, IS_PLAIN] == 1:
                slots[i] = find_slot(
                    table, rows[i, ID_HASH], data + rows[i, ID_START], rows[i, ID_BYTES]
                )
            if slots[i] >= 0:
                headers[i] = table.records[slots[i], HEADER]
                for line in range(0, TABLES + 4 * TABLE_WORDS, 8):
                    prefetch(headers[i] + 8 * line)
        for i in range(group, end):
            if slots[i] >= 0:
                tokens = load_i64(headers[i] + 8 * TOKENS)
                prefetch(tokens + 4 * load_i64(headers[i] + 8 * LENGTH))
        for i in range(group, end):
            if slots[i] < 0:
                return i
            header = headers[i]
            length = load_i64(header + 8 * LENGTH)
            count = rows[i, NUM_TOKENS]
            if rows[i, BASE] != length or length + count > load_i64(header + 8 * CAPACITY):
                return i
            if lacks(header) + count > most_lacking:
                return i
            at = rows[i, TOKENS_START]
            token_at = load_i64(header + 8 * TOKENS) + 4 * length
            for _ in range(count):
                token = signed(load_u8(data + at))
                if token >= 0x80:
                    token &= 0x7F
                    shift = 7
                    while True:
                        at += 1
                        byte = signed(load_u8(data + at))
                        token |= (byte & 0x7F) << shift
                        if byte < 0x80:
                            break
                        shift += 7
                at += 1
                store_u32(token_at, np.uint32(token))
                token_at += 4
            length += count
            store_i64(header + 8 * LENGTH, length)
            touch(table, slots[i], now_s)
            note_wanted(rows, i, length, most_draft_tokens, wanted, is_wanted)
    return stop


@kernel
def note_wanted(
    rows: npt.NDArray[np.int64],
    i: int,
    length: int,
    most_draft_tokens: int,
    wanted: npt.NDArray[np.int64],
    is_wanted: npt.NDArray[np.bool_],
) -> None:
    """Puts down how long a draft row i may have, whose text has so many tokens by now."""
    most = min(rows[i, MOST_DRAFT_TOKENS], most_draft_tokens)
    if rows[i, LENGTH_LIMIT] > 0:
        most = max(0, min(most, rows[i, LENGTH_LIMIT] - length))
    wanted[i] = most
    is_wanted[i] = rows[i, MOST_DRAFT_TOKENS] > 0
