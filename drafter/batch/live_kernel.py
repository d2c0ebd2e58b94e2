"""A live batch answered in one kernel call: from the message's bytes to the answer's.

Owns the order of that: the message is scanned; the tokens of all sequences are taken; drafts are
found in the sequences themselves and in their pools; the answer is written. It goes on as long as
everything is plain (`take_kernel.py`), and says where it stopped, for others to go on from there.

What it works on is named by the desk (`live_desk.py`), which belongs to `live_answerer.py`.
"""

import numpy as np
import numpy.typing as npt

from drafter.batch.append import note_wanted, take_plain
from drafter.batch.live_desk import (
    ANSWER,
    BEHIND,
    BUDGET,
    FEEDING,
    GENERATION,
    HASH_BASE,
    HEADERS,
    HEADS,
    INDEX_BUDGET,
    MOST_DRAFT_TOKENS,
    MOST_LACKING_WHEN_ANSWERED,
    MOST_LACKING_WHEN_TAKEN,
    MOST_PLAIN_TOKENS,
    MOST_ROWS,
    MOST_TOKENS,
    NUM_BEHIND,
    NUM_BY_OUTCOME,
    NUM_BYTES,
    NUM_FEEDING,
    NUM_ROWS,
    NUM_TAKEN,
    REQUEST,
    SLOTS,
    STATUSES,
    WANTED,
    Desk,
    arena_of,
    is_wanted_of,
    numbers_of,
    request_of,
    rows_of,
    table_of,
)
from drafter.batch.scan import (
    APPENDED,
    BASE,
    BATCH_ID,
    DRAFT,
    ID_BYTES,
    ID_START,
    IRREGULAR,
    IS_PLAIN,
    NO_MATCH,
    NUM_TOKENS,
    POOL_DRAFT,
    TOKENS_END,
    TOKENS_START,
    read_varint,
    scan_request,
)
from drafter.batch.write import put_number, put_proposal
from drafter.history.id_table import HEADER, OLDEST
from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_i64
from drafter.ngram.index import DONE, lacks
from drafter.ngram.propose import answer_texts
from drafter.ngram.table import CAPACITY, LENGTH
from drafter.pool_index.link import has_old_link, is_feed_due
from drafter.pool_index.propose import draft_from_pools

LEAST_INDEXED = 32
"""A text that lacks fewer tokens in its index is left as it is: those of several steps together
cost little more to index than those of one, and to look through them costs less. So far below
`MOST_LACKING` that the next steps' tokens fit too."""

ANSWERED, NOT_PLAIN, STOPPED, MUST_EXTEND, MUST_LINK = range(5)
"""What came of a call: the answer is there; nothing was done; rows from `NUM_TAKEN` on are not
taken, or all are and some cannot be answered in one call; the row `NUM_TAKEN` needs room for its
tokens; a text's link to its pool is old."""


@kernel
def answer_live(desk: Desk, num_bytes: int, now_s: float, idle_ttl_s: float) -> int:
    """Answers a batch, if everything about it is plain.

    Args:
        desk: with the message where `REQUEST` says.
        num_bytes: of the message.
        now_s: when its sequences are used.
        idle_ttl_s: if one was not used for so long, nothing is done: it has to be forgotten first.

    Returns:
        See `ANSWERED`.
    """
    table = table_of(desk)
    oldest = table.ends[OLDEST]
    if oldest >= 0 and now_s - table.last_used_s[oldest] >= idle_ttl_s:
        return NOT_PLAIN
    rows = rows_of(desk)
    heads = desk[HEADS : HEADS + 2]
    count = scan_request(
        request_of(desk, num_bytes),
        table.seed,
        desk[MOST_TOKENS],
        desk[MOST_PLAIN_TOKENS],
        rows,
        heads,
    )
    if count == IRREGULAR or heads[1] > 0:
        return NOT_PLAIN
    for i in range(count):
        if rows[i, IS_PLAIN] == 0:
            return NOT_PLAIN
    desk[NUM_ROWS] = count
    desk[NUM_TAKEN] = 0
    return go_on_live(desk, now_s)


@kernel
def skip_row(desk: Desk) -> None:
    """Says that the tokens of the row `NUM_TAKEN` have been appended."""
    i = desk[NUM_TAKEN]
    header = numbers_of(desk, HEADERS, MOST_ROWS)[i]
    most = numbers_of(desk, MOST_DRAFT_TOKENS, MOST_ROWS + 1)[desk[NUM_ROWS]]
    wanted = numbers_of(desk, WANTED, MOST_ROWS)
    note_wanted(rows_of(desk), i, load_i64(header + 8 * LENGTH), most, wanted, is_wanted_of(desk))
    desk[NUM_TAKEN] = i + 1


@kernel
def go_on_live(desk: Desk, now_s: float) -> int:
    """Goes on with the row `NUM_TAKEN`. See `answer_live`."""
    count = desk[NUM_ROWS]
    rows = rows_of(desk)
    slots = numbers_of(desk, SLOTS, MOST_ROWS)
    headers = numbers_of(desk, HEADERS, MOST_ROWS)
    taken = take_plain(
        request_of(desk, 0),
        rows,
        desk[NUM_TAKEN],
        count,
        table_of(desk),
        now_s,
        numbers_of(desk, MOST_DRAFT_TOKENS, MOST_ROWS + 1)[count],
        desk[MOST_LACKING_WHEN_TAKEN],
        slots,
        headers,
        numbers_of(desk, WANTED, MOST_ROWS),
        is_wanted_of(desk),
    )
    desk[NUM_TAKEN] = taken
    if taken < count:
        if slots[taken] < 0:
            return STOPPED
        header, num_tokens = headers[taken], rows[taken, NUM_TOKENS]
        length = load_i64(header + 8 * LENGTH)
        if (
            rows[taken, BASE] == length
            and length + num_tokens > load_i64(header + 8 * CAPACITY)
            and lacks(header) + num_tokens <= desk[MOST_LACKING_WHEN_TAKEN]
        ):
            return MUST_EXTEND
        return STOPPED
    if has_old_link(headers[:count], desk[GENERATION]):
        return MUST_LINK
    return _answer_taken(desk)


@kernel
def _answer_taken(desk: Desk) -> int:
    """Answers a batch that is taken."""
    count = desk[NUM_ROWS]
    all_headers = numbers_of(desk, HEADERS, MOST_ROWS)
    all_wanted = numbers_of(desk, WANTED, MOST_ROWS)
    # Rows that want nothing are indexed with the others, when the answer is on its way.
    headers, wanted, starts, lengths, reaches, known, statuses = np.empty(
        (7, count), dtype=np.int64
    )
    num_asked, num_draft_tokens = 0, 0
    for i in range(count):
        if all_wanted[i] > 0:
            headers[num_asked] = all_headers[i]
            wanted[num_asked] = all_wanted[i]
            starts[num_asked] = num_draft_tokens
            num_draft_tokens += all_wanted[i]
            num_asked += 1
    drafts = np.empty(num_draft_tokens, dtype=np.uint32)
    is_from_pool = np.zeros(num_asked, dtype=np.bool_)
    headers, wanted, starts = headers[:num_asked], wanted[:num_asked], starts[:num_asked]
    answer_texts(
        headers,
        wanted,
        np.uint64(desk[HASH_BASE]),
        desk[BUDGET],
        desk[MOST_LACKING_WHEN_ANSWERED],
        starts,
        drafts,
        lengths,
        reaches,
        known,
        statuses,
    )
    for t in range(num_asked):
        if statuses[t] != DONE:
            return STOPPED
    draft_from_pools(
        arena_of(desk), headers, wanted, statuses, starts, drafts, lengths, reaches, is_from_pool
    )

    rows = rows_of(desk)
    is_wanted = is_wanted_of(desk)
    desk[NUM_BY_OUTCOME : NUM_BY_OUTCOME + POOL_DRAFT + 1] = 0
    slots, behind = numbers_of(desk, SLOTS, MOST_ROWS), numbers_of(desk, BEHIND, MOST_ROWS)
    num_behind = 0
    feeding = numbers_of(desk, FEEDING, MOST_ROWS)
    num_feeding = 0
    out = put_number(desk[ANSWER], BATCH_ID, desk[HEADS])
    t = 0
    for i in range(count):
        outcome = NO_MATCH if is_wanted[i] else APPENDED
        reach, num_tokens, tokens = 0, 0, 0
        if all_wanted[i] > 0:
            if lengths[t] > 0:
                outcome = POOL_DRAFT if is_from_pool[t] else DRAFT
                reach, num_tokens = reaches[t], lengths[t]
                tokens = drafts.ctypes.data + 4 * starts[t]
            t += 1
        desk[NUM_BY_OUTCOME + outcome] += 1
        num_lacking = lacks(all_headers[i])
        if num_lacking - rows[i, NUM_TOKENS] < LEAST_INDEXED <= num_lacking:
            behind[num_behind] = slots[i]
            num_behind += 1
        if is_feed_due(all_headers[i]):
            feeding[num_feeding] = slots[i]
            num_feeding += 1
        out = put_proposal(
            out,
            desk[REQUEST] + rows[i, ID_START],
            rows[i, ID_BYTES],
            outcome,
            load_i64(all_headers[i] + 8 * LENGTH),
            reach,
            tokens,
            num_tokens,
        )
    desk[NUM_BEHIND] = num_behind
    desk[NUM_FEEDING] = num_feeding
    desk[NUM_BYTES] = out - desk[ANSWER]
    return ANSWERED


@kernel
def tokens_of_row(desk: Desk, i: int) -> npt.NDArray[np.uint32]:
    """Returns the tokens that a row brings."""
    rows = rows_of(desk)
    token_ids = np.empty(rows[i, NUM_TOKENS], dtype=np.uint32)
    at = rows[i, TOKENS_START]
    for k in range(len(token_ids)):
        value, at = read_varint(desk[REQUEST], at, rows[i, TOKENS_END])
        token_ids[k] = value
    return token_ids


@kernel
def index_live(desk: Desk, slots: npt.NDArray[np.int64]) -> int:
    """Enters into the indexes what answered texts lack, as far as one call's budget goes.

    Args:
        desk: `STATUSES` takes what became of those that are left over, see `answer_texts`.
        slots: of the sequences, up to `MOST_ROWS`; whatever is at a slot by now is indexed. Those
            that are left over are moved to its beginning.

    Returns:
        How many are left over.
    """
    headers, nothing, lengths, reaches, known, kept = np.empty((6, len(slots)), dtype=np.int64)
    statuses = numbers_of(desk, STATUSES, MOST_ROWS)
    records = table_of(desk).records
    num_texts = 0
    for slot in slots:
        if records[slot, HEADER] != 0:
            headers[num_texts] = records[slot, HEADER]
            kept[num_texts] = slot
            nothing[num_texts] = 0
            num_texts += 1
    answer_texts(
        headers[:num_texts],
        nothing,
        np.uint64(desk[HASH_BASE]),
        desk[INDEX_BUDGET],
        0,
        nothing,
        np.empty(0, dtype=np.uint32),
        lengths,
        reaches,
        known,
        statuses,
    )
    num_left = 0
    for t in range(num_texts):
        if statuses[t] != DONE:
            slots[num_left] = kept[t]
            statuses[num_left] = statuses[t]
            num_left += 1
    return num_left
