"""The batches of tokens that one drafter is sent, and their answers.

Owns when the next one is made and which are in flight, on the engine thread; what they are cut from
is in `histories.py`. Knows no gRPC.
"""

import collections
import math
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from verifier.drafters.backlog_budget import BacklogBudget
from verifier.drafters.batches import (
    TOKEN_BYTES,
    DeltaBatch,
    DrafterProtocolError,
    Proposal,
    ProposalStatus,
)
from verifier.drafters.histories import Histories, History
from verifier.drafts.draft_buffer import Hint
from verifier.scheduling.sequence import Sequence

# Small enough that a batch is answered well within the deadline while histories are replayed.
_MAX_BATCH_TOKENS = 16_384

# At most, in bytes: a proposal without its tokens, but with an explanation.
_PROPOSAL_BYTES = 1_024

# A drafter that is slower than the steps gets fewer, larger batches.
_MAX_BATCHES_IN_FLIGHT = 8

# Of these, batches of prompts, replays and releases alone: they must not delay drafts, and a
# drafter that needs every history again sets the pace itself.
_MAX_BACKLOG_IN_FLIGHT = 2

# After this many live batches, the next one holds prompts or replays, if there are some.
_MAX_CONSECUTIVE_LIVE = 8

# Statuses of deltas that the drafter did not append.
_NOT_APPENDED = (ProposalStatus.OUT_OF_SYNC, ProposalStatus.INVALID)


class BatchResult(NamedTuple):
    """What the answer to one batch holds.

    Attributes:
        hints: one per delta that requested a draft, if its sequence is still fed; without tokens
            where there is no draft.
        given_up: sequences that will not be fed any more, and why.
        mistakes: why proposals are invalid; their drafts are dropped.
        sent_s: when a batch that requested drafts was made; None for prompts and replays alone.
    """

    hints: list[tuple[Sequence, Hint]]
    given_up: list[tuple[Sequence, str]]
    mistakes: list[str]
    sent_s: float | None


class _BatchInFlight(NamedTuple):
    """A batch without an answer yet.

    Attributes:
        requested: per delta, its history, and the length at which a draft was requested (0: none)
            and how many tokens of it.
        is_live: whether it holds decisions of the last steps, not prompts, replays or releases.
    """

    batch_id: int
    sent_s: float
    requested: SequenceOf[tuple[History, int, int]]
    is_live: bool


class DraftFeed:
    """The feed of one drafter; owned by the engine thread."""

    def __init__(self) -> None:
        self.histories = Histories()
        self._in_flight: collections.deque[_BatchInFlight] = collections.deque()
        self._next_batch_id = 1
        self._num_consecutive_live = 0
        self._budget = BacklogBudget()

    def restart(self) -> None:
        """The drafter may have lost everything: sends every sequence again, and those that are over
        and kept, too.
        """
        self._in_flight.clear()
        self.histories.restart()

    @property
    def num_expected(self) -> int:
        """Proposals of the next answer."""
        return len(self._in_flight[0].requested) if self._in_flight else 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is fed, unsent or unanswered."""
        return self.histories.is_empty and not self._in_flight

    def next_batch(self, now_s: float) -> DeltaBatch | None:
        """Cuts the next batch from unsent tokens; None if there are none, or enough is in flight.

        Sequences whose drafts are urgent go first, in batches of their own: prompts and replays,
        which can be long, fill the time between the steps, as far as their budget goes.
        """
        histories, releases = self.histories, self.histories.releases
        releases.begin_delay(now_s)
        if len(self._in_flight) >= _MAX_BATCHES_IN_FLIGHT:
            return None
        is_live = self._is_urgent_next(now_s)
        if not is_live and not self._may_send_backlog(now_s):
            return None
        room_tokens = _MAX_BATCH_TOKENS if is_live else self._budget.room(now_s)
        self._num_consecutive_live = (
            self._num_consecutive_live + 1 if is_live and histories.backlog else 0
        )
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        released, room_bytes = releases.cut()
        unsent = histories.urgent if is_live else histories.backlog
        deltas, requested = histories.cut(unsent, room_tokens, room_bytes)
        self._budget.take(sum(len(delta.token_ids) for delta in deltas))
        self._in_flight.append(_BatchInFlight(batch_id, now_s, requested, is_live))
        num_wanted = sum(delta.max_draft_tokens for delta in deltas)
        max_answer_bytes = _PROPOSAL_BYTES * (1 + len(deltas)) + TOKEN_BYTES * num_wanted
        return DeltaBatch(batch_id, deltas, released, max_answer_bytes)

    def due_s(self, now_s: float) -> float | None:
        """How long until the budget allows a prompt or replay, or releases go alone; None: nothing
        waits for that.
        """
        if len(self._in_flight) >= _MAX_BACKLOG_IN_FLIGHT:
            return None
        due_s = self.histories.releases.due_s(now_s)
        if self.histories.backlog:
            due_s = min(due_s, self._budget.due_s(now_s))
        return due_s if due_s < math.inf else None

    def _is_urgent_next(self, now_s: float) -> bool:
        """Whether the next batch is for sequences whose drafts are urgent."""
        if not self.histories.urgent:
            return False
        # If the drafter is slower than the steps, some are always urgent: prompts and replays must
        # be sent, too.
        return self._num_consecutive_live < _MAX_CONSECUTIVE_LIVE or not self._may_send_backlog(
            now_s
        )

    def _may_send_backlog(self, now_s: float) -> bool:
        """Whether there is a batch of prompts, replays or releases, and the pace allows it."""
        is_release_due = self.histories.releases.is_due(now_s)
        if not (self.histories.backlog or is_release_due):
            return False
        num_in_flight = sum(not batch.is_live for batch in self._in_flight)
        return num_in_flight < _MAX_BACKLOG_IN_FLIGHT and (
            is_release_due or self._budget.room(now_s) > 0
        )

    def on_proposals(self, batch_id: int, proposals: SequenceOf[Proposal]) -> BatchResult:
        """Handles the answer to the oldest batch in flight.

        Args:
            proposals: `num_expected` of them.

        Raises:
            DrafterProtocolError: it is not that batch's answer.
        """
        if not self._in_flight or self._in_flight[0].batch_id != batch_id:
            raise DrafterProtocolError(f"batch {batch_id} was answered out of turn")
        batch = self._in_flight.popleft()
        result = BatchResult([], [], [], batch.sent_s if batch.is_live else None)
        for (history, length, num_wanted), proposal in zip(batch.requested, proposals, strict=True):
            sequence = history.sequence
            if self.histories.by_id.get(sequence.sequence_id) is not history:
                continue  # it ended meanwhile
            mistake = _mistake_of(history, length, proposal)
            if mistake:
                result.mistakes.append(mistake)
            elif proposal.status in _NOT_APPENDED:
                reason = self.histories.recover(
                    history, proposal, batch_id, next_batch_id=self._next_batch_id
                )
                if reason:
                    result.given_up.append((sequence, reason))
            if not length or history.end is not None:
                continue
            num_before = len(history.predicted)
            if mistake or proposal.status in _NOT_APPENDED:
                # No draft of this length will come: no step may wait for it.
                hint = Hint(sequence.sequence_id, length - num_before, [], 0)
            else:
                hint = Hint(
                    sequence.sequence_id,
                    proposal.base_length - num_before,
                    proposal.token_ids[:num_wanted],
                    proposal.matched_ngram_length,
                    proposal.status is ProposalStatus.INDEXING,
                    proposal.source,
                )
            result.hints.append((sequence, hint))
        return result


def _mistake_of(history: History, requested_length: int, proposal: Proposal) -> str:
    """Why a proposal cannot be the answer to its delta; "" if it can."""
    if proposal.sequence_id != history.sequence.sequence_id:
        return "a proposal is of another sequence than requested"
    if not proposal.status:
        return "a proposal has an unknown status"
    if proposal.status in _NOT_APPENDED or not requested_length:
        return ""
    num_tokens = len(history.predicted) + len(history.sequence.token_ids)
    if not requested_length <= proposal.base_length <= num_tokens:
        return f"a proposal continues {proposal.base_length} tokens, not {requested_length}"
    return ""
