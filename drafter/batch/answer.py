"""Answers the open rows of a batch in one kernel call.

Owns the columns of a row, the order of sources (the sequence's own text, then its pool), and which
rows a call leaves open. How a draft is found is known to `drafter.ngram` and `drafter.pool_index`.
"""

import numpy as np
import numpy.typing as npt

from drafter.ngram.index import DONE
from drafter.ngram.propose import propose_all
from drafter.pool_index.arena import Arena
from drafter.pool_index.link import has_old_link
from drafter.pool_index.propose import propose_from_pools
from servicekit.kernels.jit import kernel

(
    TEXT,  # address of its text's header
    TEXT_LENGTH,  # the known tokens that the draft continues
    LENGTH_LIMIT,  # the delta's max_length
    DRAFT_ROOM,  # how long the draft may be
    DRAFT_START,  # where in the batch's drafts it goes
    SCAN,  # address of the progress of a long scan; 0: there is none
    OUTCOME,
    DRAFT_LENGTH,
    MATCH_LENGTH,
    WHY_OPEN,  # see `answer_rows`
) = range(10)
"""Columns of a row."""
NUM_COLUMNS = 10

OPEN, APPENDED, NO_MATCH, INDEXING, DRAFT, POOL_DRAFT, OUT_OF_SYNC, INVALID = range(8)
"""Outcomes of a row: not answered yet; and as `Status` and `Source` of the contract say."""
NUM_OUTCOMES = 8

MUST_LINK = -1
"""Status of a row whose text must be linked to its pool anew, beside those of `ngram/index.py`."""


@kernel
def answer_rows(
    rows: npt.NDArray[np.int64],
    first: int,
    stop: int,
    hash_base: np.uint64,
    budget: int,
    max_unindexed: int,
    arena: Arena,
    generation: int,
    drafts: npt.NDArray[np.uint32],
) -> int:
    """Answers the open rows of [first, stop), as far as the budget goes.

    Args:
        rows: of the batch. A row that stays open has the reason in `WHY_OPEN`.
        first: the row to begin with.
        stop: the row to end before.
        hash_base: of the n-grams' hashes.
        budget: how many n-grams may be entered, see `propose_all`.
        max_unindexed: see `propose_all`.
        arena: the memory of all pools.
        generation: of the pools; older links to a pool must be made anew.
        drafts: takes the drafts, each at its row's `DRAFT_START`.

    Returns:
        How many rows stay open.
    """
    # The row of each text; and as `propose_all` takes and gives it.
    row_of, headers, rooms, starts, scans, lengths, draft_lengths, match_lengths, statuses = (
        np.empty((9, stop - first), dtype=np.int64)
    )
    num_texts, num_open = 0, 0
    for i in range(first, stop):
        if rows[i, OUTCOME] != OPEN:
            continue
        if has_old_link(rows[i, TEXT], generation):
            rows[i, WHY_OPEN] = MUST_LINK
            num_open += 1
            continue
        row_of[num_texts] = i
        headers[num_texts] = rows[i, TEXT]
        rooms[num_texts] = rows[i, DRAFT_ROOM]
        starts[num_texts] = rows[i, DRAFT_START]
        scans[num_texts] = rows[i, SCAN]
        num_texts += 1
    is_from_pool = np.zeros(num_texts, dtype=np.bool_)
    headers, rooms = headers[:num_texts], rooms[:num_texts]
    propose_all(
        headers, rooms, hash_base, budget, max_unindexed, starts, drafts, scans,
        lengths, draft_lengths, match_lengths, statuses,
    )  # fmt: skip
    propose_from_pools(
        arena, headers, rooms, statuses, starts, drafts, draft_lengths, match_lengths, is_from_pool
    )
    for t in range(num_texts):
        i = row_of[t]
        if statuses[t] != DONE:
            rows[i, WHY_OPEN] = statuses[t]
            num_open += 1
            continue
        draft_length = draft_lengths[t]
        if rows[i, LENGTH_LIMIT] > 0:
            # Another stream may have lengthened the text since the draft's room was set.
            draft_length = min(draft_length, max(0, rows[i, LENGTH_LIMIT] - lengths[t]))
        rows[i, OUTCOME] = NO_MATCH
        if draft_length > 0:
            rows[i, OUTCOME] = POOL_DRAFT if is_from_pool[t] else DRAFT
        rows[i, TEXT_LENGTH] = lengths[t]
        rows[i, DRAFT_LENGTH] = draft_length
        rows[i, MATCH_LENGTH] = match_lengths[t]
    return num_open


@kernel
def index_texts(
    headers: npt.NDArray[np.int64],
    hash_base: np.uint64,
    budget: int,
    statuses: npt.NDArray[np.int64],
) -> None:
    """Enters unindexed tokens of texts, as far as the budget goes.

    Args:
        headers: addresses of the texts, each once, [num_texts].
        hash_base: of the n-grams' hashes.
        budget: how many n-grams may be entered.
        statuses: takes what became of each, see `propose_all`, [num_texts].
    """
    no_room, lengths, draft_lengths, match_lengths = np.zeros((4, len(headers)), dtype=np.int64)
    propose_all(
        headers, no_room, hash_base, budget, 0, no_room, np.empty(0, dtype=np.uint32), no_room,
        lengths, draft_lengths, match_lengths, statuses,
    )  # fmt: skip
