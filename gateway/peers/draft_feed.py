"""What one drafter has been sent of each sequence, and what it is still owed.

Owns that bookkeeping for one drafter. Knows no gRPC and no verifier. Tokens are never copied into
a queue: what is owed is cut from the generation's own list when a batch is made, so a drafter
that is slow or gone costs one number per sequence, and finds everything merged when it is back.
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
from gateway.messages.sizes import (
    FIELD_BYTES,
    MAX_PROPOSE_REQUEST_BYTES,
    NUMBER_BYTES,
    TOKEN_BYTES,
)
from gateway.messages.verifier import Hint

#: The wire's limits (drafter.proto).
MAX_DELTA_TOKENS = 8_192
MAX_DELTAS = 4_096

# What is in flight when histories are replayed is answered well within the deadline.
_MAX_BATCH_TOKENS = 16_384

# Without tokens: the tags, lengths and numbers of a delta, and of what creates a sequence.
_DELTA_BYTES = 3 * FIELD_BYTES + 4 * NUMBER_BYTES
_CREATION_BYTES = 3 * FIELD_BYTES + 12 * NUMBER_BYTES
# A release says its id twice if its pool gets something.
_RELEASE_BYTES = 4 * FIELD_BYTES + NUMBER_BYTES
# What releases may fill of a message, so that some always have room.
_MAX_RELEASES_BYTES = MAX_PROPOSE_REQUEST_BYTES // 4

# A drafter that is slower than the verifier's steps gets what piled up in fewer, larger batches.
_MAX_BATCHES_IN_FLIGHT = 8

# Of these, with prompts, replays and releases alone: they must not stand in the way of drafts, and
# a drafter that has to be told everything again takes it at its own pace.
_MAX_BACKLOG_IN_FLIGHT = 2

# After this many live messages, one with prompts or replays, if there are some.
_MAX_LIVE_IN_TURN = 8

# A sequence of which more is owed is a prompt or a replay: it does not hold up what others decided.
_MAX_URGENT_TOKENS = 1_024

# Answers to deltas that the drafter did not append.
_NOT_TAKEN = (ProposalStatus.OUT_OF_SYNC, ProposalStatus.INVALID)

# A drafter that keeps forgetting a sequence (it is over its bounds) is not worth replaying to.
_MAX_REWINDS = 8


class DrafterProtocolError(Exception):
    """A drafter's answer does not fit what it was asked."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one batch.

    Attributes:
        hints: one per delta that asked for a draft, empty where there is none; of sequences that
            are still fed.
        given_up: sequences that will not be fed any more, and why.
        odd: what was wrong with the proposals that make no sense; there is no draft of these.
        sent_s: when a live batch was made; None for prompts, replays and releases.
        step_s: when the first step arrived that a live batch told of.
    """

    hints: Sequence[Hint]
    given_up: Sequence[tuple[str, str]]
    odd: Sequence[str]
    sent_s: float | None
    step_s: float | None


@dataclasses.dataclass(slots=True, kw_only=True)
class _History:
    """One sequence as its drafter has it.

    Attributes:
        hint_tokens: most draft tokens asked for at a time.
        num_sent: tokens that the drafter has, once everything in flight has arrived.
        num_wanted: draft tokens that the verifier has use for.
        keep: if it is over: what goes to its pool once all of it was sent.
        rewound_at: first batch after the last rewind; OUT_OF_SYNC from before is old news.
    """

    generation: Generation
    hint_tokens: int
    num_sent: int = 0
    num_wanted: int = 0
    rewound_at: int = 0
    num_rewinds: int = 0
    keep: Keep = Keep.NOTHING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BatchInFlight:
    """A batch without an answer yet.

    Attributes:
        step_s: when the first step arrived that it tells of, if it is live.
        asked: per delta, its history and the length for which a draft was asked (0: none was).
        is_live: what the last steps decided; not a prompt, a replay or releases alone.
    """

    batch_id: int
    sent_s: float
    step_s: float | None
    asked: Sequence[tuple[_History, int]]
    is_live: bool
    asks_for_drafts: bool


class DraftFeed:
    """The feed of one drafter; owned by its link, on the event loop.

    Invariants: a sequence is in at most one of `_urgent` and `_backlog`, and in one of them
    whenever a draft is wanted of it, or it was never sent; both are within `_histories`.
    """

    def __init__(self, *, hint_tokens: int) -> None:
        """Asks for drafts of at most `hint_tokens`."""
        self._hint_tokens = hint_tokens
        self._histories: dict[str, _History] = {}
        # Sequences with new tokens: those whose next draft somebody may wait for, and the others.
        self._urgent: dict[str, _History] = {}
        self._backlog: dict[str, _History] = {}
        self._releases: dict[str, Release] = {}
        self._in_flight: collections.deque[_BatchInFlight] = collections.deque()
        self._next_batch_id = 1
        self._num_live_in_turn = 0
        self._step_s: float | None = None

    def add(self, generation: Generation) -> None:
        """Begins to feed a sequence; its prompt is owed."""
        hint_tokens = min(generation.request.hint_tokens, self._hint_tokens)
        history = _History(generation=generation, hint_tokens=hint_tokens)
        self._histories[generation.sequence_id] = history
        self._backlog[generation.sequence_id] = history

    def advance(self, sequence_id: str, num_wanted: int) -> None:
        """The sequence has new tokens, and `num_wanted` draft tokens are useful next; hot path.

        When none are, the tokens can wait: they go with those of the next time that some are.
        """
        history = self._histories.get(sequence_id)
        if history is not None:
            history.num_wanted = num_wanted
            if num_wanted:
                self._owe(sequence_id, history)

    def begin_step(self, received_s: float) -> None:
        """A verifier's step brought what is owed now; hot path."""
        if self._step_s is None:
            self._step_s = received_s

    def remove(self, sequence_id: str, *, keep: Keep = Keep.NOTHING) -> None:
        """The sequence is over: the drafter may forget it, and keep so much of it in its pool.

        What is to be kept is sent to its end first. A stop string may have cut what was sent.
        """
        history = self._histories.get(sequence_id)
        if history is None:
            return
        history.num_wanted = 0
        generation = history.generation
        if keep is not Keep.NOTHING and history.num_sent and generation.request.ngram.pool_id:
            history.keep = keep
            if history.num_sent < len(generation.token_ids):
                self._owe(sequence_id, history)
                return
        self._drop(sequence_id, history)

    def restart(self) -> None:
        """The drafter is a new one, or to be treated as one: it is owed everything again."""
        self._in_flight.clear()
        self._step_s = None
        # What is over is not worth a replay.
        for sequence_id, history in list(self._histories.items()):
            if history.keep is not Keep.NOTHING:
                self._drop(sequence_id, history)
        self._releases.clear()
        for sequence_id, history in self._histories.items():
            history.num_sent = 0
            history.num_rewinds = 0
            self._owe(sequence_id, history)

    @property
    def awaits_drafts(self) -> bool:
        """Whether a draft that somebody may wait for is asked for, or about to be."""
        return bool(self._urgent) or any(batch.asks_for_drafts for batch in self._in_flight)

    @property
    def oldest_sent_s(self) -> float | None:
        """When the batch that is to be answered next was made; None if there is none."""
        return self._in_flight[0].sent_s if self._in_flight else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is fed, owed or expected."""
        return not (self._histories or self._releases or self._in_flight)

    def next_batch(self, now_s: float) -> DeltaBatch | None:
        """Cuts the next message from what is owed; None when nothing is, or enough is in flight.

        Sequences whose drafts are urgent go first, in messages of their own: prompts and replays,
        which can be long, fill the time between the verifier's steps.
        """
        if len(self._in_flight) >= _MAX_BATCHES_IN_FLIGHT:
            return None
        is_live = self._takes_urgent()
        if not is_live and (
            not (self._backlog or self._releases)
            or sum(not batch.is_live for batch in self._in_flight) >= _MAX_BACKLOG_IN_FLIGHT
        ):
            return None
        self._num_live_in_turn = self._num_live_in_turn + 1 if is_live and self._backlog else 0
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        releases, room_bytes = self._take_releases()
        if is_live:
            deltas, asked = self._cut(self._urgent, _MAX_BATCH_TOKENS, room_bytes)
        else:
            # A prompt message delays an urgent one that comes right behind it: keep it small.
            deltas, asked = self._cut(self._backlog, MAX_DELTA_TOKENS, room_bytes)
        self._in_flight.append(
            _BatchInFlight(
                batch_id=batch_id,
                sent_s=now_s,
                step_s=self._step_s if is_live else None,
                asked=asked,
                is_live=is_live,
                asks_for_drafts=any(asked_length for _, asked_length in asked),
            )
        )
        if not self._urgent:
            self._step_s = None
        return DeltaBatch(batch_id=batch_id, deltas=deltas, releases=releases)

    def _takes_urgent(self) -> bool:
        """Whether the next message is for sequences whose drafts are urgent."""
        if not self._urgent:
            return False
        # A drafter that is slower than the steps always finds something urgent: prompts and
        # replays get a turn all the same.
        return not self._backlog or self._num_live_in_turn < _MAX_LIVE_IN_TURN

    def _cut(
        self, owed: dict[str, _History], room: int, room_bytes: int
    ) -> tuple[list[Delta], list[tuple[_History, int]]]:
        """Takes deltas of at most `room` tokens and `room_bytes` bytes from what is owed."""
        deltas: list[Delta] = []
        asked: list[tuple[_History, int]] = []
        done: list[str] = []
        for sequence_id, history in owed.items():
            base_length = history.num_sent
            room_bytes -= _DELTA_BYTES + len(sequence_id)
            if not base_length:
                pool_id = history.generation.request.ngram.pool_id
                room_bytes -= _CREATION_BYTES + len(pool_id.encode())
            num_tokens = min(room, MAX_DELTA_TOKENS, room_bytes // TOKEN_BYTES)
            if num_tokens <= 0 or len(deltas) == MAX_DELTAS:
                break
            token_ids = history.generation.token_ids
            end = min(len(token_ids), base_length + num_tokens)
            is_complete = end == len(token_ids)
            max_draft_tokens = 0
            if is_complete:
                max_draft_tokens = min(history.num_wanted, history.hint_tokens)
            deltas.append(
                Delta(
                    sequence_id,
                    base_length,
                    token_ids[base_length:end],
                    max_draft_tokens,
                    history.generation.request.max_model_len,
                    None if base_length else _new_history(history.generation),
                )
            )
            asked.append((history, end if max_draft_tokens else 0))
            history.num_sent = end
            room -= end - base_length
            room_bytes -= TOKEN_BYTES * (end - base_length)
            if is_complete:
                done.append(sequence_id)
        for sequence_id in done:
            history = owed.pop(sequence_id)
            if history.keep is not Keep.NOTHING:
                # Sent whole by this message; releases of a message come before its tokens, so the
                # next one brings it.
                self._drop(sequence_id, history)
        return deltas, asked

    def on_proposals(self, batch_id: int, proposals: Sequence[Proposal]) -> Answer:
        """Takes the answer to the oldest batch in flight.

        Raises:
            DrafterProtocolError: it is not that batch's answer.
        """
        if not self._in_flight or self._in_flight[0].batch_id != batch_id:
            raise DrafterProtocolError(f"batch {batch_id} was answered out of turn")
        batch = self._in_flight.popleft()
        asked = batch.asked
        if len(proposals) != len(asked):
            raise DrafterProtocolError(f"{len(proposals)} answers to {len(asked)} deltas")
        hints: list[Hint] = []
        given_up: list[tuple[str, str]] = []
        odd: list[str] = []
        for (history, asked_length), proposal in zip(asked, proposals, strict=True):
            hint = proposal.hint
            sequence_id = history.generation.sequence_id
            if self._histories.get(sequence_id) is not history:
                continue  # it ended meanwhile
            generation = history.generation
            if (
                proposal.status is not ProposalStatus.OK
                or hint.sequence_id != sequence_id
                or not asked_length <= hint.base_length <= len(generation.token_ids)
            ):
                oddity = _oddity(generation, asked_length, proposal)
                if oddity:
                    odd.append(oddity)
                elif proposal.status in _NOT_TAKEN:
                    reason = self._recover(history, proposal, batch_id)
                    if reason:
                        given_up.append((sequence_id, reason))
                if oddity or proposal.status in _NOT_TAKEN:
                    # There will be no draft for this length: nobody shall wait for it.
                    hint = Hint(sequence_id, asked_length, [], 0)
            elif len(hint.token_ids) > history.hint_tokens:
                hint = hint._replace(token_ids=hint.token_ids[: history.hint_tokens])
            if asked_length:
                hints.append(hint)
        return Answer(
            hints=hints,
            given_up=given_up,
            odd=odd,
            sent_s=batch.sent_s if batch.is_live else None,
            step_s=batch.step_s,
        )

    def _drop(self, sequence_id: str, history: _History) -> None:
        """Stops feeding a sequence; the drafter is told if it knows it."""
        del self._histories[sequence_id]
        self._urgent.pop(sequence_id, None)
        self._backlog.pop(sequence_id, None)
        if history.num_sent:
            num_tokens = len(history.generation.token_ids)
            length = num_tokens if history.num_sent > num_tokens else 0
            self._releases[sequence_id] = Release(sequence_id, history.keep, length)

    def _recover(self, history: _History, proposal: Proposal, batch_id: int) -> str:
        """Rewinds a history that the drafter lost track of; or why it is given up."""
        sequence_id = history.generation.sequence_id
        if proposal.status is ProposalStatus.INVALID:
            self._drop(sequence_id, history)
            return proposal.message
        if batch_id < history.rewound_at:
            return ""
        history.num_rewinds += 1
        if history.num_rewinds > _MAX_REWINDS:
            self._drop(sequence_id, history)
            return f"the drafter lost it {history.num_rewinds} times"
        history.num_sent = min(history.num_sent, proposal.known_length)
        history.rewound_at = self._next_batch_id
        self._owe(sequence_id, history)
        return ""

    def _owe(self, sequence_id: str, history: _History) -> None:
        num_owed = len(history.generation.token_ids) - history.num_sent
        if history.num_wanted and num_owed <= _MAX_URGENT_TOKENS:
            self._urgent[sequence_id] = history
            self._backlog.pop(sequence_id, None)
        else:
            self._backlog[sequence_id] = history
            self._urgent.pop(sequence_id, None)

    def _take_releases(self) -> tuple[list[Release], int]:
        """Takes what is to be released next, and tells how many bytes are left for deltas."""
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


def _oddity(generation: Generation, asked_length: int, proposal: Proposal) -> str:
    """Why a proposal cannot be the answer to its delta; "" if it can.

    Its token ids are not looked at: to do so took a third as long as all else here, and a verifier
    cuts a draft before the first id outside the vocabulary.
    """
    hint = proposal.hint
    if hint.sequence_id != generation.sequence_id:
        return "it is of another sequence than was asked for"
    if not proposal.status:
        return "its status has no meaning"
    if proposal.status in _NOT_TAKEN:
        return ""
    if asked_length and not asked_length <= hint.base_length <= len(generation.token_ids):
        return f"it continues {hint.base_length} tokens, not {asked_length}"
    return ""


def _new_history(generation: Generation) -> NewHistory:
    return NewHistory(prompt_length=generation.prompt_length, ngram=generation.request.ngram)
