"""One kernel call for a whole batch: every text's index catches up, every text gets its draft.

Owns the law of a proposal beyond finding the longest n-gram's occurrences: how far a match reaches,
which candidate wins under `TIE_LONGEST`, how long the draft is, and how a chained one goes on.
Where occurrences are found is known to `ngram_index.py` (the index) and `kmp.py` (the scan): both
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
from numba import carray  # type: ignore[attr-defined]

from drafter.jit import kernel
from drafter.kernel_memory import (
    as_pointer,
    load_i64,
    load_u32,
    store_i64,
    store_u32,
)
from drafter.match_kernel import choose, match, scan_text, token_at
from drafter.ngram_index import BEHIND, DONE, SCRATCH_WORDS, catch_up, lacks
from drafter.ngram_table import (
    ACCEPTED_DISTANCE,
    CHAINED,
    DISJOINT,
    DRAFT_DISTANCE,
    DRAFT_LENGTH,
    INDEXED,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    TIE,
    TOKENS,
    TOKENS_PER_MATCH,
)
from drafter.prefetch_kernel import prefetch_end, prefetch_header, prefetch_matches

MAX_CHAINED_TOKENS = 64
"""How far past the end of the text a chained draft goes."""

_GROUP = 32
_MAX_SIZES = 32
# What scanning a text costs, in n-grams entered per token.
_SCAN_SHARE = 16


@kernel
def draft_of(
    header: int,
    base: np.uint64,
    most: int,
    draft: int,
    pattern: npt.NDArray[np.uint32],
    alike: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Writes what may come next.

    Args:
        header: address of the text.
        base: of the polynomial.
        most: most tokens wanted, >= 1.
        draft: address that the tokens are written to.
        pattern, alike: scratch, see `match`.

    Returns:
        (number of tokens, reach of the first match); (0, 0): nothing matches.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    indexed = load_i64(header + 8 * INDEXED) != 0
    chained = load_i64(header + 8 * CHAINED) != 0
    longest = min(load_i64(header + 8 * MAX_NGRAM), length // 2 if disjoint else length - 1)
    if longest < load_i64(header + 8 * MIN_NGRAM):
        return 0, 0

    if indexed:
        size, first, second = match(header, base, draft, length, pattern, alike)
    else:
        known = carray(as_pointer(tokens), (length,), np.uint32)
        size, first, second = scan_text(header, known, length)

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
        return 0, 0
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
    if not chained:
        return count, reach

    most = min(most, count + MAX_CHAINED_TOKENS)
    scanned = np.empty(0, dtype=np.uint32)
    if count < most and not indexed:
        scanned = np.empty(length + most, dtype=np.uint32)
        for i in range(length):
            scanned[i] = load_u32(tokens + 4 * i)
        for i in range(count):
            scanned[length + i] = load_u32(draft + 4 * i)
    copy_distance = length - place
    while count < most:
        end = length + count
        if indexed:
            size, first, second = match(header, base, draft, end, pattern, alike)
        else:
            size, first, second = scan_text(header, scanned, end)
        if size == 0:
            break
        source, _ = choose(
            tokens, length, draft, end, size, first, second, copy_distance, disjoint, tie
        )
        copy_distance = end - source
        piece = min(most - count, end - source)
        for i in range(piece):
            token = token_at(tokens, length, draft, source + i)
            store_u32(draft + 4 * (count + i), token)
            if not indexed:
                scanned[end + i] = token
        count += piece
    return count, reach


@kernel
def answer_texts(
    headers: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.int64],
    base: np.uint64,
    budget: int,
    most_lacking: int,
    draft_starts: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.uint32],
    draft_lengths: npt.NDArray[np.int64],
    reaches: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    statuses: npt.NDArray[np.int64],
) -> int:
    """Brings indexes up to date and answers those that are, or nearly so.

    Args:
        headers: addresses of the texts, each once, [num_texts].
        wanted: most tokens of each draft; 0: the index only, [num_texts].
        base: of the polynomial.
        budget: how many n-grams may be entered in all; what is left over is `BEHIND`.
        most_lacking: a text whose tables lack so few n-grams each, and of which a draft is wanted,
            is answered as it is: they are looked through, and stay to be entered.
        draft_starts: where in `drafts` each draft goes, [num_texts].
        drafts: takes the drafts.
        draft_lengths: takes their lengths, [num_texts].
        reaches: takes how far back the matches reach, [num_texts].
        lengths: takes how many tokens each text has, [num_texts].
        statuses: takes what became of each text, [num_texts].

    Returns:
        How much of the budget was used.
    """
    spent = 0
    mixed = np.empty((_GROUP, _MAX_SIZES + 1), dtype=np.uint64)
    slots = np.empty(_GROUP, dtype=np.int64)
    is_asked = np.zeros(_GROUP, dtype=np.bool_)
    scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
    pattern = np.empty(_MAX_SIZES, dtype=np.uint32)
    # A chained draft is matched again on up to all of its tokens.
    most_wanted = 0
    for t in range(len(headers)):
        most_wanted = max(most_wanted, wanted[t])
    alike = np.empty((2, most_lacking + most_wanted + _MAX_SIZES), dtype=np.int64)
    num_texts = len(headers)
    for t in range(min(_GROUP, num_texts)):
        prefetch_header(headers[t])
    for group in range(0, num_texts, _GROUP):
        stop = min(group + _GROUP, num_texts)
        for t in range(group, stop):
            prefetch_end(headers[t])
        for t in range(stop, min(stop + _GROUP, num_texts)):
            prefetch_header(headers[t])
        for t in range(group, stop):
            header = headers[t]
            length = load_i64(header + 8 * LENGTH)
            statuses[t] = DONE
            if wanted[t] == 0 or lacks(header) > most_lacking:
                statuses[t], cost = catch_up(header, base, budget - spent, scratch.ctypes.data)
                spent += cost
            if load_i64(header + 8 * INDEXED) == 0 and wanted[t] > 0:
                if spent > 0 and spent >= budget:
                    statuses[t] = BEHIND
                spent += length // _SCAN_SHARE
            lengths[t] = length
            draft_lengths[t] = 0
            reaches[t] = 0
            is_asked[t - group] = statuses[t] == DONE and wanted[t] > 0
        prefetch_matches(headers[group:stop], is_asked, base, mixed, slots)
        for t in range(group, stop):
            if is_asked[t - group]:
                draft = drafts.ctypes.data + 4 * draft_starts[t]
                draft_lengths[t], reaches[t] = draft_of(
                    headers[t], base, wanted[t], draft, pattern, alike
                )
    return spent
