"""One kernel call for a whole batch: every text's index catches up, every text gets its draft.

Owns what one call does of that: what costs more than its budget is left to later calls. What a
draft is, is known to `draft_kernel.py`.
"""

import numpy as np
import numpy.typing as npt

from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_i64
from drafter.ngram.draft import SCANNED_DRAFT_WORDS, draft_of, scan_draft, scanned_draft
from drafter.ngram.index import BEHIND, DONE, MUST_SCAN, SCRATCH_WORDS, catch_up, lacks
from drafter.ngram.prefetch import prefetch_end, prefetch_header, prefetch_matches
from drafter.ngram.table import CHAINED, INDEXED, LENGTH

SCANNED_PER_ENTRY = 16
"""So many tokens are scanned in the time in which one n-gram is entered."""

_GROUP = 32
_MAX_SIZES = 32


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
        budget: how many n-grams may be entered in all; what is left over is `BEHIND`. Scans, and
            the further matches of chained drafts, count too.
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
    progress = np.empty(SCANNED_DRAFT_WORDS, dtype=np.int64)
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
            lengths[t] = length
            draft_lengths[t] = 0
            reaches[t] = 0
            is_asked[t - group] = statuses[t] == DONE and wanted[t] > 0
            if not is_asked[t - group]:
                continue
            if load_i64(header + 8 * INDEXED) == 0:
                is_asked[t - group] = False
                if spent > 0 and spent >= budget:
                    statuses[t] = BEHIND
                    continue
                progress[:] = 0
                allowed = max(budget - spent, 1) * SCANNED_PER_ENTRY
                draft = drafts.ctypes.data + 4 * draft_starts[t]
                num_scanned = scan_draft(header, wanted[t], draft, progress.ctypes.data, allowed)
                spent += 1 + num_scanned // SCANNED_PER_ENTRY
                is_done, _, count, reach = scanned_draft(progress.ctypes.data)
                if is_done:
                    draft_lengths[t], reaches[t] = count, reach
                else:
                    statuses[t] = MUST_SCAN
        prefetch_matches(headers[group:stop], is_asked, base, mixed, slots)
        for t in range(group, stop):
            if is_asked[t - group]:
                if spent > 0 and spent >= budget and load_i64(headers[t] + 8 * CHAINED) != 0:
                    statuses[t] = BEHIND
                    continue
                draft = drafts.ctypes.data + 4 * draft_starts[t]
                draft_lengths[t], reaches[t], cost = draft_of(
                    headers[t], base, wanted[t], draft, pattern, alike
                )
                spent += cost
    return spent
