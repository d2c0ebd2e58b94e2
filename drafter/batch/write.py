"""Writes a batch's response without an object per sequence.

Owns the bytes of a `ProposeResponse`, which are those of protobuf's own serializer, and finds the
texts with remaining work. Does not know how drafts are found (`answer.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.batch import scan
from drafter.ngram.index import count_unindexed
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import (
    load_u8,
    load_u32,
    load_unaligned_u64,
    signed,
    store_u8,
    store_unaligned_u64,
)


@kernel
def _put_varint(out: int, value: int) -> int:
    """Writes a number to an address; returns the address after it."""
    while value >= 0x80:
        store_u8(out, np.uint8((value & 0x7F) | 0x80))
        value >>= 7
        out += 1
    store_u8(out, np.uint8(value))
    return out + 1


@kernel
def _varint_bytes(value: int) -> int:
    return 1 + (value >= 1 << 7) + (value >= 1 << 14) + (value >= 1 << 21) + (value >= 1 << 28)


@kernel
def put_number64(out: int, field: int, value: np.uint64) -> int:
    """Writes a field of up to 64 bits, which is left out if it is 0."""
    if value == 0:
        return out
    store_u8(out, np.uint8(field << 3 | scan.VARINT))
    out += 1
    while value >= np.uint64(0x80):
        store_u8(out, np.uint8((value & np.uint64(0x7F)) | np.uint64(0x80)))
        value >>= np.uint64(7)
        out += 1
    store_u8(out, np.uint8(value))
    return out + 1


@kernel
def put_number(out: int, field: int, value: int) -> int:
    """Writes a field, which is left out if it is 0."""
    if value == 0:
        return out
    store_u8(out, np.uint8(field << 3 | scan.VARINT))
    return _put_varint(out + 1, value)


@kernel
def _number_bytes(value: int) -> int:
    return 0 if value == 0 else 1 + _varint_bytes(value)


@kernel
def _put_head(out: int, field: int, num_bytes: int) -> int:
    """Writes what comes before a field of so many bytes."""
    store_u8(out, np.uint8(field << 3 | scan.BYTES))
    return _put_varint(out + 1, num_bytes)


@kernel
def _put_bytes(out: int, source: int, num_bytes: int) -> int:
    whole = num_bytes & ~7
    for i in range(0, whole, 8):
        store_unaligned_u64(out + i, load_unaligned_u64(source + i))
    for i in range(whole, num_bytes):
        store_u8(out + i, load_u8(source + i))
    return out + num_bytes


@kernel
def put_proposal(
    out: int,
    sequence_id: int,
    id_bytes: int,
    outcome: int,
    length: int,
    match_length: int,
    tokens: int,
    num_tokens: int,
) -> int:
    """Writes a field of a ProposeResponse: what became of one sequence, unless it was refused.

    Args:
        out: address to write to, with as much room as `wire.max_draft_tokens` counts on.
        sequence_id: address of the id.
        id_bytes: its length.
        outcome: see `scan.OPEN`; neither that nor a refusal.
        length: how many tokens the sequence has.
        match_length: how many tokens agree before the draft's source.
        tokens: address of the draft.
        num_tokens: its length.

    Returns:
        The address after the field.
    """
    is_draft = outcome == scan.DRAFT or outcome == scan.POOL_DRAFT  # faster than `in`
    status = scan.STATUS_OK
    if outcome == scan.NO_MATCH:
        status = scan.STATUS_NO_MATCH
    elif outcome == scan.INDEXING:
        status = scan.STATUS_INDEXING
    num_bytes = 2 + id_bytes + _number_bytes(length) + 2
    token_bytes = 0
    if is_draft:
        for k in range(num_tokens):
            token_bytes += _varint_bytes(signed(load_u32(tokens + 4 * k)))
        num_bytes += 1 + _varint_bytes(token_bytes) + token_bytes + _number_bytes(match_length) + 2

    out = _put_head(out, scan.PROPOSALS, num_bytes)
    out = _put_head(out, scan.SEQUENCE_ID, id_bytes)
    out = _put_bytes(out, sequence_id, id_bytes)
    out = put_number(out, scan.BASE_LENGTH, length)
    if is_draft:
        out = _put_head(out, scan.TOKEN_IDS, token_bytes)
        for k in range(num_tokens):
            out = _put_varint(out, signed(load_u32(tokens + 4 * k)))
        out = put_number(out, scan.MATCHED_NGRAM_LENGTH, match_length)
        out = put_number(
            out,
            scan.SOURCE,
            scan.SOURCE_POOL if outcome == scan.POOL_DRAFT else scan.SOURCE_SEQUENCE,
        )
    return put_number(out, scan.STATUS, status)


@kernel
def write_response(
    payload: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    num_rows: int,
    batch_id: int,
    drafts: npt.NDArray[np.uint32],
    refusals: npt.NDArray[np.uint8],
    response: npt.NDArray[np.uint8],
    tally: npt.NDArray[np.int64],
    backlog: npt.NDArray[np.int64],
    short_tail: int,
    long_tail: int,
) -> tuple[int, int]:
    """Writes a ProposeResponse as protobuf's own serializer does, and finds the backlog.

    Args:
        payload: the request, for the ids.
        rows: the request's sequences, see `scan.ID_START`; none is `OPEN`.
        num_rows: how many there are.
        batch_id: the bits of the request's.
        drafts: tokens; a row's are at its `DRAFT_START`.
        refusals: the proposals of refused rows, each as a field of the response, where its row's
            `TEXT` and `TEXT_LENGTH` say.
        response: is written to; `batch.py` makes it large enough.
        tally: takes how many rows came to each outcome, [NUM_OUTCOMES].
        backlog: takes (slot, remaining work) of the texts that have some, see
            `scan.SHORT_TAIL`, [>= num_rows, 2].
        short_tail: a text with so many unindexed tokens is left to be indexed.
        long_tail: one with more than so many is indexed after all others.

    Returns:
        (How many bytes were written, how many texts have remaining work).
    """
    num_backlog = 0
    data, begin = signed(payload.ctypes.data), signed(response.ctypes.data)
    tally[:] = 0
    out = put_number64(begin, scan.BATCH_ID, np.uint64(batch_id))
    for i in range(num_rows):
        outcome = rows[i, scan.OUTCOME]
        tally[outcome] += 1
        if outcome >= scan.OUT_OF_SYNC:
            out = _put_bytes(
                out, signed(refusals.ctypes.data) + rows[i, scan.TEXT], rows[i, scan.TEXT_LENGTH]
            )
            continue
        header = rows[i, scan.TEXT]
        num_unindexed, left = count_unindexed(header), 0
        if num_unindexed >= short_tail:
            left = scan.SHORT_TAIL if num_unindexed <= long_tail else scan.LONG_TAIL
        if left != 0:
            backlog[num_backlog, 0], backlog[num_backlog, 1] = rows[i, scan.SLOT], left
            num_backlog += 1
        out = put_proposal(
            out,
            data + rows[i, scan.ID_START],
            rows[i, scan.ID_BYTES],
            outcome,
            rows[i, scan.TEXT_LENGTH],
            rows[i, scan.MATCH_LENGTH],
            signed(drafts.ctypes.data) + 4 * rows[i, scan.DRAFT_START],
            rows[i, scan.DRAFT_LENGTH],
        )
    return out - begin, num_backlog
