"""The wire format of live batches, read and written by kernels: no object per sequence.

Owns how `ProposeRequest` and `ProposeResponse` look in bytes (protobuf's varints and
length-delimited fields; the field numbers are those of `drafter.proto`). Reads only what clients
usually send: everything else is `IRREGULAR`, nothing of it is judged here, and protobuf's own
parser has the word. Does not know sequences (`live_batch.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.jit import kernel
from drafter.kernel_memory import load_u8, load_u32, load_unaligned_u64, signed, store_u8
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
_HIGH_BITS = np.uint64(0x8080808080808080)


@kernel
def read_varint(data: int, at: int, end: int) -> tuple[int, int]:
    """Returns (a number under 2^32, where what follows it begins); (0, -1): it is irregular."""
    if at < end:
        byte = signed(load_u8(data + at))
        if byte < 0x80:
            return byte, at + 1
    value = 0
    for i in range(min(_MAX_VARINT_BYTES, end - at)):
        byte = signed(load_u8(data + at + i))
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value >> 32:
                break
            return value, at + i + 1
    return 0, -1


@kernel
def _is_ascii(address: int, num_bytes: int) -> bool:
    whole = num_bytes & ~7
    bits = np.uint64(0)
    for i in range(0, whole, 8):
        bits |= load_unaligned_u64(address + i)
    for i in range(whole, num_bytes):
        bits |= np.uint64(load_u8(address + i))
    return not bits & _HIGH_BITS


@kernel
def _scan_delta(data: int, at: int, end: int, rows: npt.NDArray[np.int64], i: int) -> bool:
    """Reads one SequenceDelta, bytes [at, end), into row i; returns whether it is regular."""
    id_start, id_bytes, base, most_draft_tokens, length_limit = 0, 0, 0, 0, 0
    tokens_start, tokens_end, num_tokens, is_plain = 0, 0, 0, 1
    while at < end:
        tag = signed(load_u8(data + at))
        field, kind = tag >> 3, tag & 7
        value, at = read_varint(data, at + 1, end)
        if at < 0:
            return False
        if kind == _BYTES:
            if value > end - at:
                return False
            if field == SEQUENCE_ID:
                id_start, id_bytes = at, value
            elif field == TOKEN_IDS and tokens_end == 0:
                tokens_start, tokens_end = at, at + value
            elif field == PARAMS:
                is_plain = 0  # protobuf's parser says whether they are well formed
            else:
                return False
            at += value
        elif kind != _VARINT:
            return False
        elif field == BASE_LENGTH:
            base = value
        elif field == MAX_DRAFT_TOKENS:
            most_draft_tokens = value
        elif field == MAX_LENGTH:
            length_limit = value
        elif field != PROMPT_LENGTH:
            return False
    if id_bytes < 1 or id_bytes > MAX_ID_BYTES or not _is_ascii(data + id_start, id_bytes):
        return False  # whether it is UTF-8 is not known here
    at = tokens_start
    while at < tokens_end:
        _, at = read_varint(data, at, tokens_end)
        if at < 0:
            return False
        num_tokens += 1
    rows[i, ID_START] = id_start
    rows[i, ID_BYTES] = id_bytes
    rows[i, BASE] = base
    rows[i, TOKENS_START] = tokens_start
    rows[i, TOKENS_END] = tokens_end
    rows[i, NUM_TOKENS] = num_tokens
    rows[i, MOST_DRAFT_TOKENS] = most_draft_tokens
    rows[i, LENGTH_LIMIT] = length_limit
    rows[i, IS_PLAIN] = is_plain if base > 0 else 0
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
        How many sequences there are; `IRREGULAR`: ask protobuf's parser, nothing of `rows` counts.
    """
    data = payload.ctypes.data
    at, end, count = 0, len(payload), 0
    heads[0] = 0
    heads[1] = 0
    while at < end:
        start = at
        tag = signed(load_u8(data + at))
        value, at = read_varint(data, at + 1, end)
        if at < 0:
            return IRREGULAR
        if tag == SEQUENCES << 3 | _BYTES:
            if value > end - at or count == len(rows):
                return IRREGULAR
            if not _scan_delta(data, at, at + value, rows, count):
                return IRREGULAR
            at += value
            rows[count, START] = start
            rows[count, END] = at
            if rows[count, NUM_TOKENS] > most_tokens:
                return IRREGULAR
            if rows[count, NUM_TOKENS] > most_plain_tokens:
                rows[count, IS_PLAIN] = 0
            rows[count, ID_HASH] = hash_id(
                data + rows[count, ID_START], rows[count, ID_BYTES], seed
            )
            count += 1
        elif tag == RELEASES << 3 | _BYTES:
            if value > end - at:
                return IRREGULAR
            heads[1] += 1
            at += value
        elif tag == BATCH_ID << 3 | _VARINT:
            heads[0] = value
        else:
            return IRREGULAR
    if _has_same_ids(data, rows, count):
        return IRREGULAR
    return count


@kernel
def _has_same_ids(data: int, rows: npt.NDArray[np.int64], count: int) -> bool:
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
                    data + rows[other, ID_START], data + rows[i, ID_START], rows[i, ID_BYTES]
                )
            ):
                return True
            at = (at + 1) & (size - 1)
        seen[at] = i + 1
    return False


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
def _put_number(out: int, field: int, value: int) -> int:
    """Writes a field, which is left out if it is 0."""
    if value == 0:
        return out
    store_u8(out, np.uint8(field << 3 | _VARINT))
    return _put_varint(out + 1, value)


@kernel
def _number_bytes(value: int) -> int:
    return 0 if value == 0 else 1 + _varint_bytes(value)


@kernel
def _put_head(out: int, field: int, num_bytes: int) -> int:
    """Writes what comes before a field of so many bytes."""
    store_u8(out, np.uint8(field << 3 | _BYTES))
    return _put_varint(out + 1, num_bytes)


@kernel
def _put_bytes(out: int, source: int, num_bytes: int) -> int:
    for i in range(num_bytes):
        store_u8(out + i, load_u8(source + i))
    return out + num_bytes


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
    most = 12 + len(refusals) + num_rows * (_PROPOSAL_BYTES + MAX_ID_BYTES)
    for i in range(num_rows):
        if outcomes[i] == DRAFT or outcomes[i] == POOL_DRAFT:
            most += _MAX_VARINT_BYTES * draft_lengths[i]
    written = np.empty(most, dtype=np.uint8)
    data, begin = payload.ctypes.data, written.ctypes.data
    refusal, refused = 0, refusals.ctypes.data
    out = _put_number(begin, BATCH_ID, batch_id)
    for i in range(num_rows):
        outcome = outcomes[i]
        if outcome == REFUSED:
            out = _put_bytes(out, refused, refusal_bytes[refusal])
            refused += refusal_bytes[refusal]
            refusal += 1
            continue
        is_draft = outcome == DRAFT or outcome == POOL_DRAFT  # faster than `in`
        num_tokens = draft_lengths[i] if is_draft else 0
        tokens = drafts.ctypes.data + 4 * draft_starts[i]
        source = SOURCE_POOL if outcome == POOL_DRAFT else SOURCE_SEQUENCE
        status = STATUS_NO_MATCH if outcome == NO_MATCH else STATUS_OK
        token_bytes = 0
        for k in range(num_tokens):
            token_bytes += _varint_bytes(signed(load_u32(tokens + 4 * k)))
        num_bytes = 2 + rows[i, ID_BYTES] + _number_bytes(lengths[i]) + 2
        if is_draft:
            num_bytes += 1 + _varint_bytes(token_bytes) + token_bytes
            num_bytes += _number_bytes(reaches[i]) + 2

        out = _put_head(out, PROPOSALS, num_bytes)
        out = _put_head(out, SEQUENCE_ID, rows[i, ID_BYTES])
        out = _put_bytes(out, data + rows[i, ID_START], rows[i, ID_BYTES])
        out = _put_number(out, BASE_LENGTH, lengths[i])
        if is_draft:
            out = _put_head(out, TOKEN_IDS, token_bytes)
            for k in range(num_tokens):
                out = _put_varint(out, signed(load_u32(tokens + 4 * k)))
            out = _put_number(out, MATCHED_NGRAM_LENGTH, reaches[i])
            out = _put_number(out, SOURCE, source)
        out = _put_number(out, STATUS, status)
    return written[: out - begin]
