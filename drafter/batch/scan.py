"""The wire format of live batches, read by kernels: no object per sequence.

Owns how a `ProposeRequest` looks in bytes (protobuf's varints and length-delimited fields), and the
field numbers, which are those of `drafter.proto`. Reads only what clients usually send: everything
else is `IRREGULAR`, nothing of it is judged here, and protobuf's own parser has the word. Does not
know sequences (`take_kernel.py`), nor how answers look (`answer_wire.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.history.id_table import MAX_ID_BYTES, hash_id, same_bytes
from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_u8, load_unaligned_u64, signed

# ProposeRequest, ProposeResponse
BATCH_ID, SEQUENCES, RELEASES = 1, 2, 3
PROPOSALS = 2
# SequenceDelta; Proposal shares the first three
SEQUENCE_ID, BASE_LENGTH, TOKEN_IDS, PROMPT_LENGTH, MAX_DRAFT_TOKENS, MAX_LENGTH, PARAMS = range(
    1, 8
)
MATCHED_NGRAM_LENGTH, SOURCE, STATUS = 4, 5, 6
SOURCE_SEQUENCE, SOURCE_POOL = 1, 2
STATUS_OK, STATUS_NO_MATCH, STATUS_INDEXING = 1, 2, 5

VARINT, BYTES = 0, 2
"""Kinds of fields."""

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

OPEN, APPENDED, NO_MATCH, INDEXING, DRAFT, POOL_DRAFT, REFUSED = range(7)
"""What became of a row: not answered yet; and as `Status` and `Source` say."""

MAX_VARINT_BYTES = 5
_HIGH_BITS = np.uint64(0x8080808080808080)


@kernel
def read_varint(data: int, at: int, end: int) -> tuple[int, int]:
    """Returns (a number under 2^32, where what follows it begins); (0, -1): it is irregular."""
    if at < end:
        byte = signed(load_u8(data + at))
        if byte < 0x80:
            return byte, at + 1
    value = 0
    for i in range(min(MAX_VARINT_BYTES, end - at)):
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
        if kind == BYTES:
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
        elif kind != VARINT:
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
        if tag == SEQUENCES << 3 | BYTES:
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
        elif tag == RELEASES << 3 | BYTES:
            if value > end - at:
                return IRREGULAR
            heads[1] += 1
            at += value
        elif tag == BATCH_ID << 3 | VARINT:
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
