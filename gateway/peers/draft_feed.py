"""Which tokens of each sequence one drafter has been sent, and which are still to be sent.

Owns that bookkeeping for one drafter. Knows no gRPC and no verifier. Tokens are never copied into
a queue: unsent ones are cut from the generation's own list when a batch is made, so a drafter that
is slow or gone costs one number per sequence, and gets everything merged when it is back.
"""

import collections
import dataclasses
from collections.abc import Sequence

from gateway.generation.generation import Generation
from gateway.messages.drafter import (
    Delta,
    DeltaBatch,
    NewHistory,
    Proposal,
    ProposalStatus,
    Release,
)
from gateway.messages.request import Keep
from gateway.messages.sizes import FIELD_BYTES, MAX_PROPOSE_REQUEST_BYTES, NUMBER_BYTES, TOKEN_BYTES
from gateway.messages.verifier import Hint

#: The wire's limits (drafter.proto).
MAX_DELTA_TOKENS = 8_192
MAX_DELTAS = 4_096

# Small enough that a batch is answered well within the deadline while histories are replayed.
_MAX_BATCH_TOKENS = 16_384

# Without tokens: the tags, lengths and numbers of a delta, and of a new history.
_DELTA_BYTES = 3 * FIELD_BYTES + 4 * NUMBER_BYTES
_CREATION_BYTES = 3 * FIELD_BYTES + 12 * NUMBER_BYTES
# A release holds its id twice if its pool gets text.
_RELEASE_BYTES = 4 * FIELD_BYTES + NUMBER_BYTES
# Reserved for releases in each message that has some.
_MAX_RELEASES_BYTES = MAX_PROPOSE_REQUEST_BYTES // 4

# A drafter that is slower than the verifier's steps gets fewer, larger batches.
_MAX_BATCHES_IN_FLIGHT = 8

# Of these, batches of prompts, replays and releases alone: they must not delay drafts, and a
# drafter that needs every history again sets the pace itself.
_MAX_BACKLOG_IN_FLIGHT = 2

# After this many live batches, the next one holds prompts or replays, if there are some.
_MAX_CONSECUTIVE_LIVE = 8

# A sequence with more unsent tokens is a prompt or a replay, and must not delay the others' drafts.
_MAX_URGENT_TOKENS = 1_024

# Statuses of deltas that the drafter did not append.
_NOT_APPENDED = (ProposalStatus.OUT_OF_SYNC, ProposalStatus.INVALID)

# A drafter that keeps evicting a sequence gets no more replays of it.
_MAX_REWINDS = 8


class DrafterProtocolError(Exception):
    """A drafter's answer does not fit its batch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What the answer to one batch holds.

    Attributes:
        hints: one per delta that requested a draft, if its sequence is still fed; empty where there
            is no draft.
        given_up: sequences that will not be fed any more, and why.
        invalid: why proposals are invalid; their drafts are dropped.
        sent_s: when a live batch was made; None for prompts, replays and releases.
        step_s: when the first step of a live batch arrived.
    """

    hints: Sequence[Hint]
    given_up: Sequence[tuple[str, str]]
    invalid: Sequence[str]
    sent_s: float | None
    step_s: float | None


@dataclasses.dataclass(slots=True, kw_only=True)
class _History:
    """One sequence as its drafter has it.

    Attributes:
        hint_tokens: the most draft tokens requested at a time.
        num_sent: tokens that the drafter has, once everything in flight has arrived.
        max_draft_tokens: how many the verifier can use.
        keep: of a sequence that is over: what its pool gets once all of it was sent.
        rewound_at: first batch after the last rewind; OUT_OF_SYNC of earlier ones is outdated.
    """

    generation: Generation
    hint_tokens: int
    num_sent: int = 0
    max_draft_tokens: int = 0
    rewound_at: int = 0
    num_rewinds: int = 0
    keep: Keep = Keep.NOTHING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BatchInFlight:
    """A batch without an answer yet.

    Attributes:
        step_s: when its first step arrived, if it is live.
        requested: per delta, its history and the length at which a draft was requested (0: none).
        is_live: whether it holds decisions of the last steps, not prompts, replays or releases.
    """

    batch_id: int
    sent_s: float
    step_s: float | None
    requested: Sequence[tuple[_History, int]]
    is_live: bool
    requests_drafts: bool


class DraftFeed:
    """The feed of one drafter; owned by its link, on the event loop.

    Invariants: a sequence is in at most one of `_urgent` and `_backlog`, and in one of them
    whenever a draft is to be requested, or nothing of it was sent; both are within `_histories`.
    """

    def __init__(self, *, hint_tokens: int) -> None:
        """Requests drafts of at most `hint_tokens`."""
        self._hint_tokens = hint_tokens
        self._histories: dict[str, _History] = {}
        # Sequences with unsent tokens: those whose next draft a step may wait for, and the others.
        self._urgent: dict[str, _History] = {}
        self._backlog: dict[str, _History] = {}
        self._releases: dict[str, Release] = {}
        self._in_flight: collections.deque[_BatchInFlight] = collections.deque()
        self._next_batch_id = 1
        self._num_consecutive_live = 0
        self._step_s: float | None = None

    def add(self, generation: Generation) -> None:
        """Begins to feed a sequence, with its prompt."""
        hint_tokens = min(generation.request.hint_tokens, self._hint_tokens)
        history = _History(generation=generation, hint_tokens=hint_tokens)
        self._histories[generation.sequence_id] = history
        self._backlog[generation.sequence_id] = history

    def advance(self, sequence_id: str, max_draft_tokens: int) -> None:
        """The sequence has new tokens, and its verifier can use so many draft tokens; hot path.

        If it can use none, the tokens wait until it can.
        """
        history = self._histories.get(sequence_id)
        if history is not None:
            history.max_draft_tokens = max_draft_tokens
            if max_draft_tokens:
                self._enqueue(sequence_id, history)

    def begin_step(self, received_s: float) -> None:
        """The unsent tokens came with a step that arrived at this time; hot path."""
        if self._step_s is None:
            self._step_s = received_s

    def remove(self, sequence_id: str, *, keep: Keep = Keep.NOTHING) -> None:
        """The sequence is over: the drafter may forget it, and its pool keeps this part of it.

        Text that is kept is sent to its end first. A stop string may have cut what was sent.
        """
        history = self._histories.get(sequence_id)
        if history is None:
            return
        history.max_draft_tokens = 0
        generation = history.generation
        if keep is not Keep.NOTHING and history.num_sent and generation.request.ngram.pool_id:
            history.keep = keep
            if history.num_sent < len(generation.token_ids):
                self._enqueue(sequence_id, history)
                return
        self._drop(sequence_id, history)

    def restart(self) -> None:
        """The drafter may have lost everything: sends every live sequence again."""
        self._in_flight.clear()
        self._step_s = None
        # A sequence that is over is not replayed.
        for sequence_id, history in list(self._histories.items()):
            if history.keep is not Keep.NOTHING:
                self._drop(sequence_id, history)
        self._releases.clear()
        for sequence_id, history in self._histories.items():
            history.num_sent = 0
            history.num_rewinds = 0
            self._enqueue(sequence_id, history)

    @property
    def awaits_drafts(self) -> bool:
        """Whether a draft that a step may wait for is requested, or about to be."""
        return bool(self._urgent) or any(batch.requests_drafts for batch in self._in_flight)

    @property
    def oldest_sent_s(self) -> float | None:
        """When the oldest unanswered batch was made; None if there is none."""
        return self._in_flight[0].sent_s if self._in_flight else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is fed, unsent or unanswered."""
        return not (self._histories or self._releases or self._in_flight)

    def next_batch(self, now_s: float) -> DeltaBatch | None:
        """Cuts the next batch from unsent tokens; None if there are none, or enough is in flight.

        Sequences whose drafts are urgent go first, in batches of their own: prompts and replays,
        which can be long, fill the time between the verifier's steps.
        """
        if len(self._in_flight) >= _MAX_BATCHES_IN_FLIGHT:
            return None
        is_live = self._is_urgent_next()
        if not is_live and (
            not (self._backlog or self._releases)
            or sum(not batch.is_live for batch in self._in_flight) >= _MAX_BACKLOG_IN_FLIGHT
        ):
            return None
        self._num_consecutive_live = (
            self._num_consecutive_live + 1 if is_live and self._backlog else 0
        )
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        releases, room_bytes = self._cut_releases()
        if is_live:
            deltas, requested = self._cut(self._urgent, _MAX_BATCH_TOKENS, room_bytes)
        else:
            # Small, because it delays an urgent batch that follows at once.
            deltas, requested = self._cut(self._backlog, MAX_DELTA_TOKENS, room_bytes)
        self._in_flight.append(
            _BatchInFlight(
                batch_id=batch_id,
                sent_s=now_s,
                step_s=self._step_s if is_live else None,
                requested=requested,
                is_live=is_live,
                requests_drafts=any(length for _, length in requested),
            )
        )
        if not self._urgent:
            self._step_s = None
        return DeltaBatch(batch_id=batch_id, deltas=deltas, releases=releases)

    def _is_urgent_next(self) -> bool:
        """Whether the next batch is for sequences whose drafts are urgent."""
        if not self._urgent:
            return False
        # If the drafter is slower than the steps, some are always urgent: prompts and replays must
        # be sent, too.
        return not self._backlog or self._num_consecutive_live < _MAX_CONSECUTIVE_LIVE

    def _cut(
        self, unsent: dict[str, _History], room_tokens: int, room_bytes: int
    ) -> tuple[list[Delta], list[tuple[_History, int]]]:
        """Removes deltas of at most `room_tokens` tokens and `room_bytes` bytes from `unsent`."""
        deltas: list[Delta] = []
        requested: list[tuple[_History, int]] = []
        done: list[str] = []
        for sequence_id, history in unsent.items():
            generation = history.generation
            request = generation.request
            base_length = history.num_sent
            new_history = None
            room_bytes -= _DELTA_BYTES + len(sequence_id)
            if not base_length:
                new_history = NewHistory(
                    prompt_length=generation.prompt_length, ngram=request.ngram
                )
                room_bytes -= _CREATION_BYTES + len(request.ngram.pool_id.encode())
            num_tokens = min(room_tokens, MAX_DELTA_TOKENS, room_bytes // TOKEN_BYTES)
            if num_tokens <= 0 or len(deltas) == MAX_DELTAS:
                break
            end = min(len(generation.token_ids), base_length + num_tokens)
            is_complete = end == len(generation.token_ids)
            max_draft_tokens = 0
            if is_complete:
                max_draft_tokens = min(history.max_draft_tokens, history.hint_tokens)
            deltas.append(
                Delta(
                    sequence_id,
                    base_length,
                    generation.token_ids[base_length:end],
                    max_draft_tokens,
                    request.max_model_len,
                    new_history,
                )
            )
            requested.append((history, end if max_draft_tokens else 0))
            history.num_sent = end
            room_tokens -= end - base_length
            room_bytes -= TOKEN_BYTES * (end - base_length)
            if is_complete:
                done.append(sequence_id)
        for sequence_id in done:
            history = unsent.pop(sequence_id)
            if history.keep is not Keep.NOTHING:
                # This batch completes it; the next one releases it, because a message's releases
                # apply before its tokens.
                self._drop(sequence_id, history)
        return deltas, requested

    def on_proposals(self, batch_id: int, proposals: Sequence[Proposal]) -> BatchResult:
        """Handles the answer to the oldest batch in flight.

        Raises:
            DrafterProtocolError: it is not that batch's answer.
        """
        if not self._in_flight or self._in_flight[0].batch_id != batch_id:
            raise DrafterProtocolError(f"batch {batch_id} was answered out of turn")
        batch = self._in_flight.popleft()
        requested = batch.requested
        if len(proposals) != len(requested):
            raise DrafterProtocolError(f"{len(proposals)} answers to {len(requested)} deltas")
        hints: list[Hint] = []
        given_up: list[tuple[str, str]] = []
        invalid: list[str] = []
        for (history, requested_length), proposal in zip(requested, proposals, strict=True):
            hint = proposal.hint
            sequence_id = history.generation.sequence_id
            if self._histories.get(sequence_id) is not history:
                continue  # it ended meanwhile
            generation = history.generation
            if (
                proposal.status is not ProposalStatus.OK
                or hint.sequence_id != sequence_id
                or not requested_length <= hint.base_length <= len(generation.token_ids)
            ):
                mistake = _mistake_of(generation, requested_length, proposal)
                if mistake:
                    invalid.append(mistake)
                elif proposal.status in _NOT_APPENDED:
                    reason = self._recover(history, proposal, batch_id)
                    if reason:
                        given_up.append((sequence_id, reason))
                if mistake or proposal.status in _NOT_APPENDED:
                    # No draft of this length will come: no step may wait for it.
                    hint = Hint(sequence_id, requested_length, [], 0)
            elif len(hint.token_ids) > history.hint_tokens:
                hint = hint._replace(token_ids=hint.token_ids[: history.hint_tokens])
            if requested_length:
                hints.append(hint)
        return BatchResult(
            hints=hints,
            given_up=given_up,
            invalid=invalid,
            sent_s=batch.sent_s if batch.is_live else None,
            step_s=batch.step_s,
        )

    def _drop(self, sequence_id: str, history: _History) -> None:
        """Stops feeding a sequence; releases it if the drafter has some of it."""
        del self._histories[sequence_id]
        self._urgent.pop(sequence_id, None)
        self._backlog.pop(sequence_id, None)
        if history.num_sent:
            num_tokens = len(history.generation.token_ids)
            length = num_tokens if history.num_sent > num_tokens else 0
            self._releases[sequence_id] = Release(sequence_id, history.keep, length)

    def _recover(self, history: _History, proposal: Proposal, batch_id: int) -> str:
        """Rewinds a history to what the drafter has; returns why it is given up, or ""."""
        sequence_id = history.generation.sequence_id
        if proposal.status is ProposalStatus.INVALID:
            self._drop(sequence_id, history)
            return proposal.message
        if batch_id < history.rewound_at:
            return ""
        history.num_rewinds += 1
        if history.num_rewinds > _MAX_REWINDS:
            self._drop(sequence_id, history)
            return f"the drafter lost the sequence {history.num_rewinds} times"
        history.num_sent = min(history.num_sent, proposal.known_length)
        history.rewound_at = self._next_batch_id
        self._enqueue(sequence_id, history)
        return ""

    def _enqueue(self, sequence_id: str, history: _History) -> None:
        num_unsent = len(history.generation.token_ids) - history.num_sent
        if history.max_draft_tokens and num_unsent <= _MAX_URGENT_TOKENS:
            self._urgent[sequence_id] = history
            self._backlog.pop(sequence_id, None)
        else:
            self._backlog[sequence_id] = history
            self._urgent.pop(sequence_id, None)

    def _cut_releases(self) -> tuple[list[Release], int]:
        """Removes the next releases; returns them and how many bytes are left for deltas."""
        releases: list[Release] = []
        room_bytes = _MAX_RELEASES_BYTES
        for release in self._releases.values():
            room_bytes -= _RELEASE_BYTES + 2 * len(release.sequence_id)
            if room_bytes < 0 or len(releases) == MAX_DELTAS:
                break
            releases.append(release)
        for release in releases:
            del self._releases[release.sequence_id]
        if not releases:
            return releases, MAX_PROPOSE_REQUEST_BYTES - 2 * NUMBER_BYTES
        return releases, MAX_PROPOSE_REQUEST_BYTES - 2 * NUMBER_BYTES - _MAX_RELEASES_BYTES


def _mistake_of(generation: Generation, requested_length: int, proposal: Proposal) -> str:
    """Why a proposal cannot be the answer to its delta; "" if it can.

    Its token ids are not checked: that took a third as long as all else here, and a verifier cuts
    a draft before the first id outside the vocabulary.
    """
    hint = proposal.hint
    if hint.sequence_id != generation.sequence_id:
        return "a proposal is of another sequence than requested"
    if not proposal.status:
        return "a proposal has an unknown status"
    if proposal.status in _NOT_APPENDED:
        return ""
    if requested_length and not requested_length <= hint.base_length <= len(generation.token_ids):
        return f"a proposal continues {hint.base_length} tokens, not {requested_length}"
    return ""
