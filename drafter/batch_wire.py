"""The wire format of live batches, read and written by kernels: no object per sequence.

Owns how `ProposeRequest` and `ProposeResponse` look in bytes (protobuf's varints and
length-delimited fields; the field numbers are those of `drafter.proto`). Reads only what clients
usually send: everything else is `IRREGULAR`, nothing of it is judged here, and protobuf's own
parser has the word. Does not know sequences (`live_batch.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.jit import kernel
from drafter.kernel_memory import load_u32, signed
from drafter.sequence_table import MAX_ID_BYTES, hash_id, same_bytes

# ProposeRequest, ProposeResponse
BATCH_ID, SEQUENCES, RELEASES = 1, 2, 3
PROPOSALS = 2
# SequenceDelta; Proposal shares the first three
SEQUENCE_ID, BASE_LENGTH, TOKEN_IDS, PROMPT_LENGTH, MAX_DRAFT_TOKENS, MAX_LENGTH, PARAMS = range(
    1, 8
)
MATCHED_NGRAM_LENGTH, SOURCE, STATUS = 4, 5, 6
SOURCE_SEQUENCE, SOURCE_POOL = 1, 2
STATUS_OK, STATUS_NO_MATCH = 1, 2

_VARINT, _BYTES = 0, 2

IRREGULAR = -1

(
    START,  # of the whole field, its tag included
    END,
    ID_START,
    ID_BYTES,
    ID_HASH,
    BASE,
    TOKENS_START,
    TOKENS_END,
    NUM_TOKENS,
    MOST_DRAFT_TOKENS,
    LENGTH_LIMIT,
    IS_PLAIN,  # 1: continues a sequence by a few tokens
) = range(12)
FIELDS = 12
"""Columns of a scanned batch, one row per sequence."""

OPEN, APPENDED, NO_MATCH, DRAFT, POOL_DRAFT, REFUSED = range(6)
"""What became of a row: not answered yet; and as `Status` and `Source` say."""

# A proposal without its id and tokens: every number at its longest, all tags and lengths.
_PROPOSAL_BYTES = 40
_MAX_VARINT_BYTES = 5


@kernel
def read_varint(payload: npt.NDArray[np.uint8], at: int, end: int) -> tuple[int, int]:
    """Returns (a number under 2^32, where what follows it begins); (0, -1): it is irregular."""
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if at + i >= end:
            break
        byte = signed(payload[at + i])
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value >> 32:
                break
            return value, at + i + 1
    return 0, -1


@kernel
def _scan_delta(
    payload: npt.NDArray[np.uint8], at: int, end: int, row: npt.NDArray[np.int64]
) -> bool:
    """Reads one SequenceDelta, payload[at:end]; returns whether it is regular."""
    row[ID_BYTES] = 0
    row[BASE] = 0
    row[TOKENS_START] = 0
    row[TOKENS_END] = 0
    row[NUM_TOKENS] = 0
    row[MOST_DRAFT_TOKENS] = 0
    row[LENGTH_LIMIT] = 0
    row[IS_PLAIN] = 1
    while at < end:
        tag = signed(payload[at])
        field, kind = tag >> 3, tag & 7
        value, at = read_varint(payload, at + 1, end)
        if at < 0:
            return False
        if kind == _BYTES:
            if value > end - at:
                return False
            if field == SEQUENCE_ID:
                row[ID_START] = at
                row[ID_BYTES] = value
            elif field == TOKEN_IDS and row[TOKENS_END] == 0:
                row[TOKENS_START] = at
                row[TOKENS_END] = at + value
            elif field == PARAMS:
                row[IS_PLAIN] = 0  # protobuf's parser says whether they are well formed
            else:
                return False
            at += value
        elif kind != _VARINT:
            return False
        elif field == BASE_LENGTH:
            row[BASE] = value
        elif field == MAX_DRAFT_TOKENS:
            row[MOST_DRAFT_TOKENS] = value
        elif field == MAX_LENGTH:
            row[LENGTH_LIMIT] = value
        elif field != PROMPT_LENGTH:
            return False
    start, num_bytes = row[ID_START], row[ID_BYTES]
    if num_bytes < 1 or num_bytes > MAX_ID_BYTES:
        return False
    for i in range(start, start + num_bytes):
        if payload[i] >= 0x80:
            return False  # whether it is UTF-8 is not known here
    at, stop = row[TOKENS_START], row[TOKENS_END]
    while at < stop:
        _, at = read_varint(payload, at, stop)
        if at < 0:
            return False
        row[NUM_TOKENS] += 1
    if row[BASE] == 0:
        row[IS_PLAIN] = 0
    return True


@kernel
def scan_request(
    payload: npt.NDArray[np.uint8],
    seed: np.uint64,
    most_tokens: int,
    most_plain_tokens: int,
    rows: npt.NDArray[np.int64],
    heads: npt.NDArray[np.int64],
) -> int:
    """Finds the sequences of a ProposeRequest, and what of each a kernel needs to know.

    Args:
        payload: the message.
        seed: of the ids' hashes.
        most_tokens: more of one sequence are irregular.
        most_plain_tokens: more of one sequence are not plain.
        rows: takes a row per sequence, see `FIELDS`; more than fit are irregular.
        heads: takes the batch id and how many releases there are, [2].

    Returns:
        How many sequences there are; `IRREGULAR`: ask protobuf's parser, in the end nothing of
        `rows` counts.
    """
    at, end, count = 0, len(payload), 0
    heads[0] = 0
    heads[1] = 0
    while at < end:
        start = at
        tag = signed(payload[at])
        value, at = read_varint(payload, at + 1, end)
        if at < 0:
            return IRREGULAR
        if tag == SEQUENCES << 3 | _BYTES:
            if value > end - at or count == len(rows):
                return IRREGULAR
            row = rows[count]
            row[START] = start
            row[END] = at + value
            if not _scan_delta(payload, at, at + value, row):
                return IRREGULAR
            if row[NUM_TOKENS] > most_tokens:
                return IRREGULAR
            if row[NUM_TOKENS] > most_plain_tokens:
                row[IS_PLAIN] = 0
            row[ID_HASH] = hash_id(payload, row[ID_START], row[ID_BYTES], seed)
            count += 1
            at += value
        elif tag == RELEASES << 3 | _BYTES:
            if value > end - at:
                return IRREGULAR
            heads[1] += 1
            at += value
        elif tag == BATCH_ID << 3 | _VARINT:
            heads[0] = value
        else:
            return IRREGULAR
    if _has_same_ids(payload, rows, count):
        return IRREGULAR
    return count


@kernel
def _has_same_ids(payload: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], count: int) -> bool:
    """Whether two sequences have one id."""
    size = 16
    while size < 2 * count:
        size *= 2
    seen = np.zeros(size, dtype=np.int32)
    for i in range(count):
        at = (rows[i, ID_HASH] >> 20) & (size - 1)
        while seen[at] != 0:
            other = seen[at] - 1
            if (
                rows[other, ID_HASH] == rows[i, ID_HASH]
                and rows[other, ID_BYTES] == rows[i, ID_BYTES]
                and same_bytes(
                    payload, rows[other, ID_START], payload, rows[i, ID_START], rows[i, ID_BYTES]
                )
            ):
                return True
            at = (at + 1) & (size - 1)
        seen[at] = i + 1
    return False


@kernel
def _put_varint(out: npt.NDArray[np.uint8], at: int, value: int) -> int:
    while value >= 0x80:
        out[at] = np.uint8((value & 0x7F) | 0x80)
        value >>= 7
        at += 1
    out[at] = np.uint8(value)
    return at + 1


@kernel
def _varint_bytes(value: int) -> int:
    count = 1
    while value >= 0x80:
        value >>= 7
        count += 1
    return count


@kernel
def _put_number(out: npt.NDArray[np.uint8], at: int, field: int, value: int) -> int:
    """Writes a field, which is left out if it is 0."""
    if value == 0:
        return at
    out[at] = np.uint8(field << 3 | _VARINT)
    return _put_varint(out, at + 1, value)


@kernel
def _put_head(out: npt.NDArray[np.uint8], at: int, field: int, num_bytes: int) -> int:
    """Writes what comes before a field of so many bytes."""
    out[at] = np.uint8(field << 3 | _BYTES)
    return _put_varint(out, at + 1, num_bytes)


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
        batch_id: of the request.
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
    most = 12 + len(refusals) + num_rows * (_PROPOSAL_BYTES + MAX_ID_BYTES)
    for i in range(num_rows):
        if outcomes[i] == DRAFT or outcomes[i] == POOL_DRAFT:
            most += _MAX_VARINT_BYTES * draft_lengths[i]
    out = np.empty(most, dtype=np.uint8)
    at = _put_number(out, 0, BATCH_ID, batch_id)
    refusal, refused_at = 0, 0
    for i in range(num_rows):
        outcome = outcomes[i]
        if outcome == REFUSED:
            num_bytes = refusal_bytes[refusal]
            for k in range(num_bytes):
                out[at + k] = refusals[refused_at + k]
            at += num_bytes
            refused_at += num_bytes
            refusal += 1
            continue
        is_draft = outcome in (DRAFT, POOL_DRAFT)
        num_id_bytes = rows[i, ID_BYTES]
        token_bytes = 0
        tokens = drafts.ctypes.data + 4 * draft_starts[i]
        # Its length comes first, and is known only at the end: room is left for the longest.
        size_at = at
        start = at + 1 + 3
        at = _put_head(out, start, SEQUENCE_ID, num_id_bytes)
        for k in range(num_id_bytes):
            out[at + k] = payload[rows[i, ID_START] + k]
        at = _put_number(out, at + num_id_bytes, BASE_LENGTH, lengths[i])
        if is_draft:
            for k in range(draft_lengths[i]):
                token_bytes += _varint_bytes(signed(load_u32(tokens + 4 * k)))
            at = _put_head(out, at, TOKEN_IDS, token_bytes)
            for k in range(draft_lengths[i]):
                at = _put_varint(out, at, signed(load_u32(tokens + 4 * k)))
            at = _put_number(out, at, MATCHED_NGRAM_LENGTH, reaches[i])
            source = SOURCE_POOL if outcome == POOL_DRAFT else SOURCE_SEQUENCE
            at = _put_number(out, at, SOURCE, source)
        status = STATUS_NO_MATCH if outcome == NO_MATCH else STATUS_OK
        at = _put_number(out, at, STATUS, status)
        num_bytes = at - start
        body = _put_head(out, size_at, PROPOSALS, num_bytes)
        if body != start:
            for k in range(num_bytes):
                out[body + k] = out[start + k]
        at = body + num_bytes
    return out[:at]
