"""Writes a batch's response without an object per sequence.

Owns the bytes of a `ProposeResponse`, which are those of protobuf's own serializer, and finds the
texts with remaining work. Does not know how drafts are found (`answer.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.batch.scan import (
    BASE_LENGTH,
    BATCH_ID,
    BYTES,
    DRAFT,
    DRAFT_LENGTH,
    DRAFT_START,
    FEED,
    ID_BYTES,
    ID_START,
    INDEXING,
    LONG_TAIL,
    MATCH_LENGTH,
    MATCHED_NGRAM_LENGTH,
    NO_MATCH,
    OUT_OF_SYNC,
    OUTCOME,
    POOL_DRAFT,
    PROPOSALS,
    SEQUENCE_ID,
    SHORT_TAIL,
    SLOT,
    SOURCE,
    SOURCE_POOL,
    SOURCE_SEQUENCE,
    STATUS,
    STATUS_INDEXING,
    STATUS_NO_MATCH,
    STATUS_OK,
    TEXT,
    TEXT_LENGTH,
    TOKEN_IDS,
    VARINT,
)
from drafter.kernels.jit import kernel
from drafter.kernels.memory import (
    load_u8,
    load_u32,
    load_unaligned_u64,
    signed,
    store_u8,
    store_unaligned_u64,
)
from drafter.ngram.index import count_unindexed
from drafter.pool_index.link import is_feed_due

PROPOSAL_BYTES = 40
"""Of a proposal without its id and tokens: every number at its longest, all tags and lengths."""


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
    store_u8(out, np.uint8(field << 3 | VARINT))
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
    store_u8(out, np.uint8(field << 3 | VARINT))
    return _put_varint(out + 1, value)


@kernel
def _number_bytes(value: int) -> int:
    return 0 if value == 0 else 1 + _varint_bytes(value)


@kernel
def _put_head(out: int, field: int, num_bytes: int) -> int:
    """Writes what comes before a field of so many bytes."""
    store_u8(out, np.uint8(field << 3 | BYTES))
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
        out: address to write to; with room for `PROPOSAL_BYTES`, the id, and 5 bytes per token.
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
    is_draft = outcome == DRAFT or outcome == POOL_DRAFT  # faster than `in`
    status = STATUS_OK
    if outcome == NO_MATCH:
        status = STATUS_NO_MATCH
    elif outcome == INDEXING:
        status = STATUS_INDEXING
    num_bytes = 2 + id_bytes + _number_bytes(length) + 2
    token_bytes = 0
    if is_draft:
        for k in range(num_tokens):
            token_bytes += _varint_bytes(signed(load_u32(tokens + 4 * k)))
        num_bytes += 1 + _varint_bytes(token_bytes) + token_bytes + _number_bytes(match_length) + 2

    out = _put_head(out, PROPOSALS, num_bytes)
    out = _put_head(out, SEQUENCE_ID, id_bytes)
    out = _put_bytes(out, sequence_id, id_bytes)
    out = put_number(out, BASE_LENGTH, length)
    if is_draft:
        out = _put_head(out, TOKEN_IDS, token_bytes)
        for k in range(num_tokens):
            out = _put_varint(out, signed(load_u32(tokens + 4 * k)))
        out = put_number(out, MATCHED_NGRAM_LENGTH, match_length)
        out = put_number(out, SOURCE, SOURCE_POOL if outcome == POOL_DRAFT else SOURCE_SEQUENCE)
    return put_number(out, STATUS, status)


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
        response: is written to; see `RESPONSE_BYTES`.
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
    out = put_number64(begin, BATCH_ID, np.uint64(batch_id))
    for i in range(num_rows):
        outcome = rows[i, OUTCOME]
        tally[outcome] += 1
        if outcome >= OUT_OF_SYNC:
            out = _put_bytes(
                out, signed(refusals.ctypes.data) + rows[i, TEXT], rows[i, TEXT_LENGTH]
            )
            continue
        header = rows[i, TEXT]
        num_unindexed, left = count_unindexed(header), 0
        if num_unindexed >= short_tail:
            left = SHORT_TAIL if num_unindexed <= long_tail else LONG_TAIL
        if is_feed_due(header):
            left |= FEED
        if left != 0:
            backlog[num_backlog, 0], backlog[num_backlog, 1] = rows[i, SLOT], left
            num_backlog += 1
        out = put_proposal(
            out,
            data + rows[i, ID_START],
            rows[i, ID_BYTES],
            outcome,
            rows[i, TEXT_LENGTH],
            rows[i, MATCH_LENGTH],
            signed(drafts.ctypes.data) + 4 * rows[i, DRAFT_START],
            rows[i, DRAFT_LENGTH],
        )
    return out - begin, num_backlog
