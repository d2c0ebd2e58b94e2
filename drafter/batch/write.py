"""The wire format of answers to live batches, written by kernels: no object per sequence.

Owns how a `ProposeResponse` looks in bytes, the same as protobuf's own serializer writes. Does not
know how drafts are found (`live_kernel.py`, `drafting.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.batch.scan import (
    BASE_LENGTH,
    BATCH_ID,
    BYTES,
    DRAFT,
    ID_BYTES,
    ID_START,
    INDEXING,
    MATCHED_NGRAM_LENGTH,
    MAX_VARINT_BYTES,
    NO_MATCH,
    POOL_DRAFT,
    PROPOSALS,
    REFUSED,
    SEQUENCE_ID,
    SOURCE,
    SOURCE_POOL,
    SOURCE_SEQUENCE,
    STATUS,
    STATUS_INDEXING,
    STATUS_NO_MATCH,
    STATUS_OK,
    TOKEN_IDS,
    VARINT,
)
from drafter.history.id_table import MAX_ID_BYTES
from drafter.kernels.jit import kernel
from drafter.kernels.memory import (
    load_u8,
    load_u32,
    load_unaligned_u64,
    signed,
    store_u8,
    store_unaligned_u64,
)

PROPOSAL_BYTES = 40
"""Of a proposal without its id and tokens: every number at its longest, all tags and lengths."""


@kernel
def _put_varint(out: int, value: int) -> int:
    """Writes a number to an address, and returns the address behind it."""
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
    reach: int,
    tokens: int,
    num_tokens: int,
) -> int:
    """Writes a field of a ProposeResponse: what became of one sequence, unless it was refused.

    Args:
        out: address to write to; with room for `PROPOSAL_BYTES`, the id, and 5 bytes per token.
        sequence_id: address of the id.
        id_bytes: its length.
        outcome: see `batch_wire.OPEN`; neither that nor `REFUSED`.
        length: how many tokens the sequence has.
        reach: how far back the match reaches.
        tokens: address of the draft.
        num_tokens: its length.

    Returns:
        The address behind what was written.
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
        num_bytes += 1 + _varint_bytes(token_bytes) + token_bytes + _number_bytes(reach) + 2

    out = _put_head(out, PROPOSALS, num_bytes)
    out = _put_head(out, SEQUENCE_ID, id_bytes)
    out = _put_bytes(out, sequence_id, id_bytes)
    out = put_number(out, BASE_LENGTH, length)
    if is_draft:
        out = _put_head(out, TOKEN_IDS, token_bytes)
        for k in range(num_tokens):
            out = _put_varint(out, signed(load_u32(tokens + 4 * k)))
        out = put_number(out, MATCHED_NGRAM_LENGTH, reach)
        out = put_number(out, SOURCE, SOURCE_POOL if outcome == POOL_DRAFT else SOURCE_SEQUENCE)
    return put_number(out, STATUS, status)


@kernel
def write_response(
    payload: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    batch_id: int,
    outcomes: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    reaches: npt.NDArray[np.int64],
    draft_starts: npt.NDArray[np.int64],
    draft_lengths: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.uint32],
    refusals: npt.NDArray[np.uint8],
    refusal_bytes: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint8]:
    """Writes a ProposeResponse as protobuf's own serializer does.

    Args:
        payload: the request, for the ids.
        rows: the request's sequences, see `FIELDS`.
        batch_id: of the request, under 2^32.
        outcomes: what became of each sequence; none is `OPEN`, [num_rows].
        lengths: how many tokens each sequence has, [num_rows].
        reaches: how far back the matches reach, [num_rows].
        draft_starts: where in `drafts` the drafts are, [num_rows].
        draft_lengths: their lengths, [num_rows].
        drafts: tokens.
        refusals: the proposals that are `REFUSED`, in order, each as a field of the response.
        refusal_bytes: how long each of these is.
    """
    num_rows = len(outcomes)
    most = 12 + len(refusals) + num_rows * (PROPOSAL_BYTES + MAX_ID_BYTES)
    for i in range(num_rows):
        if outcomes[i] == DRAFT or outcomes[i] == POOL_DRAFT:
            most += MAX_VARINT_BYTES * draft_lengths[i]
    written = np.empty(most, dtype=np.uint8)
    data, begin = payload.ctypes.data, written.ctypes.data
    refusal, refused = 0, refusals.ctypes.data
    out = put_number(begin, BATCH_ID, batch_id)
    for i in range(num_rows):
        outcome = outcomes[i]
        if outcome == REFUSED:
            out = _put_bytes(out, refused, refusal_bytes[refusal])
            refused += refusal_bytes[refusal]
            refusal += 1
            continue
        out = put_proposal(
            out,
            data + rows[i, ID_START],
            rows[i, ID_BYTES],
            outcome,
            lengths[i],
            reaches[i],
            drafts.ctypes.data + 4 * draft_starts[i],
            draft_lengths[i],
        )
    return written[: out - begin]
