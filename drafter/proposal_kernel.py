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

The work on one text waits for memory in several steps that depend on each other (header, tokens,
slots, tokens again). Texts are taken in groups, and each step asks for the next one's cache lines
of the whole group: the waits overlap.
"""

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from drafter.jit import kernel
from drafter.kernel_memory import (
    as_pointer,
    load_i64,
    load_u32,
    prefetch,
    signed,
    store_i64,
    store_u32,
)
from drafter.match_kernel import choose, match_draft, match_text, scan_text, token_at
from drafter.ngram_index import (
    ACCEPTED_DISTANCE,
    BLOCK,
    CHAINED,
    DISJOINT,
    DRAFT_DISTANCE,
    DRAFT_LENGTH,
    END_BITS,
    END_MASK,
    INDEXED,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    NEXT_END,
    SHAPE,
    TABLE_WORDS,
    TABLES,
    TIE,
    TOKENS,
    TOKENS_PER_MATCH,
    catch_up_table,
    directory_entry,
    hash_at,
    home_of,
    last_end,
    mix,
    slot_bits_of,
    tag_of,
)

DONE, BEHIND, MUST_GROW = range(3)
"""What became of a text in a call: answered; the budget ran out; its table `status - MUST_GROW`
must grow first."""

MAX_CHAINED_TOKENS = 64
"""How far past the end of the text a chained draft goes."""

_GROUP = 16
_MAX_SIZES = 32
# What scanning a text costs, in n-grams entered per token.
_SCAN_SHARE = 16


@kernel
def draft_of(
    header: int,
    base: np.uint64,
    mixed: npt.NDArray[np.uint64],
    chunks: npt.NDArray[np.int64],
    most: int,
    draft: int,
    pattern: npt.NDArray[np.uint32],
) -> tuple[int, int]:
    """Writes what may come next.

    Args:
        header: address of the text.
        base: of the polynomial.
        mixed: the mixed hashes of its last n tokens, at [n].
        chunks: the addresses of the chunks that they belong to, at [n].
        most: most tokens wanted, >= 1.
        draft: address that the tokens are written to.
        pattern: scratch, [32].

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
        size, first, second = match_text(header, mixed, chunks, longest)
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
            size, first, second = match_draft(header, base, draft, end, pattern)
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
def prefetch_header(header: int) -> None:
    """Asks for a text's header, with four tables and the beginning of their directories."""
    for line in range(0, TABLES + 4 * TABLE_WORDS + 8, 8):
        prefetch(header + 8 * line)


@kernel
def hash_suffixes(header: int, base: np.uint64, mixed: npt.NDArray[np.uint64]) -> None:
    """Hashes the last n tokens of a text for each n, and asks for their places in directories."""
    if load_i64(header + 8 * INDEXED) == 0:
        return
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    hash_ = np.uint64(0)
    power = np.uint64(1)
    for n in range(1, min(load_i64(header + 8 * MAX_NGRAM), length - 1) + 1):
        hash_ += np.uint64(load_u32(tokens + 4 * (length - n))) * power
        power *= base
        if n >= min_ngram:
            spread = mix(hash_)
            mixed[n] = spread
            table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
            prefetch(directory_entry(table, spread))


@kernel
def prefetch_slots(
    header: int,
    base: np.uint64,
    mixed: npt.NDArray[np.uint64],
    chunks: npt.NDArray[np.int64],
    enters: bool,
) -> None:
    """Asks for the slots of a text's last n-grams, and of the first if some are to be entered."""
    if load_i64(header + 8 * INDEXED) == 0:
        return
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    slot_words = 2 if load_i64(header + 8 * TIE) == LONGEST else 1
    for n in range(min_ngram, load_i64(header + 8 * MAX_NGRAM) + 1):
        table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
        slot_bits = slot_bits_of(load_i64(table + 8 * SHAPE))
        if n < length:
            chunks[n] = load_i64(directory_entry(table, mixed[n]))
            prefetch(chunks[n] + 4 * slot_words * home_of(mixed[n], slot_bits))
        next_end = load_i64(table + 8 * NEXT_END)
        if enters and next_end <= last_end(header, n):
            spread = mix(hash_at(tokens, next_end, n, base))
            chunk = load_i64(directory_entry(table, spread))
            prefetch(chunk + 4 * slot_words * home_of(spread, slot_bits))


@kernel
def catch_up(
    header: int,
    base: np.uint64,
    budget: int,
    block: npt.NDArray[np.uint64],
    addresses: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Enters what a text's tables lack, and returns (status, how many n-grams were entered)."""
    if load_i64(header + 8 * INDEXED) == 0:
        return DONE, 0
    spent = 0
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    for index in range(load_i64(header + 8 * MAX_NGRAM) - min_ngram + 1):
        entered = catch_up_table(header, index, base, max(budget - spent, 0), block, addresses)
        if entered < 0:
            return MUST_GROW + index, spent - 1 - entered
        spent += entered
        table = header + 8 * (TABLES + TABLE_WORDS * index)
        if load_i64(table + 8 * NEXT_END) <= last_end(header, min_ngram + index):
            return BEHIND, spent
    return DONE, spent


@kernel
def lacks(header: int) -> int:
    """Returns how many n-grams are missing in the table that lacks most of a size."""
    if load_i64(header + 8 * INDEXED) == 0:
        return 0
    n = load_i64(header + 8 * MAX_NGRAM)
    table = header + 8 * (TABLES + TABLE_WORDS * (n - load_i64(header + 8 * MIN_NGRAM)))
    return last_end(header, n) + 1 - load_i64(table + 8 * NEXT_END)


@kernel
def prefetch_source(
    header: int, mixed: npt.NDArray[np.uint64], chunks: npt.NDArray[np.int64]
) -> None:
    """Asks for the text that the longest match will be compared with, and copied from.

    Most hits are in the first slot: what that one names is believed, for this purpose.
    """
    if load_i64(header + 8 * INDEXED) == 0:
        return
    tokens = load_i64(header + 8 * TOKENS)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    slot_words = 2 if load_i64(header + 8 * TIE) == LONGEST else 1
    longest = min(load_i64(header + 8 * MAX_NGRAM), load_i64(header + 8 * LENGTH) - 1)
    for n in range(longest, min_ngram - 1, -1):
        table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
        slot_bits = slot_bits_of(load_i64(table + 8 * SHAPE))
        address = chunks[n] + 4 * slot_words * home_of(mixed[n], slot_bits)
        word = signed(load_u32(address))
        if word != 0 and word >> END_BITS == tag_of(mixed[n]):
            end = word & END_MASK
            prefetch(tokens + 4 * end - 32)
            prefetch(tokens + 4 * end + 28)
            if slot_words == 2:
                end = signed(load_u32(address + 4))
                prefetch(tokens + 4 * end - 32)
                prefetch(tokens + 4 * end + 28)
            break


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
    chunks = np.empty((_GROUP, _MAX_SIZES + 1), dtype=np.int64)
    block = np.empty(BLOCK, dtype=np.uint64)
    addresses = np.empty(BLOCK, dtype=np.int64)
    is_near = np.zeros(_GROUP, dtype=np.bool_)
    pattern = np.empty(_MAX_SIZES, dtype=np.uint32)
    num_texts = len(headers)
    for t in range(min(_GROUP, num_texts)):
        prefetch_header(headers[t])
    for group in range(0, num_texts, _GROUP):
        stop = min(group + _GROUP, num_texts)
        for t in range(group, stop):
            last = load_i64(headers[t] + 8 * TOKENS) + 4 * load_i64(headers[t] + 8 * LENGTH) - 4
            prefetch(last)
            prefetch(last - 64)
        for t in range(stop, min(stop + _GROUP, num_texts)):
            prefetch_header(headers[t])
        for t in range(group, stop):
            hash_suffixes(headers[t], base, mixed[t - group])
        for t in range(group, stop):
            is_near[t - group] = wanted[t] > 0 and lacks(headers[t]) <= most_lacking
            prefetch_slots(
                headers[t], base, mixed[t - group], chunks[t - group], not is_near[t - group]
            )
        for t in range(group, stop):
            statuses[t] = DONE
            if not is_near[t - group]:
                statuses[t], cost = catch_up(headers[t], base, budget - spent, block, addresses)
                spent += cost
            lengths[t] = load_i64(headers[t] + 8 * LENGTH)
            draft_lengths[t] = 0
            reaches[t] = 0
            if load_i64(headers[t] + 8 * INDEXED) == 0 and wanted[t] > 0:
                if spent > 0 and spent >= budget:
                    statuses[t] = BEHIND
                spent += load_i64(headers[t] + 8 * LENGTH) // _SCAN_SHARE
        for t in range(group, stop):
            if statuses[t] == DONE and wanted[t] > 0:
                prefetch_source(headers[t], mixed[t - group], chunks[t - group])
        for t in range(group, stop):
            if statuses[t] == DONE and wanted[t] > 0:
                draft = drafts.ctypes.data + 4 * draft_starts[t]
                draft_lengths[t], reaches[t] = draft_of(
                    headers[t],
                    base,
                    mixed[t - group],
                    chunks[t - group],
                    wanted[t],
                    draft,
                    pattern,
                )
    return spent
