"""Answers deltas: takes each into its history, and proposes what may come next.

The whole of the drafter without RPCs. Owned by the event loop, like the store that it uses. A batch
is answered step by step, each step under a millisecond, so that others get a turn in between. Texts
that are not waited for are indexed in the background, after everything that is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafter.answerer import Answerer
from drafter.history import History
from drafter.history_store import HistoryStore, StreamLease
from drafter.messages import Keep, Proposal, ProposalStatus, SequenceDelta, Source
from drafter.pool_drafts import PoolDrafts
from drafter.proposal_kernel import DONE, MUST_GROW
from drafter.proposer import Draft

SLICE_S = 0.0005
"""How long a step goes on with one thing after the other."""

TEXTS_PER_STEP = 512
"""How many are asked about in one kernel call."""

BACKGROUND_TOKENS = 256
"""A text that lacks more than this and is not asked for a draft is indexed in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A sequence that waits for its proposal."""

    sequence_id: str
    history: History
    most_tokens: int
    """How long the draft may be; 0: there is no room for one."""
    is_wanted: bool
    """Whether a draft was asked for; else this only brings the index up to date."""


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
                not be indexed; it was forgotten.
        """
        self.store = store
        self.answerer = answerer
        self.pools = pools
        self._on_failure = on_failure
        # Their ids, in the order in which they are indexed.
        self._behind: dict[History, str] = {}

    @property
    def is_behind(self) -> bool:
        """Whether `index_step` has something to do."""
        return bool(self._behind)

    def take(
        self, delta: SequenceDelta, lease: StreamLease | None, most_draft_tokens: int
    ) -> Question:
        """Appends the delta.

        Args:
            delta: of one sequence.
            lease: of the stream that it came on, if any.
            most_draft_tokens: what the answer has room for, whatever the delta wants.

        Returns:
            What is to be answered.

        Raises:
            OutOfSyncError: the delta does not continue what is known.
            InvalidDeltaError: a field of it is wrong.
        """
        history = self.store.append(delta, lease)
        num_wanted = min(delta.max_draft_tokens, most_draft_tokens)
        if delta.max_length > 0:
            num_wanted = max(0, min(num_wanted, delta.max_length - history.length))
        return Question(
            sequence_id=delta.sequence_id,
            history=history,
            most_tokens=num_wanted,
            is_wanted=delta.max_draft_tokens > 0,
        )

    def release(self, sequence_id: str, keep: Keep, feed_id: str) -> None:
        """Forgets a sequence, and leaves its text in its pool as told. An unknown one is fine."""
        history = self.store.release(sequence_id)
        if history is not None:
            self.pools.keep(history, keep, feed_id)

    def put_behind(self, question: Question) -> None:
        """Leaves a text to `index_step`."""
        self._behind[question.history] = question.sequence_id

    def grow_table(self, sequence_id: str, history: History, index: int) -> bool:
        """Makes room in a table; returns whether that worked. If not, the sequence is forgotten."""
        try:
            self.store.grow_table(history, index)
        except Exception:
            # A mistake of ours, or no memory left: what the index holds is in doubt.
            self._on_failure(sequence_id)
            if history.is_kept:
                self.store.release(sequence_id)
            return False
        return True

    def begin(self, questions: Sequence[Question]) -> "Work":
        """Returns the work of answering them, not yet begun."""
        return Work(self, questions)

    def index_step(self) -> None:
        """Goes on indexing the first text that nobody waits for."""
        history, sequence_id = next(iter(self._behind.items()))
        answers = self.answerer.answer([history], [0])
        status = int(answers.statuses[0])
        if status >= MUST_GROW:
            self.grow_table(sequence_id, history, status - MUST_GROW)
        if status == DONE or not history.is_kept:
            del self._behind[history]


class Work:
    """The questions of one batch on their way to their proposals. Used by one request.

    A step looks at those that are still open; each is answered by the first step that finds its
    index up to date, with what is known of the sequence by then.
    """

    def __init__(self, drafting: Drafting, questions: Sequence[Question]) -> None:
        self._drafting = drafting
        self._questions = questions
        self._proposals: list[Proposal | None] = [None] * len(questions)
        self._open = []
        for i, question in enumerate(questions):
            if question.is_wanted or question.history.num_unindexed <= BACKGROUND_TOKENS:
                self._open.append(i)
            else:
                drafting.put_behind(question)
                self._proposals[i] = Proposal(
                    sequence_id=question.sequence_id,
                    status=ProposalStatus.OK,
                    base_length=question.history.length,
                )

    @property
    def proposals(self) -> list[Proposal]:
        """One per question, in order, once all are answered."""
        return [proposal for proposal in self._proposals if proposal is not None]

    def step(self) -> bool:
        """Does up to about a millisecond's work; returns whether all are answered."""
        if not self._open:
            return True
        end_s = time.perf_counter() + SLICE_S
        now, later = self._open[:TEXTS_PER_STEP], self._open[TEXTS_PER_STEP:]
        questions = [self._questions[i] for i in now]
        histories = [question.history for question in questions]
        most_tokens = [question.most_tokens for question in questions]
        answers = self._drafting.answerer.answer(histories, most_tokens)
        is_from_pool = self._drafting.pools.choose(histories, most_tokens, answers)
        drafts = answers.drafts
        still_open = []
        for i, question, status, reach, start, length, is_pooled in zip(
            now,
            questions,
            answers.statuses.tolist(),
            answers.reaches.tolist(),
            answers.draft_starts.tolist(),
            answers.draft_lengths.tolist(),
            is_from_pool.tolist(),
            strict=True,
        ):
            if status == DONE:
                draft = None
                if length > 0:
                    draft = Draft(
                        token_ids=drafts[start : start + length].tolist(),
                        matched_ngram_length=reach,
                        source=Source.POOL if is_pooled else Source.SEQUENCE,
                    )
                self._proposals[i] = _propose(question, draft)
                continue
            if (
                status >= MUST_GROW
                and time.perf_counter() < end_s
                and not self._drafting.grow_table(
                    question.sequence_id, question.history, status - MUST_GROW
                )
            ):
                self._proposals[i] = Proposal(
                    sequence_id=question.sequence_id,
                    status=ProposalStatus.INVALID,
                    message="internal error",
                )
            else:
                still_open.append(i)
        # Those that have only just begun to wait come first: the others have more to do.
        self._open = later + still_open
        return not self._open


def _propose(question: Question, draft: Draft | None) -> Proposal:
    if draft is None:
        return Proposal(
            sequence_id=question.sequence_id,
            status=ProposalStatus.NO_MATCH if question.is_wanted else ProposalStatus.OK,
            base_length=question.history.length,
        )
    return Proposal(
        sequence_id=question.sequence_id,
        status=ProposalStatus.OK,
        base_length=question.history.length,
        token_ids=draft.token_ids,
        matched_ngram_length=draft.matched_ngram_length,
        source=draft.source,
    )
