"""One message on its way to its answer: a row per sequence, in arrays that serve one stream.

Owns the arrays, what protobuf parses of a message, and which histories a batch holds. Does not know
in which order things are done (`engine.py`).
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter.batch import scan, wire
from drafter.batch.append import make_draft_room
from drafter.batch.scan import scan_request
from drafter.batch.write import write_response
from drafter.budgets import MAX_APPENDED_UNINDEXED, MAX_LIVE_TOKENS, MIN_UNINDEXED
from drafter.history.history import History
from drafter.history.store import HistoryStore, StreamLease
from drafter.ngram.kmp import SCAN_WORDS
from servicekit.kernels.memory import address_of, untouched
from tandem.v1 import drafter_pb2

# A response without refusals: as large as drafts may make it, and the batch's id.
_RESPONSE_BYTES = wire.MAX_MESSAGE_BYTES + 16
_NONE = np.frombuffer(b"", dtype=np.uint8)


class Batch:
    """The batch of a stream, which has one at a time, or of a unary call.

    The arrays are as large as a message may ask for; they take memory only where they are written
    to, however many streams came before. Rows hold addresses of texts, which only the batch's own
    kernels leave where they are. So `hold` comes before anything else that may move or free a text,
    and `refresh` after a pause in which others may have.

    Attributes:
        lease: of the stream; None: sequences that it creates are tied to no stream.
        num_rows: how many deltas the message has.
        max_draft_tokens: what the answer has room for, per sequence.
        releases: what the message releases, before anything else.
        rows: see `scan.ID_START`.
        tally: how many rows of the answered batch came to each outcome.
        backlog: (slot, remaining work) of the answered batch's texts, see `scan.SHORT_TAIL`.
        scanned_s: when the scan began, by `time.perf_counter`.
        duration_s: how long scanning and answering took; set by the engine.
    """

    def __init__(self, store: HistoryStore, lease: StreamLease | None) -> None:
        """Makes the arrays.

        Args:
            store: the known sequences.
            lease: of the stream; None: of a unary call.
        """
        self.lease = lease
        self.num_rows = 0
        self.max_draft_tokens = 0
        self.releases: Sequence[drafter_pb2.Release] = ()
        max_rows = wire.MAX_SEQUENCES_PER_BATCH
        self.rows: npt.NDArray[np.int64] = untouched(max_rows * scan.FIELDS, np.int64).reshape(
            max_rows, scan.FIELDS
        )
        self.drafts: npt.NDArray[np.uint32] = untouched(
            wire.MAX_MESSAGE_BYTES // wire.MAX_TOKEN_BYTES, np.uint32
        )
        self.backlog: list[tuple[int, int]] = []
        self.tally = np.zeros(scan.NUM_OUTCOMES, dtype=np.int64)
        self.scanned_s = self.duration_s = 0.0
        self._store = store
        max_odd = max_rows + wire.MAX_RELEASES_PER_BATCH
        self._odd_fields = untouched(max_odd * 3, np.int64).reshape(max_odd, 3)
        self._backlog = untouched(max_rows * 2, np.int64).reshape(max_rows, 2)
        self._head = np.zeros(3, dtype=np.int64)
        self._response = untouched(_RESPONSE_BYTES, np.uint8)
        self._payload = b""
        self.payload: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        # Of the first rows, as far as they are held.
        self._histories: list[History | None] = []
        self._odd: dict[int, drafter_pb2.SequenceDelta] = {}
        self._refusals = bytearray()
        self._scans: dict[int, npt.NDArray[np.int64]] = {}

    def scan(self, payload: bytes) -> None:
        """Reads a message in the place of the last one.

        Args:
            payload: a ProposeRequest.

        Raises:
            DecodeError: it is none.
            MalformedBatchError, MessageLimitError: it is not one that a client may send.
        """
        self.scanned_s = time.perf_counter()
        self._histories.clear()
        self._odd.clear()
        self._scans.clear()
        self._refusals.clear()
        if not self._scan(payload, is_utf8=False):
            is_regular = self._scan(wire.normalize(payload), is_utf8=True)
            assert is_regular, "protobuf writes what the scan reads"
        self.max_draft_tokens = wire.max_draft_tokens(self.num_rows)
        self.releases = ()
        if self._head[1] > 0:
            self._parse_odd()

    @property
    def is_bulk(self) -> bool:
        """Whether it brings long text, which live batches must not wait for."""
        return bool(self._head[2] > MAX_LIVE_TOKENS)

    def delta(self, i: int) -> drafter_pb2.SequenceDelta:
        """Returns the delta of a row as protobuf parses it."""
        if i not in self._odd:
            field = self._payload[self.rows[i, scan.START] : self.rows[i, scan.END]]
            self._odd[i] = drafter_pb2.ProposeRequest.FromString(field).sequences[0]
        return self._odd[i]

    def ask(self, i: int, history: History) -> None:
        """Opens a row that has been appended."""
        self.hold(i)
        self._histories.append(history)
        self.rows[i, scan.SLOT] = history.slot
        self.rows[i, scan.TEXT] = history.address
        make_draft_room(self.rows, i, history.length, self.max_draft_tokens)

    def answer_indexing(self, i: int) -> None:
        """Answers an open row without a draft: its text is still to be indexed."""
        self.rows[i, scan.DRAFT_ROOM] = 0
        self.rows[i, scan.OUTCOME] = scan.INDEXING

    def refuse(self, i: int, outcome: int, *, known_length: int = 0, message: str = "") -> None:
        """Answers a row, open or not appended, with a refusal.

        Args:
            i: the row.
            outcome: `OUT_OF_SYNC` or `INVALID`.
            known_length: from where the client must send again, if it is out of sync.
            message: names the invalid field.
        """
        if i >= len(self._histories):
            self.hold(i)
            self._histories.append(None)
            make_draft_room(self.rows, i, 0, 0)
        refusal = wire.refusal(self.delta(i).sequence_id, outcome, known_length, message)
        self._histories[i] = None
        self.rows[i, [scan.SLOT, scan.OUTCOME]] = scan.UNKNOWN, outcome
        self.rows[i, [scan.TEXT, scan.TEXT_LENGTH]] = len(self._refusals), len(refusal)
        self._refusals += refusal

    def hold(self, stop: int) -> None:
        """Keeps the texts of rows before `stop`, which kernels have appended to, in memory."""
        by_slot = self._store.by_slot
        first = len(self._histories)
        if first < stop:
            self._histories += [by_slot[slot] for slot in self.rows[first:stop, scan.SLOT].tolist()]

    def refresh(self) -> None:
        """Reads the addresses of held texts anew, which others may have made grow."""
        for i, history in enumerate(self._histories):
            if history is not None:
                self.rows[i, scan.TEXT] = history.address

    def history(self, i: int) -> History:
        """Returns the held history of an open row."""
        history = self._histories[i]
        assert history is not None, "only refused rows have none"
        return history

    def is_open(self, i: int) -> bool:
        """Whether a row is not answered yet."""
        return bool(self.rows[i, scan.OUTCOME] == scan.OPEN)

    def open_rows(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Returns (row, why it is open) of rows [first, stop)."""
        part = self.rows[first:stop]
        found = np.flatnonzero(part[:, scan.OUTCOME] == scan.OPEN)
        return list(zip((found + first).tolist(), part[found, scan.WHY_OPEN].tolist(), strict=True))

    def begin_scan(self, i: int) -> None:
        """Lets the scan for a row's draft go on from call to call."""
        if i not in self._scans:
            self._scans[i] = np.zeros(SCAN_WORDS, dtype=np.int64)
            self.rows[i, scan.SCAN] = address_of(self._scans[i])

    def write(self) -> bytes:
        """Returns the answer, a ProposeResponse, once no row is open; its texts are let go."""
        refusals = _NONE
        if self._refusals:
            refusals = np.frombuffer(bytes(self._refusals), dtype=np.uint8)
            if len(self._response) < _RESPONSE_BYTES + len(refusals):
                self._response = np.empty(_RESPONSE_BYTES + len(refusals), dtype=np.uint8)
        num_bytes, num_backlog = write_response(
            self.payload,
            self.rows,
            self.num_rows,
            int(self._head[0]),
            self.drafts,
            refusals,
            self._response,
            self.tally,
            self._backlog,
            MIN_UNINDEXED,
            MAX_APPENDED_UNINDEXED,
        )
        self._histories.clear()
        self.backlog = self._backlog[:num_backlog].tolist()
        return self._response[:num_bytes].tobytes()

    def slots_with(self, kind: int) -> list[int]:
        """Returns the slots of answered texts that have a backlog of a kind."""
        return [slot for slot, left in self.backlog if left == kind]

    def _scan(self, payload: bytes, *, is_utf8: bool) -> bool:
        self._payload = payload
        self.payload = np.frombuffer(payload, dtype=np.uint8)
        count = scan_request(
            self.payload,
            self._store.table.seed,
            MAX_LIVE_TOKENS,
            is_utf8,
            self.rows,
            self._odd_fields,
            self._head,
        )
        self.num_rows = max(count, 0)
        return count != scan.IRREGULAR

    def _parse_odd(self) -> None:
        """Parses the releases and the odd deltas; raises as `scan` does."""
        fields = self._odd_fields[: self._head[1]].tolist()
        payload = b"".join([self._payload[start:end] for _, start, end in fields])
        request = drafter_pb2.ProposeRequest.FromString(payload)
        wire.check_counts(request)
        self.releases = request.releases
        odd = [row for row, _, _ in fields if row >= 0]
        self._odd = dict(zip(odd, request.sequences, strict=True))
