"""One message on its way to its answer: a row per sequence, and the histories that it holds.

Owns the rows, and the answer as it is filled in. Does not know in which order things are done
(`engine.py`).
"""

import time

import numpy as np
import numpy.typing as npt

from drafter.batch import wire
from drafter.batch.answer import (
    APPENDED,
    DRAFT,
    DRAFT_LENGTH,
    DRAFT_ROOM,
    DRAFT_START,
    INDEXING,
    INVALID,
    LENGTH_LIMIT,
    MATCH_LENGTH,
    NO_MATCH,
    NUM_COLUMNS,
    NUM_OUTCOMES,
    OPEN,
    OUT_OF_SYNC,
    OUTCOME,
    POOL_DRAFT,
    SCAN,
    TEXT,
    TEXT_LENGTH,
    WHY_OPEN,
)
from drafter.budgets import MAX_AWAITED_NGRAMS, MAX_LIVE_TOKENS
from drafter.history.history import History, SequenceDelta
from drafter.history.store import StreamLease
from drafter.ngram.kmp import SCAN_WORDS
from servicekit.kernels.memory import address_of
from tandem.v1 import drafter_pb2

_SOURCES = {DRAFT: drafter_pb2.SOURCE_SEQUENCE, POOL_DRAFT: drafter_pb2.SOURCE_POOL}
_STATUSES = {
    APPENDED: drafter_pb2.STATUS_OK,
    NO_MATCH: drafter_pb2.STATUS_NO_MATCH,
    INDEXING: drafter_pb2.STATUS_INDEXING,
    DRAFT: drafter_pb2.STATUS_OK,
    POOL_DRAFT: drafter_pb2.STATUS_OK,
    OUT_OF_SYNC: drafter_pb2.STATUS_OUT_OF_SYNC,
    INVALID: drafter_pb2.STATUS_INVALID,
}


class Batch:
    """The batch of one message.

    Its rows hold addresses of texts, which it keeps in memory. But others may move them: `locate`
    reads the addresses, once all rows are appended and after every pause.

    Attributes:
        request: the message.
        lease: of the stream; None: sequences that it creates are tied to no stream.
        num_rows: how many deltas the message has.
        is_bulk: whether it brings long text, which live batches must not wait for.
        rows: see `answer.TEXT`, [num_rows, NUM_COLUMNS]; made by `place_drafts`.
        histories: of the rows in order, as far as they were appended; None: the row is refused.
        drafts: tokens; a row's are at its `DRAFT_START`.
        response: the answer, as far as it is written.
        started_s: when the work on it began, by `time.perf_counter`.
        duration_s: how long it took; set by the engine.
    """

    def __init__(self, request: drafter_pb2.ProposeRequest, lease: StreamLease | None) -> None:
        """Takes a message.

        Args:
            request: the message.
            lease: of the stream; None: of a unary call.

        Raises:
            MalformedBatchError, MessageLimitError: it is not one that a client may send.
        """
        self.started_s = time.perf_counter()
        self._sequence_ids = wire.checked_sequence_ids(request)
        self.request = request
        self.lease = lease
        self.num_rows = len(request.sequences)
        self.is_bulk = any(len(delta.token_ids) > MAX_LIVE_TOKENS for delta in request.sequences)
        self.rows: npt.NDArray[np.int64] = np.empty((0, NUM_COLUMNS), dtype=np.int64)
        self.histories: list[History | None] = []
        self.drafts: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self.response = drafter_pb2.ProposeResponse(batch_id=request.batch_id)
        self.duration_s = 0.0
        self._max_draft_tokens = wire.max_draft_tokens(self.num_rows)
        # Of the rows so far, as Python numbers: an array is made of them at once.
        self._lengths: list[int] = []
        self._limits: list[int] = []
        self._rooms: list[int] = []
        self._outcomes: list[int] = []
        # The answered rows as Python numbers, once writing has begun.
        self._answers: list[list[int]] = []
        self._refusals: dict[int, tuple[int, str]] = {}
        self._scans: dict[int, npt.NDArray[np.int64]] = {}

    def ask(self, delta: SequenceDelta, history: History) -> None:
        """Takes the next row, which was appended; it is open if a draft is to be found now."""
        length, outcome = history.length, OPEN
        room = min(delta.max_draft_tokens, self._max_draft_tokens)
        if delta.max_length > 0:
            room = max(0, min(room, delta.max_length - length))
        if room == 0:
            outcome = NO_MATCH if delta.max_draft_tokens > 0 else APPENDED
        elif history.num_unindexed * history.params.num_tables > MAX_AWAITED_NGRAMS:
            room, outcome = 0, INDEXING
        self._add(history, length, delta.max_length, room, outcome)

    def refuse_next(self, outcome: int, *, known_length: int = 0, message: str = "") -> None:
        """Takes the next row, which could not be appended.

        Args:
            outcome: `OUT_OF_SYNC` or `INVALID`.
            known_length: from where the client must send again, if it is out of sync.
            message: names the invalid field.
        """
        self._refusals[len(self.histories)] = known_length, message
        self._add(None, 0, 0, 0, outcome)

    def refuse_open(self, i: int, message: str) -> None:
        """Answers an open row as invalid."""
        self.histories[i] = None
        self.rows[i, OUTCOME] = INVALID
        self._refusals[i] = 0, message

    def place_drafts(self) -> None:
        """Makes the rows' array and room for the drafts, once all rows are appended."""
        self.rows = np.zeros((self.num_rows, NUM_COLUMNS), dtype=np.int64)
        for column, numbers in (
            (TEXT_LENGTH, self._lengths),
            (LENGTH_LIMIT, self._limits),
            (DRAFT_ROOM, self._rooms),
            (OUTCOME, self._outcomes),
        ):
            self.rows[:, column] = numbers
        ends = np.cumsum(self.rows[:, DRAFT_ROOM])
        self.rows[:, DRAFT_START] = ends - self.rows[:, DRAFT_ROOM]
        self.drafts = np.empty(ends[-1] if len(ends) else 0, dtype=np.uint32)

    def locate(self) -> None:
        """Reads the texts' addresses."""
        self.rows[:, TEXT] = [
            0 if history is None else history.address for history in self.histories
        ]

    def history(self, i: int) -> History:
        """Returns the history of an open row."""
        history = self.histories[i]
        assert history is not None, "only refused rows have none"
        return history

    def is_open(self, i: int) -> bool:
        """Whether a row is not answered yet."""
        return bool(self.rows[i, OUTCOME] == OPEN)

    def open_rows(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Returns (row, why it is open) of rows [first, stop)."""
        part = self.rows[first:stop]
        found = np.flatnonzero(part[:, OUTCOME] == OPEN)
        return list(zip((found + first).tolist(), part[found, WHY_OPEN].tolist(), strict=True))

    def begin_scan(self, i: int) -> None:
        """Lets the scan for a row's draft go on from call to call."""
        if i not in self._scans:
            self._scans[i] = np.zeros(SCAN_WORDS, dtype=np.int64)
            self.rows[i, SCAN] = address_of(self._scans[i])

    def write(self, i: int) -> None:
        """Adds the answer to a row to the response; in order of the rows, once none is open."""
        if i == 0:
            self._answers = self.rows.tolist()
        row = self._answers[i]
        proposal = self.response.proposals.add()
        proposal.sequence_id = self._sequence_ids[i]
        outcome = row[OUTCOME]
        proposal.status = _STATUSES[outcome]
        if i in self._refusals:
            proposal.known_length, proposal.message = self._refusals[i]
            return
        proposal.base_length = row[TEXT_LENGTH]
        if outcome in _SOURCES:
            start = row[DRAFT_START]
            proposal.token_ids.extend(self.drafts[start : start + row[DRAFT_LENGTH]].tolist())
            proposal.matched_ngram_length = row[MATCH_LENGTH]
            proposal.source = _SOURCES[outcome]

    def tally(self) -> list[int]:
        """Returns how many rows came to each outcome."""
        counts: list[int] = np.bincount(self.rows[:, OUTCOME], minlength=NUM_OUTCOMES).tolist()
        return counts

    def _add(
        self, history: History | None, length: int, limit: int, room: int, outcome: int
    ) -> None:
        self.histories.append(history)
        self._lengths.append(length)
        self._limits.append(limit)
        self._rooms.append(room)
        self._outcomes.append(outcome)
