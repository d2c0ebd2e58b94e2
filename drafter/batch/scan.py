"""Reads a `ProposeRequest` into rows, one per sequence, without an object per sequence.

Owns how the message looks in bytes (protobuf's varints and length-delimited fields), its field
numbers, which are those of `drafter.proto`, and the columns of a row. Reads only what clients
usually send: anything else is `IRREGULAR`, is judged by protobuf's parser, and is scanned again in
the form that protobuf writes. Does not know sequences (`append.py`), nor answers (`write.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.history.id_table import MAX_ID_BYTES, hash_id, same_bytes
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_u8, load_unaligned_u64, signed
from servicekit.kernels.varints import read_varint, read_varint64

# ProposeRequest, ProposeResponse
BATCH_ID, SEQUENCES, RELEASES = 1, 2, 3
PROPOSALS = 2
# SequenceDelta; Proposal shares the first three
(
    SEQUENCE_ID,
    BASE_LENGTH,
    TOKEN_IDS,
    PROMPT_LENGTH,
    MAX_DRAFT_TOKENS,
    MAX_LENGTH,
    PARAMS,
    TRACE_PARENT,
) = range(1, 9)
MATCHED_NGRAM_LENGTH, SOURCE, STATUS = 4, 5, 6
SOURCE_SEQUENCE, SOURCE_POOL = 1, 2
STATUS_OK, STATUS_NO_MATCH, STATUS_INDEXING = 1, 2, 5

VARINT, BYTES = 0, 2
"""Kinds of fields."""

IRREGULAR = -1

(
    # Columns of a row, in cache lines of eight. From the message, by `scan_request`:
    ID_START,
    ID_BYTES,
    ID_HASH,
    BASE,
    TOKENS_START,
    NUM_TOKENS,
    DRAFT_LIMIT,  # the delta's max_draft_tokens
    LENGTH_LIMIT,  # the delta's max_length
    # Of the sequence, by `append_rows`:
    SLOT,  # or `UNKNOWN` or `ODD`
    TEXT,  # address of its text's header; of a refusal, its place in the batch's refusals
    DRAFT_ROOM,  # how long the draft may be
    DRAFT_START,  # where in the batch's drafts it goes
    # Its answer, by `answer_rows`:
    OUTCOME,
    TEXT_LENGTH,  # the known tokens that the draft continues; of a refusal, its bytes
    MATCH_LENGTH,
    DRAFT_LENGTH,
    # Used by few rows:
    START,  # of the whole field in the message, its tag included
    END,
    WHY_OPEN,  # see `answer_rows`
) = range(19)
FIELDS = 24

SCAN = MATCH_LENGTH
"""Of an open row: address of the progress of a long scan; 0: there is none."""

UNKNOWN, ODD = -1, -2
"""In the place of a slot: no sequence is found yet; and protobuf is to parse the delta."""

OPEN, APPENDED, NO_MATCH, INDEXING, DRAFT, POOL_DRAFT, OUT_OF_SYNC, INVALID = range(8)
"""Outcomes of a row: not answered yet; and as `Status` and `Source` of the contract say. The last
two are refusals: their proposals are made by protobuf."""
NUM_OUTCOMES = 8

SHORT_TAIL, LONG_TAIL = 1, 2
"""Remaining work for a text: index a short unindexed tail, or a long one."""

_HIGH_BITS = np.uint64(0x8080808080808080)


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
def _scan_delta(
    data: int, at: int, end: int, rows: npt.NDArray[np.int64], i: int, is_utf8: bool
) -> bool:
    """Reads one SequenceDelta, bytes [at, end), into row i; returns whether it is regular."""
    id_start, id_bytes, base, draft_limit, length_limit = 0, 0, 0, 0, 0
    tokens_start, tokens_end, num_tokens, slot = 0, 0, 0, UNKNOWN
    while at < end:
        tag = signed(load_u8(data + at))
        field, kind = tag >> 3, tag & 7
        value, at = read_varint(data, at + 1, end)
        if at < 0:
            return False
        if kind == BYTES:
            if value > end - at:
                return False
            if field == SEQUENCE_ID and id_bytes == 0:
                id_start, id_bytes = at, value
            elif field == TOKEN_IDS and tokens_end == 0:
                tokens_start, tokens_end = at, at + value
            elif field == PARAMS or (field == TRACE_PARENT and value > 0):
                slot = ODD
            else:
                return False
            at += value
        elif kind != VARINT:
            return False
        elif field == BASE_LENGTH:
            base = value
        elif field == MAX_DRAFT_TOKENS:
            draft_limit = value
        elif field == MAX_LENGTH:
            length_limit = value
        elif field != PROMPT_LENGTH:
            return False
    if id_bytes < 1 or id_bytes > MAX_ID_BYTES:
        return False
    if not is_utf8 and not _is_ascii(data + id_start, id_bytes):
        return False  # protobuf's parser says whether it is UTF-8
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
    rows[i, NUM_TOKENS] = num_tokens
    rows[i, DRAFT_LIMIT] = draft_limit
    rows[i, LENGTH_LIMIT] = length_limit
    rows[i, SLOT] = slot if base > 0 else ODD
    rows[i, DRAFT_ROOM] = 0
    rows[i, OUTCOME] = OPEN
    return True


@kernel
def scan_request(
    payload: npt.NDArray[np.uint8],
    seed: np.uint64,
    max_tokens: int,
    is_utf8: bool,
    rows: npt.NDArray[np.int64],
    odd: npt.NDArray[np.int64],
    head: npt.NDArray[np.int64],
) -> int:
    """Finds the sequences of a ProposeRequest, and what of each a kernel needs to know.

    Args:
        payload: the message.
        seed: of the ids' hashes.
        max_tokens: a sequence with more is odd.
        is_utf8: whether all ids are known to be UTF-8.
        rows: takes a row per sequence, see `ID_START`; more than fit are irregular.
        odd: takes (row, start, end) of every field that protobuf is to parse: odd rows, and
            releases, whose row is -1. More than fit are irregular, [max_odd, 3].
        head: takes the batch id's bits, how many fields are odd, and how many tokens the sequence
            with the most brings, [3].

    Returns:
        How many sequences there are; `IRREGULAR`: nothing that was written counts.
    """
    data = signed(payload.ctypes.data)
    at, end, count = 0, len(payload), 0
    head[:] = 0
    while at < end:
        start = at
        tag = signed(load_u8(data + at))
        if tag == BATCH_ID << 3 | VARINT:
            head[0], at = read_varint64(data, at + 1, end)
            if at < 0:
                return IRREGULAR
            continue
        value, at = read_varint(data, at + 1, end)
        if at < 0 or value > end - at:
            return IRREGULAR
        at += value
        if tag == SEQUENCES << 3 | BYTES:
            if count == len(rows):
                return IRREGULAR
            if not _scan_delta(data, at - value, at, rows, count, is_utf8):
                return IRREGULAR
            rows[count, START] = start
            rows[count, END] = at
            if rows[count, NUM_TOKENS] > max_tokens:
                rows[count, SLOT] = ODD
            head[2] = max(head[2], rows[count, NUM_TOKENS])
            rows[count, ID_HASH] = hash_id(
                data + rows[count, ID_START], rows[count, ID_BYTES], seed
            )
            row, is_odd = count, rows[count, SLOT] == ODD
            count += 1
        elif tag == RELEASES << 3 | BYTES:
            row, is_odd = -1, True
        else:
            return IRREGULAR
        if is_odd:
            if head[1] == len(odd):
                return IRREGULAR
            odd[head[1], 0], odd[head[1], 1], odd[head[1], 2] = row, start, at
            head[1] += 1
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
