"""Appends the tokens of a batch's rows to their sequences: one kernel call for a run of rows.

A kernel appends what cannot go wrong: the sequence is known, the delta continues it exactly where
it ends, the tokens fit where the others are, and few tokens are unindexed. A row that is not so is
odd: protobuf and `drafter.history` take it, see `engine.py`.
"""

import numpy as np
import numpy.typing as npt

from drafter.batch import scan
from drafter.history.id_table import HEADER, SequenceTable, find_slot, home_bucket, touch
from drafter.ngram.index import count_unindexed
from drafter.ngram.table import CAPACITY, LENGTH, TABLE_WORDS, TABLES, TOKENS
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, load_u8, prefetch, signed, store_i64, store_u32

_GROUP = 16


@kernel
def append_rows(
    payload: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    first: int,
    stop: int,
    table: SequenceTable,
    now_s: float,
    max_draft_tokens: int,
    max_unindexed: int,
) -> int:
    """Appends rows [first, stop), up to the first odd one.

    Args:
        payload: the message.
        rows: its sequences, see `scan.ID_START`.
        first: the row to begin with.
        stop: the row to end before.
        table: the known sequences.
        now_s: when they are used.
        max_draft_tokens: what the answer has room for, per sequence.
        max_unindexed: a text with more unindexed tokens makes its row odd.

    Returns:
        The row after the last that was appended.
    """
    data = signed(payload.ctypes.data)
    buckets = signed(table.buckets.ctypes.data)
    records = signed(table.records.ctypes.data)
    ids = signed(table.ids.ctypes.data)
    for group in range(first, stop, _GROUP):
        end = min(group + _GROUP, stop)
        for i in range(group, end):
            prefetch(buckets + 4 * home_bucket(table, rows[i, scan.ID_HASH]))
        for i in range(group, end):
            slot = signed(table.buckets[home_bucket(table, rows[i, scan.ID_HASH])]) - 1
            if slot >= 0:
                prefetch(records + 64 * slot)
                prefetch(ids + 64 * slot)
        for i in range(group, end):
            if rows[i, scan.SLOT] != scan.ODD:
                slot = find_slot(
                    table,
                    rows[i, scan.ID_HASH],
                    data + rows[i, scan.ID_START],
                    rows[i, scan.ID_BYTES],
                )
                rows[i, scan.SLOT] = slot
                if slot >= 0:
                    header = table.records[slot, HEADER]
                    rows[i, scan.TEXT] = header
                    for line in range(0, TABLES + 4 * TABLE_WORDS, 8):
                        prefetch(header + 8 * line)
        for i in range(group, end):
            if rows[i, scan.SLOT] >= 0:
                header = rows[i, scan.TEXT]
                tokens = load_i64(header + 8 * TOKENS)
                prefetch(tokens + 4 * load_i64(header + 8 * LENGTH))
        for i in range(group, end):
            if rows[i, scan.SLOT] < 0:
                return i
            header = rows[i, scan.TEXT]
            length = load_i64(header + 8 * LENGTH)
            count = rows[i, scan.NUM_TOKENS]
            if (
                rows[i, scan.BASE] != length
                or length + count > load_i64(header + 8 * CAPACITY)
                or count_unindexed(header) + count > max_unindexed
            ):
                return i
            at = rows[i, scan.TOKENS_START]
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
            touch(table, rows[i, scan.SLOT], now_s)
            make_draft_room(rows, i, length, max_draft_tokens)
    return stop


@kernel
def make_draft_room(
    rows: npt.NDArray[np.int64], i: int, length: int, max_draft_tokens: int
) -> None:
    """Sets how long the draft of row i may be, and where it goes; without room it is answered.

    Args:
        rows: of the batch; those before i have their places.
        i: the row.
        length: of its text, with the row's tokens.
        max_draft_tokens: what the answer has room for, per sequence.
    """
    room = min(rows[i, scan.DRAFT_LIMIT], max_draft_tokens)
    if rows[i, scan.LENGTH_LIMIT] > 0:
        room = max(0, min(room, rows[i, scan.LENGTH_LIMIT] - length))
    rows[i, scan.DRAFT_ROOM] = room
    rows[i, scan.DRAFT_START] = (
        rows[i - 1, scan.DRAFT_START] + rows[i - 1, scan.DRAFT_ROOM] if i > 0 else 0
    )
    rows[i, scan.TEXT_LENGTH] = length
    rows[i, scan.SCAN] = 0
    rows[i, scan.DRAFT_LENGTH] = 0
    if room == 0:
        rows[i, scan.OUTCOME] = scan.NO_MATCH if rows[i, scan.DRAFT_LIMIT] > 0 else scan.APPENDED
