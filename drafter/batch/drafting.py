"""Answers deltas: takes each into its history, and proposes what may come next.

The whole of the drafter without RPCs. Owned by the event loop, like the store that it uses. A batch
is answered step by step, each step under a millisecond, so that others get a turn in between. Texts
that are not waited for are indexed in the background, after everything that is.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from drafter.batch.answerer import MOST_LACKING, Answerer, Answers, ScannedDraft
from drafter.batch.batch_rows import BatchRows
from drafter.batch.scan import APPENDED, DRAFT, NO_MATCH, OPEN, POOL_DRAFT
from drafter.history.history import History
from drafter.history.messages import Proposal, ProposalStatus, SequenceDelta
from drafter.history.pool_drafts import PoolDrafts
from drafter.history.store import HistoryStore, StreamLease
from drafter.ngram.index import DONE, MUST_GROW, MUST_SCAN
from drafter.ngram.params import Keep

SLICE_S = 0.0005
"""How long a step goes on with one thing after the other."""

TEXTS_PER_STEP = 512
"""How many are asked about in one kernel call."""

LEAST_PER_STEP = 8
"""How many at least, when calls answer few of those that they are asked about."""

BACKGROUND_TOKENS = 256
"""A text that lacks more than this and is not asked for a draft is indexed in the background."""


MOST_AWAITED_NGRAMS = 16_384
"""A text whose index lacks more is not waited for: it is indexed in the background, and gets no
draft until that is done. So much takes about half a millisecond."""


class Drafting:
    """Histories, pools and the ways of finding drafts in them, put together."""

    def __init__(
        self,
        *,
        store: HistoryStore,
        answerer: Answerer,
        pools: PoolDrafts,
        on_failure: Callable[[str], None],
    ) -> None:
        """Puts them together.

        Args:
            store: the histories.
            answerer: runs the kernels.
            pools: what sequences have to do with shared pools.
            on_failure: called, while the exception is handled, with the id of a sequence that could
                not be indexed or drafted for; it was forgotten.
        """
        self.store = store
        self.answerer = answerer
        self.pools = pools
        self._on_failure = on_failure
        # In the order in which they are indexed.
        self._behind: dict[History, None] = {}

    @property
    def is_behind(self) -> bool:
        """Whether `index_step` has something to do."""
        return bool(self._behind)

    def take(
        self,
        delta: SequenceDelta,
        lease: StreamLease | None,
        most_draft_tokens: int,
        rows: BatchRows,
        i: int,
    ) -> None:
        """Appends the delta, and puts down in a row what is to be answered.

        Args:
            delta: of one sequence.
            lease: of the stream that it came on, if any.
            most_draft_tokens: what the answer has room for, whatever the delta wants.
            rows: of the delta's batch.
            i: the delta's row.

        Raises:
            OutOfSyncError: the delta does not continue what is known.
            InvalidDeltaError: a field of it is wrong.
        """
        history = self.store.append(delta, lease)
        is_wanted = delta.max_draft_tokens > 0
        num_lacking = history.num_unindexed
        if is_wanted:
            is_behind = num_lacking * history.params.num_sizes > MOST_AWAITED_NGRAMS
        else:
            is_behind = num_lacking > BACKGROUND_TOKENS
        if is_behind:
            self._behind[history] = None
            rows.answer_empty(i, history, is_wanted=is_wanted)
            return
        num_wanted = min(delta.max_draft_tokens, most_draft_tokens)
        if delta.max_length > 0:
            num_wanted = max(0, min(num_wanted, delta.max_length - history.length))
        rows.ask(i, history, num_wanted, is_wanted=is_wanted)

    def release(self, sequence_id: str, keep: Keep, feed_id: str, length: int) -> None:
        """Forgets a sequence, and leaves its text in its pool as told. An unknown one is fine."""
        history = self.store.release(sequence_id)
        if history is not None:
            self.pools.keep(history, keep, feed_id, length)

    def feed(self, slot: int) -> None:
        """Feeds its pool what a sequence has grown by, if it has by enough."""
        history = self.store.by_slot[slot]
        if history is None:
            return
        try:
            self.pools.feed(history)
        except Exception:
            # A mistake of ours, or no memory left.
            self.forget(history)

    def grow_table(self, history: History, index: int) -> bool:
        """Makes room in a table; returns whether that worked. If not, the sequence is forgotten."""
        try:
            self.store.grow_table(history, index)
        except Exception:
            # A mistake of ours, or no memory left: what the index holds is in doubt.
            self.forget(history)
            return False
        return True

    def forget(self, history: History) -> None:
        """Forgets a sequence that something failed for; called while the exception is handled."""
        self._on_failure(history.sequence_id)
        if history.is_kept:
            self.store.release(history.sequence_id)

    def begin(self, rows: BatchRows) -> "Work":
        """Returns the work of answering the rows that are open, not yet begun."""
        return Work(self, rows)

    def index_step(self) -> None:
        """Goes on indexing the first text that nobody waits for."""
        history = next(iter(self._behind))
        status = DONE
        try:
            if history.is_kept:
                status = int(self.answerer.answer([history], [0]).statuses[0])
                if status >= MUST_GROW:
                    self.store.grow_table(history, status - MUST_GROW)
        except Exception:
            self.forget(history)
        if status == DONE or not history.is_kept:
            del self._behind[history]


class Work:
    """The rows of one batch on their way to their answers. Used by one request, which has to call
    `BatchRows.refresh` when others may have had their turn since the last step.

    A step looks at those that are still open; each is answered by the first step that finds its
    index up to date, or nearly so, with what is known of the sequence by then. What is nearly so is
    left to be caught up with when nobody waits for it any more (`slots_to_index`).
    """

    def __init__(self, drafting: Drafting, rows: BatchRows) -> None:
        self._drafting = drafting
        self._rows = rows
        self._open = np.flatnonzero(rows.outcomes == OPEN)
        self._asked = self._open
        self._most_at_once = TEXTS_PER_STEP
        # Rows whose texts are scanned for long.
        self._scans: dict[int, ScannedDraft] = {}
        rows.make_room()

    def step(self) -> bool:
        """Does up to about a millisecond's work; returns whether all are answered."""
        end_s = time.perf_counter() + SLICE_S
        if len(self._open) > 0:
            now = self._open[: self._most_at_once]
            try:
                self._answer(now, end_s)
            except Exception:
                # A mistake of ours, or no memory left. Whose fault it is shows when each is alone.
                if len(now) == 1:
                    self._open = self._open[1:]
                    self._fail(int(now[0]))
                self._most_at_once = 1
        while self._scans and time.perf_counter() < end_s:
            i = next(iter(self._scans))
            try:
                self._scan(i)
            except Exception:
                del self._scans[i]
                self._fail(i)
        return len(self._open) == 0 and not self._scans

    def slots_to_index(self) -> npt.NDArray[np.int64]:
        """Returns the slots of the answered sequences whose indexes lack something."""
        histories = [self._rows.histories[i] for i in self._asked.tolist()]
        slots = [h.slot for h in histories if h is not None and h.is_kept and h.num_unindexed > 0]
        return np.array(slots, dtype=np.int64)

    def slots_to_feed(self) -> list[int]:
        """Returns the slots of the sequences that have grown so long that they feed their pools."""
        histories = [self._rows.histories[i] for i in self._asked.tolist()]
        return [h.slot for h in histories if h is not None and h.is_kept and h.is_feed_due]

    def _answer(self, now: npt.NDArray[np.int64], end_s: float) -> None:
        """Asks about the first of the rows that are open."""
        rows = self._rows
        later = self._open[len(now) :]
        answers = self._drafting.answerer.answer_headers(
            rows.headers[now],
            rows.wanted[now],
            rows.draft_starts[now],
            rows.drafts,
            most_lacking=MOST_LACKING,
        )
        self._note(now, answers)
        is_open = answers.statuses != DONE
        # If drafts take long, those that a call does not come to are not asked about in vain.
        num_answered = len(now) - int(np.count_nonzero(is_open))
        self._most_at_once = min(TEXTS_PER_STEP, max(LEAST_PER_STEP, 4 * num_answered))
        if not is_open.any():
            self._open = later
            return
        for i in now[answers.statuses == MUST_SCAN].tolist():
            self._scans[i] = ScannedDraft(
                wanted=int(rows.wanted[i]), draft_start=int(rows.draft_starts[i])
            )
        is_open &= answers.statuses != MUST_SCAN
        self._grow(now[is_open], answers.statuses[is_open], end_s)
        # Those that have only just begun to wait come first: the others have more to do.
        waiting = now[is_open]
        self._open = np.concatenate([later, waiting[rows.outcomes[waiting] == OPEN]])

    def _scan(self, i: int) -> None:
        """Goes on with the scan for a row."""
        rows = self._rows
        answers = self._drafting.answerer.go_on_with_scan(
            int(rows.headers[i]), self._scans[i], rows.drafts
        )
        if answers is not None:
            del self._scans[i]
            self._note(np.array([i]), answers)

    def _note(self, now: npt.NDArray[np.int64], answers: Answers) -> None:
        """Puts down what became of some rows, once their pools had a say."""
        rows = self._rows
        outcomes = np.where(
            answers.draft_lengths > 0, DRAFT, np.where(rows.is_wanted[now], NO_MATCH, APPENDED)
        )
        if self._drafting.pools.store.num_pools > 0:
            histories = [rows.histories[i] for i in now.tolist()]
            is_from_pool = self._drafting.pools.choose(histories, rows.wanted[now], answers)
            outcomes[is_from_pool] = POOL_DRAFT
        outcomes[answers.statuses != DONE] = OPEN
        rows.outcomes[now] = outcomes
        rows.lengths[now] = answers.lengths
        rows.reaches[now] = answers.reaches
        rows.draft_lengths[now] = answers.draft_lengths

    def _grow(
        self, waiting: npt.NDArray[np.int64], statuses: npt.NDArray[np.int64], end_s: float
    ) -> None:
        """Makes room for the rows that wait for it, as far as the time goes."""
        rows = self._rows
        for i, status in zip(waiting.tolist(), statuses.tolist(), strict=True):
            history = rows.histories[i]
            assert history is not None
            if status < MUST_GROW or time.perf_counter() >= end_s:
                continue
            if self._drafting.grow_table(history, status - MUST_GROW):
                rows.headers[i] = history.address
            else:
                self._refuse(i, history)

    def _fail(self, i: int) -> None:
        """Forgets the sequence of a row; called while the exception is handled."""
        history = self._rows.histories[i]
        assert history is not None
        self._drafting.forget(history)
        self._refuse(i, history)

    def _refuse(self, i: int, history: History) -> None:
        """Answers a row whose sequence was forgotten, if it is not answered yet."""
        rows = self._rows
        if rows.outcomes[i] != OPEN:
            rows.histories[i] = None
            return
        rows.refuse(
            i,
            Proposal(
                sequence_id=history.sequence_id,
                status=ProposalStatus.INVALID,
                message="internal error",
            ),
        )
