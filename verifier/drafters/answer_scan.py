"""Reads a `ProposeResponse` into rows, one per proposal, without an object per field.

Owns how the message looks in bytes, its field numbers, which are those of `drafter.proto`, and the
columns of a row. Reads every message that protobuf's parser reads, unknown fields included, but for
groups, which no one writes any more; strings are not checked to be UTF-8. Does not know what was
asked (`feed.py`).
"""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import signed
from servicekit.kernels.varints import read_varint64

# ProposeResponse
_BATCH_ID, _PROPOSALS = 1, 2
# Proposal
(
    _SEQUENCE_ID,
    _BASE_LENGTH,
    _TOKEN_IDS,
    _MATCHED_NGRAM_LENGTH,
    _SOURCE,
    _STATUS,
    _KNOWN_LENGTH,
    _MESSAGE,
) = range(1, 9)

# Kinds of fields.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST = 0xFFFFFFFF

NUM_COLUMNS = 11
(
    # Columns of a row: places in the message, places in the tokens, and numbers.
    ID_START,
    ID_END,
    BASE_LENGTH,
    TOKENS_START,
    TOKENS_END,
    MATCHED_NGRAM_LENGTH,
    SOURCE,
    STATUS,
    KNOWN_LENGTH,
    MESSAGE_START,
    MESSAGE_END,
) = range(NUM_COLUMNS)

MALFORMED = -1


@kernel
def scan_answer(
    data: npt.NDArray[np.uint8],
    vocab_size: int,
    rows: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Reads a message.

    Args:
        data: the message.
        vocab_size: a draft is cut before its first id that is not smaller.
        rows: takes a row for each of the first proposals, [n, NUM_COLUMNS].
        token_ids: takes the drafts one after another; at least as many as the message has bytes.

    Returns:
        (How many proposals there are, the batch id's bits, how many tokens were taken); `MALFORMED`
        in the place of the first: nothing that was written counts.
    """
    begin = signed(data.ctypes.data)
    at, end = 0, len(data)
    count, batch_id, num_tokens = 0, 0, 0
    while at < end:
        tag, value, at = _read_field(begin, at, end)
        if at < 0:
            return MALFORMED, 0, 0
        if tag == _BATCH_ID << 3 | _VARINT:
            batch_id = value
        elif tag == _PROPOSALS << 3 | _BYTES:
            if count < len(rows):
                num_tokens = _scan_proposal(
                    begin, at - value, at, vocab_size, rows[count], token_ids, num_tokens
                )
                if num_tokens < 0:
                    return MALFORMED, 0, 0
            count += 1
    return count, batch_id, num_tokens


@kernel
def _scan_proposal(
    begin: int,
    at: int,
    end: int,
    vocab_size: int,
    row: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    num_tokens: int,
) -> int:
    """Reads a proposal, bytes [at, end), into a row; returns how many tokens were taken so far, or
    `MALFORMED`.
    """
    row[:] = 0
    row[TOKENS_START] = num_tokens
    is_cut = False
    while at < end:
        tag, value, at = _read_field(begin, at, end)
        if at < 0:
            return MALFORMED
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            number = value & _MOST
            if field == _BASE_LENGTH:
                row[BASE_LENGTH] = number
            elif field == _MATCHED_NGRAM_LENGTH:
                row[MATCHED_NGRAM_LENGTH] = number
            elif field == _SOURCE:
                row[SOURCE] = number
            elif field == _STATUS:
                row[STATUS] = number
            elif field == _KNOWN_LENGTH:
                row[KNOWN_LENGTH] = number
            elif field == _TOKEN_IDS:
                is_cut |= number >= vocab_size
                if not is_cut:
                    token_ids[num_tokens] = number
                    num_tokens += 1
        elif kind == _BYTES:
            if field == _SEQUENCE_ID:
                row[ID_START], row[ID_END] = at - value, at
            elif field == _MESSAGE:
                row[MESSAGE_START], row[MESSAGE_END] = at - value, at
            elif field == _TOKEN_IDS:
                token_at = at - value
                while token_at < at:
                    token_id, token_at = read_varint64(begin, token_at, at)
                    if token_at < 0:
                        return MALFORMED
                    number = token_id & _MOST
                    is_cut |= number >= vocab_size
                    if not is_cut:
                        token_ids[num_tokens] = number
                        num_tokens += 1
    row[TOKENS_END] = num_tokens
    return num_tokens


@kernel
def _read_field(begin: int, at: int, end: int) -> tuple[int, int, int]:
    """Reads a field.

    Returns:
        (Its tag, its number, or how many bytes it has at its end, where it ends); -1 in the place
        of the last: it is malformed.
    """
    tag, at = read_varint64(begin, at, end)
    if at < 0 or tag < 8 or tag > _MOST:
        return 0, 0, -1
    kind = tag & 7
    if kind == _FIXED64 or kind == _FIXED32:  # noqa: SIM109 - faster than `in`
        size = 8 if kind == _FIXED64 else 4
        return (tag, size, at + size) if size <= end - at else (0, 0, -1)
    if kind != _VARINT and kind != _BYTES:
        return 0, 0, -1
    value, at = read_varint64(begin, at, end)
    if at < 0 or kind == _VARINT:
        return tag, value, at
    if value < 0 or value > end - at:
        return 0, 0, -1
    return tag, value, at + value
