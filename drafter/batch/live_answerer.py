"""Answers live batches whole, in one kernel call, and indexes what they brought.

Owns the desk that the kernel works on (`live_desk.py`), and what has to be done between two calls:
a text's buffer grows, a sequence's link to its pool is made anew. What is not plain is left to
`LiveBatch`, and those who go on are told how far it came (`hand_over`).
"""

import time

import numpy as np
import numpy.typing as npt

from drafter.batch import live_desk, wire
from drafter.batch.answerer import BUDGET, MOST_LACKING
from drafter.batch.batch_rows import BatchRows
from drafter.batch.drafting import BACKGROUND_TOKENS, Drafting
from drafter.batch.live_desk import (
    DESK_WORDS,
    MOST_ROWS,
    NUM_BEHIND,
    NUM_BY_OUTCOME,
    NUM_BYTES,
    NUM_FEEDING,
    NUM_ROWS,
    NUM_TAKEN,
)
from drafter.batch.live_kernel import (
    ANSWERED,
    MUST_EXTEND,
    MUST_LINK,
    answer_live,
    go_on_live,
    index_live,
    skip_row,
    tokens_of_row,
)
from drafter.batch.scan import FIELDS
from drafter.ngram.index import MUST_GROW

INDEX_BUDGET = 1_024
"""How many n-grams one step enters that nobody waits for: a batch that comes meanwhile waits for
some 50 us, and so it does at each of the loop's turns on its way."""

GROWTH_S = 0.0001
"""How long such a step goes on to grow tables."""


class LiveAnswerer:
    """Owned by the event loop. Nothing of a batch may be asked for after the next `answer`."""

    def __init__(self, drafting: Drafting) -> None:
        """Makes its arrays.

        Args:
            drafting: histories and pools.
        """
        self._drafting = drafting
        self._store = drafting.store
        self._pools = drafting.pools
        self._idle_ttl_s = drafting.store.limits.idle_ttl_s
        self._desk = np.zeros(DESK_WORDS, dtype=np.int64)
        # Reads and writes single words faster than the array does.
        self._words = self._desk.data
        self._request = np.zeros(wire.MAX_MESSAGE_BYTES, dtype=np.uint8).data
        self._answer = np.zeros(wire.MAX_MESSAGE_BYTES, dtype=np.uint8).data
        rows: npt.NDArray[np.int64] = np.zeros((6, MOST_ROWS), dtype=np.int64)
        self._slots, self._headers, self._wanted, self._statuses = rows[:4]
        self._behind: npt.NDArray[np.int64] = rows[4]
        self._feeding: npt.NDArray[np.int64] = rows[5]
        self._is_wanted = np.zeros(MOST_ROWS, dtype=np.bool_)
        self._arrays: dict[int, npt.NDArray[np.generic]] = {
            live_desk.REQUEST: np.asarray(self._request),
            live_desk.ANSWER: np.asarray(self._answer),
            live_desk.ROWS: np.zeros((MOST_ROWS, FIELDS), dtype=np.int64),
            live_desk.SLOTS: self._slots,
            live_desk.HEADERS: self._headers,
            live_desk.WANTED: self._wanted,
            live_desk.IS_WANTED: self._is_wanted,
            live_desk.STATUSES: self._statuses,
            live_desk.BEHIND: self._behind,
            live_desk.FEEDING: self._feeding,
            live_desk.MOST_DRAFT_TOKENS: np.array(
                [wire.most_draft_tokens(count) for count in range(MOST_ROWS + 1)], dtype=np.int64
            ),
            live_desk.BUCKETS: self._store.table.buckets,
            live_desk.IDS: self._store.table.ids,
            live_desk.RECORDS: self._store.table.records,
            live_desk.LAST_USED_S: self._store.table.last_used_s,
            live_desk.ENDS: self._store.table.ends,
        }
        for name, array in self._arrays.items():
            self._desk[name] = array.ctypes.data
        for name, number in (
            (live_desk.NUM_BUCKETS, len(self._store.table.buckets)),
            (live_desk.MOST_SEQUENCES, len(self._store.table.records)),
            (live_desk.HASH_BASE, int(self._store.table.seed.view(np.int64))),
            (live_desk.MOST_TOKENS, wire.MAX_TOKENS_PER_DELTA),
            (live_desk.MOST_PLAIN_TOKENS, wire.MAX_LIVE_TOKENS),
            (live_desk.MOST_LACKING_WHEN_TAKEN, BACKGROUND_TOKENS),
            (live_desk.MOST_LACKING_WHEN_ANSWERED, MOST_LACKING),
            (live_desk.BUDGET, BUDGET),
            (live_desk.INDEX_BUDGET, INDEX_BUDGET),
        ):
            self._desk[name] = number

    @property
    def num_taken(self) -> int:
        """How many rows were taken of the batch that could not be answered; 0: nothing was done."""
        return self._words[NUM_TAKEN]

    @property
    def num_by_outcome(self) -> list[int]:
        """How many rows of the answered batch came to what, by `batch_wire.OPEN` and so on."""
        return self._words[NUM_BY_OUTCOME:].tolist()

    @property
    def behind(self) -> npt.NDArray[np.int64]:
        """The slots of those of the answered batch that are to be indexed now; a copy."""
        return self._behind[: self._words[NUM_BEHIND]].copy()

    @property
    def feeding(self) -> list[int]:
        """The slots of those of the answered batch that are to feed their pools."""
        slots: list[int] = self._feeding[: self._words[NUM_FEEDING]].tolist()
        return slots

    def answer(self, payload: bytes) -> bytes | None:
        """Answers a message, unless something about it is not plain.

        Args:
            payload: which should be a ProposeRequest.

        Returns:
            A ProposeResponse; None: see `num_taken`.
        """
        words = self._words
        words[NUM_TAKEN] = 0
        num_bytes = len(payload)
        now_s = self._store.now_s()
        if num_bytes > len(self._request) or self._store.has_expired_stream(now_s):
            return None
        self._request[:num_bytes] = payload
        if self._pools.store.generation != words[live_desk.GENERATION]:
            self._see_pools()
        came_to = answer_live(self._desk, num_bytes, now_s, self._idle_ttl_s)
        while came_to != ANSWERED:
            if came_to == MUST_LINK:
                self._link()
            elif came_to != MUST_EXTEND or not self._extend(now_s):
                return None
            came_to = go_on_live(self._desk, now_s)
        return bytes(self._answer[: words[NUM_BYTES]])

    def forget_batch(self) -> None:
        """Hands over nothing of a batch that failed half-way."""
        self._words[NUM_TAKEN] = 0

    def hand_over(self, rows: BatchRows) -> None:
        """Gives what was taken of the batch that could not be answered to those who go on."""
        count = self.num_taken
        rows.headers[:count] = self._headers[:count]
        rows.wanted[:count] = self._wanted[:count]
        rows.is_wanted[:count] = self._is_wanted[:count]
        by_slot = self._store.by_slot
        rows.histories[:count] = [by_slot[slot] for slot in self._slots[:count].tolist()]

    def index_step(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Goes on entering what the texts at these slots lack; returns those that lack more.

        Whatever is at a slot by now is indexed: another text is as well served.
        """
        num_left = index_live(self._desk, slots)
        if num_left == 0:
            return slots[:0]
        end_s = time.perf_counter() + GROWTH_S
        for slot, status in zip(
            slots[:num_left].tolist(), self._statuses[:num_left].tolist(), strict=True
        ):
            history = self._store.by_slot[slot]
            if status < MUST_GROW or history is None or time.perf_counter() >= end_s:
                continue
            self._drafting.grow_table(history, status - MUST_GROW)
        return slots[:num_left]

    def _see_pools(self) -> None:
        """Puts down where the pools are by now."""
        arena = self._pools.store.arena
        self._arrays[live_desk.ARENA] = arena
        self._desk[live_desk.ARENA] = arena.ctypes.data
        self._desk[live_desk.ARENA_WORDS] = len(arena)
        self._desk[live_desk.GENERATION] = self._pools.store.generation

    def _link(self) -> None:
        histories = [
            self._store.by_slot[slot] for slot in self._slots[: self._words[NUM_ROWS]].tolist()
        ]
        self._pools.link(history for history in histories if history is not None)

    def _extend(self, now_s: float) -> bool:
        """Takes a row whose text has no room for its tokens; returns whether that could be done."""
        i = self.num_taken
        history = self._store.by_slot[int(self._slots[i])]
        assert history is not None, "the kernel found it"
        if not self._store.extend(history, tokens_of_row(self._desk, i), now_s):
            return False
        skip_row(self._desk)
        return True
