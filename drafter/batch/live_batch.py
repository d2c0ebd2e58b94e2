"""One request as it came over a stream: what kernels take of it, and what is left to `wire.py`.

Most of what a step brings is *plain*: a few more tokens of a known sequence, with room for them. A
kernel takes run after run of that, straight from the message's bytes. Whatever is not (a creation,
long text, a gap, an overlap, a buffer that must grow) is taken one by one, in its place, as a
message parsed by protobuf: the order within a batch is the same either way, and so are the answers.
A message that holds anything unusual is left to protobuf as a whole.
"""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter.batch import wire
from drafter.batch.answerer import Answerer
from drafter.batch.append import take_plain
from drafter.batch.batch_rows import BatchRows
from drafter.batch.drafting import BACKGROUND_TOKENS, Drafting
from drafter.batch.live_answerer import LiveAnswerer
from drafter.batch.live_kernel import LEAST_INDEXED
from drafter.batch.scan import (
    END,
    FIELDS,
    IRREGULAR,
    IS_PLAIN,
    NO_MATCH,
    START,
    scan_request,
)
from drafter.batch.write import write_response
from drafter.history.messages import SequenceDelta
from drafter.history.pool_drafts import PoolDrafts
from drafter.history.store import HistoryStore, StoreLimits
from drafter.ngram.params import NgramParams
from drafter.ngram.text import MIN_CAPACITY_TOKENS
from drafter.pool_index.records import PoolLimits
from drafter.pools.store import PoolStore
from tandem.v1 import drafter_pb2

# How many sequences are taken in one call: about a tenth of a millisecond.
_MOST_AT_ONCE = 512
# How many answers are made into messages in one go: about a millisecond.
_MOST_WRITTEN_AT_ONCE = 64


class Scratch:
    """What every scan writes to, and nobody keeps; owned by the event loop."""

    def __init__(self) -> None:
        self.rows = np.empty((wire.MAX_SEQUENCES_PER_BATCH, FIELDS), dtype=np.int64)


class LiveBatch:
    """A message and what a scan found in it. Owned by the request.

    Attributes:
        batch_id: the client's.
        num_sequences: how many deltas it has.
        releases: what it releases, before anything else; some may name no sequence.
        is_bulk: whether it brings long text.
    """

    def __init__(self, payload: bytes, store: HistoryStore, scratch: Scratch) -> None:
        """Scans the message, and parses what of it is not plain.

        Args:
            payload: a ProposeRequest.
            store: the known sequences.
            scratch: overwritten.

        Raises:
            DecodeError: it is none.
            MalformedBatchError, MessageLimitError: it is not one that a client may send.
        """
        self._payload = payload
        self._bytes = np.frombuffer(payload, dtype=np.uint8)
        self._store = store
        self.releases: Sequence[drafter_pb2.Release] = ()
        self.is_bulk = False
        # Parsed by protobuf, by their rows.
        self._deltas: dict[int, drafter_pb2.SequenceDelta] = {}
        self._rows: npt.NDArray[np.int64] | None = None

        heads = np.zeros(2, dtype=np.int64)
        count = IRREGULAR
        if len(payload) <= wire.MAX_MESSAGE_BYTES:
            count = scan_request(
                self._bytes,
                store.table.seed,
                wire.MAX_TOKENS_PER_DELTA,
                wire.MAX_LIVE_TOKENS,
                scratch.rows,
                heads,
            )
        if count == IRREGULAR:
            self._parse_whole()
            return
        self.batch_id, num_releases = heads.tolist()
        self.num_sequences = count
        self._rows = scratch.rows[:count].copy()
        self._slots = np.empty(count, dtype=np.int64)
        odd = np.flatnonzero(self._rows[:, IS_PLAIN] == 0).tolist()
        if odd or num_releases > 0:
            self._parse_rest(odd)

    @property
    def is_scanned(self) -> bool:
        """Whether `take` and `respond` may be used."""
        return self._rows is not None

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, i: int) -> drafter_pb2.SequenceDelta:
        """One delta as a message."""
        if i not in self._deltas:
            assert self._rows is not None
            field = self._payload[self._rows[i, START] : self._rows[i, END]]
            self._deltas[i] = drafter_pb2.ProposeRequest.FromString(field).sequences[0]
        return self._deltas[i]

    def take(self, first: int, most_draft_tokens: int, rows: BatchRows) -> int:
        """Takes plain deltas from row `first` on.

        Returns:
            The row after the last that was taken: what is there is not plain, or enough is done.
        """
        assert self._rows is not None
        after = take_plain(
            self._bytes,
            self._rows,
            first,
            min(first + _MOST_AT_ONCE, self.num_sequences),
            self._store.table,
            self._store.now_s(),
            most_draft_tokens,
            BACKGROUND_TOKENS,
            self._slots,
            rows.headers,
            rows.wanted,
            rows.is_wanted,
        )
        by_slot = self._store.by_slot
        rows.histories[first:after] = [by_slot[slot] for slot in self._slots[first:after].tolist()]
        return after

    async def respond(self, rows: BatchRows) -> bytes:
        """Returns the answer, a ProposeResponse, once no row is open; others get their turns."""
        if self._rows is None:
            sequence_ids = [self._deltas[i].sequence_id for i in range(self.num_sequences)]
            response = await response_of(self.batch_id, rows, sequence_ids)
            return response.SerializeToString()
        refusals = []
        for i in sorted(rows.refusals):
            refusal = wire.response_to_proto(0, [rows.refusals[i]])
            refusals.append(refusal.SerializeToString())
            if len(refusals) % _MOST_WRITTEN_AT_ONCE == 0:
                await asyncio.sleep(0)
        return self.write(rows, refusals)

    def write(self, rows: BatchRows, refusals: Sequence[bytes]) -> bytes:
        """Returns the answer to a scanned message, given the refusals in it, in order."""
        assert self._rows is not None
        written = write_response(
            self._bytes,
            self._rows,
            self.batch_id,
            rows.outcomes,
            rows.lengths,
            rows.reaches,
            rows.draft_starts,
            rows.draft_lengths,
            rows.drafts,
            np.frombuffer(b"".join(refusals), dtype=np.uint8),
            np.array([len(refusal) for refusal in refusals], dtype=np.int64),
        )
        return written.tobytes()

    def _parse_whole(self) -> None:
        request = drafter_pb2.ProposeRequest.FromString(self._payload)
        deltas = wire.check_propose_request(request)
        self.batch_id = request.batch_id
        self.num_sequences = len(deltas)
        self.releases = request.releases
        self.is_bulk = wire.is_bulk(deltas)
        self._deltas = dict(enumerate(deltas))

    def _parse_rest(self, odd: list[int]) -> None:
        """Parses the message without its plain deltas."""
        assert self._rows is not None
        parts, at = [], 0
        plain = self._rows[self._rows[:, IS_PLAIN] == 1]
        for start, end in plain[:, [START, END]].tolist():
            if at < start:
                parts.append(self._payload[at:start])
            at = end
        parts.append(self._payload[at:])
        rest = drafter_pb2.ProposeRequest.FromString(b"".join(parts))
        wire.check_counts(rest)
        self.releases = rest.releases
        self.is_bulk = wire.is_bulk(rest.sequences)
        self._deltas = dict(zip(odd, rest.sequences, strict=True))


async def response_of(
    batch_id: int, rows: BatchRows, sequence_ids: Sequence[str]
) -> drafter_pb2.ProposeResponse:
    """Returns the answer to a batch, once no row is open; others get turns meanwhile."""
    response = drafter_pb2.ProposeResponse(batch_id=batch_id)
    proposals = rows.proposals(sequence_ids)
    while part := list(itertools.islice(proposals, _MOST_WRITTEN_AT_ONCE)):
        wire.add_proposals(response, part)
        if len(part) == _MOST_WRITTEN_AT_ONCE:
            await asyncio.sleep(0)
    return response


def warm_up_live_batches(answerer: Answerer) -> None:
    """Compiles the kernels, or loads them from disk: answers deltas, whole and step by step.

    Args:
        answerer: warm already.
    """
    limits = StoreLimits(
        max_sequences=2, max_sequence_bytes=1 << 18, max_history_bytes=1 << 20, idle_ttl_s=1.0
    )
    pool_limits = PoolLimits(max_pool_bytes=1 << 19, max_pools_bytes=1 << 20, pool_ttl_s=1.0)
    store = HistoryStore(limits, clock=lambda: 0.0, on_eviction=lambda reason: None)
    pools = PoolStore(pool_limits, clock=lambda: 0.0, seed=1)
    drafting = Drafting(
        store=store,
        answerer=answerer,
        pools=PoolDrafts(pools, on_work=lambda: None),
        on_failure=lambda sequence_id: None,
    )
    live = LiveAnswerer(drafting)

    def message(sequence_id: str, base_length: int, num_tokens: int) -> bytes:
        delta = drafter_pb2.SequenceDelta(
            sequence_id=sequence_id,
            base_length=base_length,
            token_ids=range(num_tokens),
            max_draft_tokens=1,
        )
        return drafter_pb2.ProposeRequest(sequences=[delta]).SerializeToString()

    num_created = LEAST_INDEXED - 1

    def answer_and_release() -> None:
        for sequence_id in ("a", "b"):
            created = SequenceDelta(
                sequence_id=sequence_id,
                base_length=0,
                token_ids=np.arange(num_created, dtype=np.uint32),
                params=NgramParams(pool_id="warm"),
            )
            store.append(created)
        assert live.answer(message("a", num_created, 1)) is not None
        assert len(live.behind) == 1
        assert len(live.index_step(live.behind)) == 0
        # There is no room for so many where the others are, and then there is much to be indexed.
        long = message("a", num_created + 1, MIN_CAPACITY_TOKENS - num_created)
        assert live.answer(long) is None
        assert live.num_taken == 1

        batch = LiveBatch(message("b", num_created, 1), store, Scratch())
        rows = BatchRows(1)
        assert batch.take(0, 1, rows) == 1
        rows.outcomes[:] = NO_MATCH
        batch.write(rows, [])
        for sequence_id in ("a", "b"):
            store.release(sequence_id)

    answer_and_release()
