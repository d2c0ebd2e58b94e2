"""Which tokens of each sequence one drafter has been sent, and which are still to be sent.

Owns that bookkeeping for one drafter, on the engine thread. Knows no gRPC. Tokens are never copied
into a queue: unsent ones are cut from the sequence's own list when a batch is made, so a drafter
that is slow or gone costs one number per sequence, and gets everything merged when it is back.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from tandem.values import Keep
from verifier.drafters.backlog_budget import BacklogBudget
from verifier.drafters.batches import (
    MAX_DELTA_TOKENS,
    MAX_DELTAS,
    MAX_REQUEST_BYTES,
    Delta,
    DeltaBatch,
    DrafterProtocolError,
    Proposal,
    ProposalStatus,
    Release,
)
from verifier.drafts.draft_buffer import Hint
from verifier.drafts.drafted_by import DraftedBy
from verifier.scheduling.sequence import Sequence

# Small enough that a batch is answered well within the deadline while histories are replayed.
_MAX_BATCH_TOKENS = 16_384

# At most, in bytes: a token id; a delta without its tokens, matching policy and span; a release,
# which has the sequence's id twice if it feeds a pool; a proposal without its tokens, but with an
# explanation.
_TOKEN_BYTES = 5
_DELTA_BYTES = 128
_RELEASE_BYTES = 160
_PROPOSAL_BYTES = 1_024
# Reserved for releases in each message that has some.
_MAX_RELEASES_BYTES = MAX_REQUEST_BYTES // 4

# A drafter that is slower than the steps gets fewer, larger batches.
_MAX_BATCHES_IN_FLIGHT = 8

# Of these, batches of prompts, replays and releases alone: they must not delay drafts, and a
# drafter that needs every history again sets the pace itself.
_MAX_BACKLOG_IN_FLIGHT = 2

# After this many live batches, the next one holds prompts or replays, if there are some.
_MAX_CONSECUTIVE_LIVE = 8

# Statuses of deltas that the drafter did not append.
_NOT_APPENDED = (ProposalStatus.OUT_OF_SYNC, ProposalStatus.INVALID)

# Releases that feed no pool wait for the next batch, for so long at most: a message of their own
# costs as much as a step of a small model, and a drafter is in no hurry to forget.
RELEASE_DELAY_S = 0.05

# A sequence with more unsent tokens is a prompt or a replay, and must not delay the others' drafts.
_MAX_URGENT_TOKENS = 1_024

# A drafter that keeps evicting a sequence gets no more replays of it.
_MAX_REWINDS = 8


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


@dataclasses.dataclass(slots=True, eq=False)
class _History:
    """One sequence as its drafter has it.

    Attributes:
        num_sent: tokens that the drafter has, once everything in flight has arrived.
        end: of a sequence that is over, the length of its text; else None.
        keep: of a sequence that is over: what its pool gets once all of it was sent.
        is_held: whether it is over, and what its pool keeps is not decided yet.
        until_s: when its pool gets nothing if it was not sent by then.
        rewound_at: first batch after the last rewind; OUT_OF_SYNC of earlier ones is outdated.
    """

    sequence: Sequence
    drafted_by: DraftedBy
    num_sent: int = 0
    end: int | None = None
    keep: Keep = Keep.NOTHING
    is_held: bool = False
    until_s: float = math.inf
    rewound_at: int = 0
    num_rewinds: int = 0

    @property
    def length(self) -> int:
        """Tokens that the drafter should have."""
        return len(self.sequence.token_ids) if self.end is None else self.end

    @property
    def num_wanted(self) -> int:
        """How many draft tokens to request for the current length."""
        if self.end is not None:
            return 0
        num_wanted = self.sequence.num_wanted_draft_tokens
        return min(num_wanted, self.drafted_by.hint_tokens or num_wanted)


class _BatchInFlight(NamedTuple):
    """A batch without an answer yet.

    Attributes:
        requested: per delta, its history, and the length at which a draft was requested (0: none)
            and how many tokens of it.
        is_live: whether it holds decisions of the last steps, not prompts, replays or releases.
    """

    batch_id: int
    sent_s: float
    requested: SequenceOf[tuple[_History, int, int]]
    is_live: bool


class DraftFeed:
    """The feed of one drafter; owned by the engine thread.

    Invariants: a sequence is in at most one of `_urgent` and `_backlog`, and, unless it is over, in
    one of them whenever a draft is to be requested; both are within `_histories`, and so is
    `_waiting`: the sequences that are over, and whose text is to be sent. `num_waiting_tokens` is
    the length of those texts. `_releases_due_s` is when releases go in a batch of their own, as of
    the last `next_batch`.
    """

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}
        # Sequences with unsent tokens: those whose next draft a step may wait for, and the others.
        self._urgent: dict[str, _History] = {}
        self._backlog: dict[str, _History] = {}
        self._waiting: dict[str, _History] = {}
        self._num_waiting_tokens = 0
        self._releases: dict[str, Release] = {}
        self._releases_due_s = math.inf
        self._in_flight: collections.deque[_BatchInFlight] = collections.deque()
        self._next_batch_id = 1
        self._num_consecutive_live = 0
        self._budget = BacklogBudget()

    def add(self, sequence: Sequence, drafted_by: DraftedBy) -> bool:
        """Begins to feed a sequence, with the tokens that it has; False: its id is taken."""
        sequence_id = sequence.sequence_id
        if (known := self._histories.get(sequence_id)) is not None:
            if known.end is None or known.num_sent:
                return False
            # It is over, and its drafter has none of it.
            self._drop(sequence_id, known)
        # What the last sequence with this id left there is not part of this one's text.
        self._releases.pop(sequence_id, None)
        self._histories[sequence_id] = history = _History(sequence, drafted_by)
        # Where hints are of no use, the prompt goes with the first request: one message less. A
        # long one does not, since indexing it would delay the first hint.
        expects_useless_hints = sequence.hint_record.expects_useless_hints
        if sequence.num_wanted_draft_tokens:
            # It comes from another drafter, and a step may wait for the hint that is wanted now.
            self._enqueue(sequence_id, history)
        elif not expects_useless_hints or len(sequence.token_ids) > _MAX_URGENT_TOKENS:
            self._backlog[sequence_id] = history
        return True

    def advance(self, sequence: Sequence) -> None:
        """The sequence has new tokens; hot path. If no draft is wanted, they wait until one is."""
        history = self._histories.get(sequence.sequence_id)
        if history is not None and sequence.num_wanted_draft_tokens:
            self._enqueue(sequence.sequence_id, history)

    def remove(
        self,
        sequence_id: str,
        *,
        keep: Keep = Keep.NOTHING,
        length: int = 0,
        until_s: float = math.inf,
        only: Sequence | None = None,
    ) -> None:
        """The sequence is over: the drafter may forget it, and its pool keeps this part of it.

        Text that is kept is sent to its end first, also to a drafter that is not connected yet.

        Args:
            length: where the text ends; 0: with the last token.
            until_s: when text that was not sent is given up, by the clock of `expire`.
            only: nothing happens if another sequence has the id by now.
        """
        history = self._histories.get(sequence_id)
        if history is None or (only is not None and history.sequence is not only):
            return
        self._stop_waiting(sequence_id)
        num_tokens = len(history.sequence.token_ids)
        history.end = min(length, num_tokens) or num_tokens
        history.is_held = False
        if keep in (Keep.OUTPUT, Keep.ALL) and history.drafted_by.has_pool:
            history.keep = keep
            if history.num_sent < history.end:
                history.until_s = until_s
                self._waiting[sequence_id] = history
                self._num_waiting_tokens += history.end
                self._enqueue(sequence_id, history)
                return
        self._drop(sequence_id, history)

    def hold(self, sequence_id: str) -> None:
        """The sequence is over, and nothing more of it is sent until `remove`."""
        history = self._histories.get(sequence_id)
        if history is not None:
            history.end = len(history.sequence.token_ids)
            history.is_held = True
            self._urgent.pop(sequence_id, None)
            self._backlog.pop(sequence_id, None)

    def expire(self, now_s: float) -> None:
        """Gives up the texts that no drafter has taken in time."""
        for sequence_id, history in list(self._waiting.items()):
            if history.until_s <= now_s:
                history.keep = Keep.NOTHING
                self._drop(sequence_id, history)

    def restart(self) -> None:
        """The drafter may have lost everything: sends every sequence again, and those that are over
        and kept, too.
        """
        self._in_flight.clear()
        self._releases.clear()
        self._urgent.clear()
        for sequence_id, history in self._histories.items():
            history.num_sent = 0
            history.num_rewinds = 0
            if not history.is_held:
                self._backlog[sequence_id] = history

    @property
    def num_expected(self) -> int:
        """Proposals of the next answer."""
        return len(self._in_flight[0].requested) if self._in_flight else 0

    @property
    def num_waiting(self) -> int:
        """Sequences that are over, and whose text is still to be sent."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the texts that are still to be sent."""
        return self._num_waiting_tokens

    @property
    def is_idle(self) -> bool:
        """Whether nothing is fed, unsent or unanswered."""
        return not (self._histories or self._releases or self._in_flight)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that are fed, without those that are over."""
        return [each.sequence for each in self._histories.values() if each.end is None]

    def next_batch(self, now_s: float) -> DeltaBatch | None:
        """Cuts the next batch from unsent tokens; None if there are none, or enough is in flight.

        Sequences whose drafts are urgent go first, in batches of their own: prompts and replays,
        which can be long, fill the time between the steps, as far as their budget goes.
        """
        self._releases_due_s = (
            min(self._releases_due_s, now_s + RELEASE_DELAY_S) if self._releases else math.inf
        )
        if len(self._in_flight) >= _MAX_BATCHES_IN_FLIGHT:
            return None
        is_live = self._is_urgent_next(now_s)
        if not is_live and not self._may_send_backlog(now_s):
            return None
        room_tokens = _MAX_BATCH_TOKENS if is_live else self._budget.room(now_s)
        self._num_consecutive_live = (
            self._num_consecutive_live + 1 if is_live and self._backlog else 0
        )
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        releases, room_bytes = self._cut_releases()
        unsent = self._urgent if is_live else self._backlog
        deltas, requested = self._cut(unsent, room_tokens, room_bytes)
        self._budget.take(sum(len(delta.token_ids) for delta in deltas))
        self._in_flight.append(_BatchInFlight(batch_id, now_s, requested, is_live))
        num_wanted = sum(delta.max_draft_tokens for delta in deltas)
        max_answer_bytes = _PROPOSAL_BYTES * (1 + len(deltas)) + _TOKEN_BYTES * num_wanted
        return DeltaBatch(batch_id, deltas, releases, max_answer_bytes)

    def due_s(self, now_s: float) -> float | None:
        """How long until the budget allows a prompt or replay, or releases go alone; None: nothing
        waits for that.
        """
        if len(self._in_flight) >= _MAX_BACKLOG_IN_FLIGHT:
            return None
        due_s = max(0.0, self._releases_due_s - now_s) if self._releases else math.inf
        if self._backlog:
            due_s = min(due_s, self._budget.due_s(now_s))
        return due_s if due_s < math.inf else None

    def check_integrity(self) -> None:
        """Asserts the invariants of texts that wait."""
        assert self._num_waiting_tokens == sum(each.length for each in self._waiting.values())
        for sequence_id, history in self._waiting.items():
            assert self._histories[sequence_id] is history
            assert history.end is not None
            assert not history.is_held

    def _is_urgent_next(self, now_s: float) -> bool:
        """Whether the next batch is for sequences whose drafts are urgent."""
        if not self._urgent:
            return False
        # If the drafter is slower than the steps, some are always urgent: prompts and replays must
        # be sent, too.
        return self._num_consecutive_live < _MAX_CONSECUTIVE_LIVE or not self._may_send_backlog(
            now_s
        )

    def _may_send_backlog(self, now_s: float) -> bool:
        """Whether there is a batch of prompts, replays or releases, and the pace allows it."""
        is_release_due = now_s >= self._releases_due_s
        if not (self._backlog or is_release_due):
            return False
        num_in_flight = sum(not batch.is_live for batch in self._in_flight)
        return num_in_flight < _MAX_BACKLOG_IN_FLIGHT and (
            is_release_due or self._budget.room(now_s) > 0
        )

    def _cut(
        self, unsent: dict[str, _History], room_tokens: int, room_bytes: int
    ) -> tuple[list[Delta], list[tuple[_History, int, int]]]:
        """Removes deltas of at most `room_tokens` tokens and `room_bytes` bytes from `unsent`."""
        deltas: list[Delta] = []
        requested: list[tuple[_History, int, int]] = []
        done: list[str] = []
        for sequence_id, history in unsent.items():
            base_length = history.num_sent
            encoded_params, trace_parent = None, ""
            room_bytes -= _DELTA_BYTES
            if not base_length:
                encoded_params = history.drafted_by.encoded_params
                trace_parent = history.drafted_by.trace_parent
                room_bytes -= len(encoded_params) + len(trace_parent)
            num_tokens = min(room_tokens, MAX_DELTA_TOKENS, room_bytes // _TOKEN_BYTES)
            if num_tokens <= 0 or len(deltas) == MAX_DELTAS:
                break
            length = history.length
            end = min(length, base_length + num_tokens)
            num_wanted = history.num_wanted if end == length else 0
            sequence = history.sequence
            deltas.append(
                Delta(
                    sequence_id,
                    base_length,
                    sequence.token_ids[base_length:end],
                    sequence.prompt_length,
                    num_wanted,
                    sequence.max_length,
                    encoded_params,
                    trace_parent,
                )
            )
            requested.append((history, end if num_wanted else 0, num_wanted))
            history.num_sent = end
            room_tokens -= end - base_length
            room_bytes -= _TOKEN_BYTES * (end - base_length)
            if end == length:
                done.append(sequence_id)
        for sequence_id in done:
            history = unsent.pop(sequence_id)
            if history.end is not None:
                # This batch completes it; the next one releases it, because a message's releases
                # apply before its tokens.
                self._drop(sequence_id, history)
        return deltas, requested

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
            if self._histories.get(sequence.sequence_id) is not history:
                continue  # it ended meanwhile
            mistake = _mistake_of(history, length, proposal)
            if mistake:
                result.mistakes.append(mistake)
            elif proposal.status in _NOT_APPENDED:
                reason = self._recover(history, proposal, batch_id)
                if reason:
                    result.given_up.append((sequence, reason))
            if not length or history.end is not None:
                continue
            if mistake or proposal.status in _NOT_APPENDED:
                # No draft of this length will come: no step may wait for it.
                hint = Hint(sequence.sequence_id, length, [], 0)
            else:
                hint = Hint(
                    sequence.sequence_id,
                    proposal.base_length,
                    proposal.token_ids[:num_wanted],
                    proposal.matched_ngram_length,
                    proposal.status is ProposalStatus.INDEXING,
                    proposal.source,
                )
            result.hints.append((sequence, hint))
        return result

    def _drop(self, sequence_id: str, history: _History) -> None:
        """Stops feeding a sequence; releases it if the drafter has some of it."""
        del self._histories[sequence_id]
        self._urgent.pop(sequence_id, None)
        self._backlog.pop(sequence_id, None)
        self._stop_waiting(sequence_id)
        if history.num_sent:
            length = history.length if history.num_sent > history.length else 0
            self._releases[sequence_id] = Release(sequence_id, history.keep, length)
            if history.keep is not Keep.NOTHING:
                # It feeds a pool, from which other sequences may draft now.
                self._releases_due_s = -math.inf

    def _stop_waiting(self, sequence_id: str) -> None:
        if (history := self._waiting.pop(sequence_id, None)) is not None:
            self._num_waiting_tokens -= history.length

    def _recover(self, history: _History, proposal: Proposal, batch_id: int) -> str:
        """Rewinds a history to what the drafter has; returns why it is given up, or ""."""
        sequence_id = history.sequence.sequence_id
        if proposal.status is ProposalStatus.INVALID:
            self._drop(sequence_id, history)
            return proposal.message or "the drafter gives no reason"
        if batch_id < history.rewound_at:
            return ""
        history.num_rewinds += 1
        if history.num_rewinds > _MAX_REWINDS:
            self._drop(sequence_id, history)
            return f"the drafter lost the sequence {history.num_rewinds} times"
        history.num_sent = min(history.num_sent, proposal.known_length)
        history.rewound_at = self._next_batch_id
        if not history.is_held:
            self._enqueue(sequence_id, history)
        return ""

    def _enqueue(self, sequence_id: str, history: _History) -> None:
        if history.num_wanted and history.length - history.num_sent <= _MAX_URGENT_TOKENS:
            self._urgent[sequence_id] = history
            if self._backlog:
                self._backlog.pop(sequence_id, None)
        else:
            self._backlog[sequence_id] = history
            self._urgent.pop(sequence_id, None)

    def _cut_releases(self) -> tuple[list[Release], int]:
        """Removes the next releases; returns them and how many bytes are left for deltas."""
        releases: list[Release] = []
        if not self._releases:
            return releases, MAX_REQUEST_BYTES
        room_bytes = _MAX_RELEASES_BYTES
        for release in self._releases.values():
            room_bytes -= _RELEASE_BYTES
            if room_bytes < 0 or len(releases) == MAX_DELTAS:
                break
            releases.append(release)
        for release in releases:
            del self._releases[release.sequence_id]
        return releases, MAX_REQUEST_BYTES - _MAX_RELEASES_BYTES


def _mistake_of(history: _History, requested_length: int, proposal: Proposal) -> str:
    """Why a proposal cannot be the answer to its delta; "" if it can."""
    if proposal.sequence_id != history.sequence.sequence_id:
        return "a proposal is of another sequence than requested"
    if not proposal.status:
        return "a proposal has an unknown status"
    if proposal.status in _NOT_APPENDED or not requested_length:
        return ""
    num_tokens = len(history.sequence.token_ids)
    if not requested_length <= proposal.base_length <= num_tokens:
        return f"a proposal continues {proposal.base_length} tokens, not {requested_length}"
    return ""
