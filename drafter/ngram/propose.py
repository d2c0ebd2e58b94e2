"""Drafts for many texts in one kernel call, and brings their indexes up to date.

Owns the budget of a call: work beyond it is left to later calls. A text has an index or is scanned.
"""

import numpy as np
import numpy.typing as npt

from drafter.ngram.draft import write_draft
from drafter.ngram.index import (
    BUDGET_SPENT,
    DONE,
    MUST_SCAN,
    SCRATCH_WORDS,
    catch_up,
    count_unindexed,
)
from drafter.ngram.kmp import SCAN_WORDS, is_scanned, scan, scan_result
from drafter.ngram.match import NEAR_WORDS, match
from drafter.ngram.prefetch import prefetch_end, prefetch_header, prefetch_matches
from drafter.ngram.table import INDEXED, LENGTH, MAX_NGRAM_TOKENS
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import address_of, load_i64

SCANNED_PER_ENTRY = 16
"""So many tokens are scanned in the time that it takes to enter one n-gram."""

_GROUP = 32


@kernel
def propose_all(
    headers: npt.NDArray[np.int64],
    rooms: npt.NDArray[np.int64],
    base: np.uint64,
    budget: int,
    max_unindexed: int,
    draft_starts: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.uint32],
    scans: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    draft_lengths: npt.NDArray[np.int64],
    match_lengths: npt.NDArray[np.int64],
    statuses: npt.NDArray[np.int64],
) -> None:
    """Drafts for the texts whose index is up to date, or nearly so; indexes the others.

    Args:
        headers: addresses of the texts, each once, [num_texts].
        rooms: how long each draft may be; 0: only the index is brought up to date, [num_texts].
        base: of the n-grams' hashes.
        budget: how many n-grams may be entered in all. Scans count too. A text that it does not
            suffice for is `BUDGET_SPENT`.
        max_unindexed: a text with at most so many unindexed tokens gets its draft at once: those
            tokens are scanned, and stay unindexed.
        draft_starts: where in `drafts` each draft goes, [num_texts].
        drafts: receives the drafts.
        scans: addresses of `SCAN_WORDS` words each, zeros at first, in which a scan
            continues from call to call; 0: there is none, and a text that needs one is `MUST_SCAN`,
            [num_texts].
        lengths: receives the number of tokens of each text, [num_texts].
        draft_lengths: receives the drafts' lengths; 0: nothing matched, [num_texts].
        match_lengths: receives the lengths of the drafts' matches, [num_texts].
        statuses: receives the texts' statuses, see `index.py`, [num_texts].
    """
    spent = 0
    mixed = np.empty((_GROUP, MAX_NGRAM_TOKENS + 1), dtype=np.uint64)
    slots = np.empty(_GROUP, dtype=np.int64)
    is_looked_up = np.zeros(_GROUP, dtype=np.bool_)
    scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
    progress = np.empty(SCAN_WORDS, dtype=np.int64)
    near = np.empty(NEAR_WORDS, dtype=np.int64)
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
            if rooms[t] == 0 or count_unindexed(header) > max_unindexed:
                statuses[t], cost = catch_up(header, base, budget - spent, address_of(scratch))
                spent += cost
            lengths[t] = length
            draft_lengths[t] = 0
            match_lengths[t] = 0
            is_looked_up[t - group] = statuses[t] == DONE and rooms[t] > 0
            if not is_looked_up[t - group]:
                continue
            if load_i64(header + 8 * INDEXED) == 0:
                is_looked_up[t - group] = False
                if spent > 0 and spent >= budget:
                    statuses[t] = BUDGET_SPENT
                    continue
                progress[:] = 0
                words = scans[t] if scans[t] != 0 else address_of(progress)
                num_scanned = scan(header, words, max(budget - spent, 1) * SCANNED_PER_ENTRY)
                spent += 1 + num_scanned // SCANNED_PER_ENTRY
                if not is_scanned(words):
                    statuses[t] = MUST_SCAN
                    continue
                size, earliest, latest = scan_result(words)
                draft = address_of(drafts) + 4 * draft_starts[t]
                draft_lengths[t], match_lengths[t] = write_draft(
                    header, size, earliest, latest, rooms[t], draft
                )
        prefetch_matches(headers[group:stop], is_looked_up, base, mixed, slots)
        for t in range(group, stop):
            if is_looked_up[t - group]:
                size, earliest, latest = match(headers[t], base, address_of(near))
                draft = address_of(drafts) + 4 * draft_starts[t]
                draft_lengths[t], match_lengths[t] = write_draft(
                    headers[t], size, earliest, latest, rooms[t], draft
                )
