"""The draft of one text: from its index in one go, or from scans that may be made in pieces.

Owns the law of a proposal beyond finding the longest n-gram's occurrences: how far a match reaches,
which candidate wins under `TIE_LONGEST`, how long the draft is, and how a chained one goes on.
Where occurrences are found is known to `match_kernel.py` (the index) and `kmp.py` (the scan): both
give the same.

`TIE_LONGEST`. Of the longest matching n-gram, three places compete: its earliest end, its latest
end, and the place where the source of the last accepted draft has arrived by now (that draft was
copied from `distance` tokens before the end of the text; so is this place). The one that agrees
with the end of the text for most tokens wins, counted up to 64; of equals the latest in the text. A
draft counts as accepted when the text went on with its first token. The place counts only if it
reaches at least as far as the n-gram and, under disjoint, lies at least n tokens back.

Chained. A draft that has reached the end of the text goes on as though it had been accepted and
asked for again: text + draft is matched anew, under the same options, up to 64 tokens past the end.
"""

import numpy as np
import numpy.typing as npt

from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_i64, load_u32, store_i64, store_u32
from drafter.ngram.index import lacks
from drafter.ngram.kmp import (
    SCAN_WORDS,
    begin_scan,
    found_by,
    go_on_with_scan,
    has_ended,
)
from drafter.ngram.match import choose, match, token_at
from drafter.ngram.table import (
    ACCEPTED_DISTANCE,
    CHAINED,
    DISJOINT,
    DRAFT_DISTANCE,
    DRAFT_LENGTH,
    LATEST,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    TIE,
    TOKENS,
    TOKENS_PER_MATCH,
)

MAX_CHAINED_TOKENS = 64
"""How far past the end of the text a chained draft goes."""

# What matching text + draft once more costs, in n-grams entered, beside looking through the tokens
# that the index does not know.
_MATCH_COST = 16

# Words of a scanned draft, after those of its scan: how long the text was when it was begun, plus
# 1; tokens of it that there are; most that there may be; the first match's reach; how far back the
# last piece was copied from; the earliest end of the longest n-gram, once the latest is looked for.
_CONTEXT, _COUNT, _MOST, _REACH, _COPY_DISTANCE, _EARLIEST_END, _IS_DONE = range(
    SCAN_WORDS, SCAN_WORDS + 7
)
SCANNED_DRAFT_WORDS = SCAN_WORDS + 7
"""Of int64, that hold how far a scanned draft has come."""


@kernel
def begin_draft(
    header: int, size: int, first: int, second: int, most: int, draft: int
) -> tuple[int, int, int, int]:
    """Writes the first piece of a draft: what follows the first match.

    Args:
        header: address of the text.
        size: n of the longest match; 0: nothing matches.
        first: an end of it; the earliest with `TIE_LONGEST`.
        second: the latest, with `TIE_LONGEST`.
        most: most tokens wanted, >= 1.
        draft: address that the tokens are written to.

    Returns:
        (number of tokens; reach of the match; how many tokens the draft may have in all; how far
        back the piece was copied from).
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    copy_distance = 0
    if tie == LONGEST:
        copy_distance = load_i64(header + 8 * ACCEPTED_DISTANCE)
        drafted_at = load_i64(header + 8 * DRAFT_LENGTH)
        distance = load_i64(header + 8 * DRAFT_DISTANCE)
        if distance != 0 and drafted_at < length:
            accepted = load_u32(tokens + 4 * drafted_at)
            if accepted == load_u32(tokens + 4 * (drafted_at - distance)):
                copy_distance = distance
                store_i64(header + 8 * ACCEPTED_DISTANCE, distance)
            store_i64(header + 8 * DRAFT_DISTANCE, 0)
    if size == 0:
        return 0, 0, 0, 0
    place, reach = choose(
        tokens, length, draft, length, size, first, second, copy_distance, disjoint, tie
    )
    if tie == LONGEST:
        store_i64(header + 8 * DRAFT_DISTANCE, length - place)
        store_i64(header + 8 * DRAFT_LENGTH, length)
        tokens_per_match = load_i64(header + 8 * TOKENS_PER_MATCH)
        if tokens_per_match > 0:
            most = min(most, tokens_per_match * reach)

    count = min(most, length - place)
    for i in range(count):
        store_u32(draft + 4 * i, load_u32(tokens + 4 * (place + i)))
    if load_i64(header + 8 * CHAINED) != 0:
        most = min(most, count + MAX_CHAINED_TOKENS)
    else:
        most = count
    return count, reach, most, length - place


@kernel
def add_piece(
    header: int,
    size: int,
    first: int,
    second: int,
    most: int,
    draft: int,
    count: int,
    copy_distance: int,
) -> tuple[int, int]:
    """Writes the next piece of a draft: what follows a match at the end of text + draft.

    Args:
        header, size, first, second, draft: see `begin_draft`.
        most: how many tokens the draft may have in all.
        count: how many it has.
        copy_distance: how far back the piece before was copied from.

    Returns:
        (count, copy_distance) with this piece.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    end = length + count
    source, _ = choose(
        tokens, length, draft, end, size, first, second, copy_distance, disjoint, tie
    )
    piece = min(most - count, end - source)
    for i in range(piece):
        store_u32(draft + 4 * (count + i), token_at(tokens, length, draft, source + i))
    return count + piece, end - source


@kernel
def draft_of(
    header: int,
    base: np.uint64,
    most: int,
    draft: int,
    pattern: npt.NDArray[np.uint32],
    alike: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Writes what may come next, from the index.

    Args:
        header: address of the text, which is indexed.
        base: of the polynomial.
        most: most tokens wanted, >= 1.
        draft: address that the tokens are written to.
        pattern, alike: scratch, see `match`.

    Returns:
        (number of tokens, reach of the first match, what all further matches cost in n-grams
        entered); (0, 0, 0): nothing matches.
    """
    length = load_i64(header + 8 * LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    longest = min(load_i64(header + 8 * MAX_NGRAM), length // 2 if disjoint else length - 1)
    if longest < load_i64(header + 8 * MIN_NGRAM):
        return 0, 0, 0

    size, first, second = match(header, base, draft, length, pattern, alike)
    count, reach, most, copy_distance = begin_draft(header, size, first, second, most, draft)
    cost = 0
    while count < most:
        cost += _MATCH_COST + lacks(header) + count
        size, first, second = match(header, base, draft, length + count, pattern, alike)
        if size == 0:
            break
        count, copy_distance = add_piece(
            header, size, first, second, most, draft, count, copy_distance
        )
    return count, reach, cost


@kernel
def scan_draft(header: int, most: int, draft: int, progress: int, budget: int) -> int:
    """Goes on to write what may come next, by scans of the text.

    Args:
        header: address of the text. If it has grown since the last call, all begins anew.
        most: most tokens wanted, >= 1.
        draft: address that the tokens are written to.
        progress: address of `SCANNED_DRAFT_WORDS` words; zeros in the first call.
        budget: how many tokens to look at, >= 1.

    Returns:
        How many were looked at.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    max_ngram = load_i64(header + 8 * MAX_NGRAM)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    if load_i64(progress + 8 * _CONTEXT) != length + 1:
        for i in range(SCANNED_DRAFT_WORDS):
            store_i64(progress + 8 * i, 0)
        store_i64(progress + 8 * _CONTEXT, length + 1)
        begin_scan(progress, length, min_ngram)
    spent = 0
    while load_i64(progress + 8 * _IS_DONE) == 0 and spent < budget:
        count = load_i64(progress + 8 * _COUNT)
        end = length + count
        earliest = load_i64(progress + 8 * _EARLIEST_END)
        spent += 1 + go_on_with_scan(
            progress, tokens, length, draft, end, min_ngram, max_ngram, disjoint,
            tie == LATEST or earliest != 0, budget - spent,
        )  # fmt: skip
        if not has_ended(progress):
            break
        second, size = found_by(progress, end)
        if tie == LONGEST and size != 0 and earliest == 0:
            store_i64(progress + 8 * _EARLIEST_END, second)
            begin_scan(progress, end, min_ngram)
            continue
        first = second if earliest == 0 else earliest
        copy_distance = load_i64(progress + 8 * _COPY_DISTANCE)
        if count == 0:
            count, reach, most_tokens, copy_distance = begin_draft(
                header, size, first, second, most, draft
            )
            store_i64(progress + 8 * _REACH, reach)
            store_i64(progress + 8 * _MOST, most_tokens)
        elif size != 0:
            most_tokens = load_i64(progress + 8 * _MOST)
            count, copy_distance = add_piece(
                header, size, first, second, most_tokens, draft, count, copy_distance
            )
        store_i64(progress + 8 * _COUNT, count)
        store_i64(progress + 8 * _COPY_DISTANCE, copy_distance)
        store_i64(progress + 8 * _EARLIEST_END, 0)
        if size == 0 or count == load_i64(progress + 8 * _MOST):
            store_i64(progress + 8 * _IS_DONE, 1)
        else:
            begin_scan(progress, length + count, min_ngram)
    return spent


@kernel
def scanned_draft(progress: int) -> tuple[bool, int, int, int]:
    """Returns (whether it is done, length of the text, number of tokens, reach) of a draft."""
    return (
        load_i64(progress + 8 * _IS_DONE) != 0,
        load_i64(progress + 8 * _CONTEXT) - 1,
        load_i64(progress + 8 * _COUNT),
        load_i64(progress + 8 * _REACH),
    )
