"""The sequences that one drafter is fed: what it has of each, and what is still to be sent.

Tokens are never copied into a queue: unsent ones are cut from the sequence's own list when a batch
is made, so a drafter that is slow or gone costs one number per sequence, and gets everything merged
when it is back. Knows no batch in flight and no pace.

What an output may repeat, its prediction, is text that its drafter has before the sequence's own.
Before the prediction are the prompt's last tokens again: so its beginning is what followed the
longest match where the output begins. With a prompt of a b c and a prediction of x y, a drafter has

    a b c x y a b c     and proposes x y
"""

import dataclasses
import math
from collections.abc import Sequence as SequenceOf

from tandem.values import Keep
from verifier.drafters.batches import (
    MAX_DELTA_TOKENS,
    MAX_DELTAS,
    TOKEN_BYTES,
    Delta,
    Proposal,
    ProposalStatus,
    Release,
)
from verifier.drafters.releases import Releases
from verifier.drafts.drafted_by import DraftedBy
from verifier.scheduling.sequence import Sequence

# At most, in bytes: a delta without its tokens, matching policy and span.
_DELTA_BYTES = 128

# A sequence with more unsent tokens is a prompt or a replay, and must not delay the others' drafts.
_MAX_URGENT_TOKENS = 1_024

# The prompt's last tokens that stand before a prediction: more than other places have in common.
_MAX_LEAD_TOKENS = 32

# A drafter that keeps evicting a sequence gets no more replays of it.
_MAX_REWINDS = 8


@dataclasses.dataclass(slots=True, eq=False)
class History:
    """One sequence as its drafter has it. Lengths are of the drafter's text, which begins with
    `predicted`, but for `end`.

    Attributes:
        predicted: what is before the sequence's own tokens.
        num_sent: tokens that the drafter has, once everything in flight has arrived.
        end: of a sequence that is over, the length of its own text; else None.
        keep: of a sequence that is over: what its pool gets once all of it was sent.
        is_held: whether it is over, and what its pool keeps is not decided yet.
        until_s: when its pool gets nothing if it was not sent by then.
        rewound_at: first batch after the last rewind; OUT_OF_SYNC of earlier ones is outdated.
    """

    sequence: Sequence
    drafted_by: DraftedBy
    predicted: SequenceOf[int] = ()
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
        num_own = len(self.sequence.token_ids) if self.end is None else self.end
        return len(self.predicted) + num_own

    def tokens(self, start: int, end: int) -> SequenceOf[int]:
        """A part of the drafter's text."""
        own, before = self.sequence.token_ids, len(self.predicted)
        if start >= before:
            return own[start - before : end - before]
        return [*self.predicted[start:end], *own[: max(0, end - before)]]

    @property
    def num_wanted(self) -> int:
        """How many draft tokens to request for the current length."""
        if self.end is not None:
            return 0
        num_wanted = self.sequence.num_wanted_draft_tokens
        return min(num_wanted, self.drafted_by.hint_tokens or num_wanted)


class Histories:
    """Owned by a feed.

    Invariants: a sequence is in at most one of `urgent` and `backlog`, and, unless it is over, in
    one of them whenever a draft is to be requested; both are within `by_id`, and so is `waiting`:
    the sequences that are over, and whose text is to be sent. `num_waiting_tokens` is the length of
    those texts.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, History] = {}
        # Sequences with unsent tokens: those whose next draft a step may wait for, and the others.
        self.urgent: dict[str, History] = {}
        self.backlog: dict[str, History] = {}
        self.waiting: dict[str, History] = {}
        self.num_waiting_tokens = 0
        self.releases = Releases()

    def add(self, sequence: Sequence, drafted_by: DraftedBy) -> bool:
        """Begins to feed a sequence, with the tokens that it has; False: its id is taken."""
        sequence_id = sequence.sequence_id
        if (known := self.by_id.get(sequence_id)) is not None:
            if known.end is None or known.num_sent:
                return False
            # It is over, and its drafter has none of it.
            self._drop(sequence_id, known)
        # What the last sequence with this id left there is not part of this one's text.
        self.releases.forget(sequence_id)
        history = History(sequence, drafted_by, _predicted(sequence, drafted_by))
        self.by_id[sequence_id] = history
        # Where hints are of no use, the prompt goes with the first request: one message less. A
        # long one does not, since indexing it would delay the first hint.
        expects_useless_hints = sequence.hint_record.expects_useless_hints
        if sequence.num_wanted_draft_tokens:
            # It comes from another drafter, and a step may wait for the hint that is wanted now.
            self._enqueue(sequence_id, history)
        elif not expects_useless_hints or history.length > _MAX_URGENT_TOKENS:
            self.backlog[sequence_id] = history
        return True

    def advance(self, sequence: Sequence) -> None:
        """The sequence has new tokens; hot path. If no draft is wanted, they wait until one is."""
        history = self.by_id.get(sequence.sequence_id)
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
        history = self.by_id.get(sequence_id)
        if history is None or (only is not None and history.sequence is not only):
            return
        self._stop_waiting(sequence_id)
        num_tokens = len(history.sequence.token_ids)
        history.end = min(length, num_tokens) or num_tokens
        history.is_held = False
        if keep in (Keep.OUTPUT, Keep.ALL) and history.drafted_by.has_pool:
            history.keep = keep
            if history.num_sent < history.length:
                history.until_s = until_s
                self.waiting[sequence_id] = history
                self.num_waiting_tokens += history.length
                self._enqueue(sequence_id, history)
                return
        self._drop(sequence_id, history)

    def hold(self, sequence_id: str) -> None:
        """The sequence is over, and nothing more of it is sent until `remove`."""
        history = self.by_id.get(sequence_id)
        if history is not None:
            history.end = len(history.sequence.token_ids)
            history.is_held = True
            self.urgent.pop(sequence_id, None)
            self.backlog.pop(sequence_id, None)

    def expire(self, now_s: float) -> None:
        """Gives up the texts that no drafter has taken in time."""
        for sequence_id, history in list(self.waiting.items()):
            if history.until_s <= now_s:
                history.keep = Keep.NOTHING
                self._drop(sequence_id, history)

    def restart(self) -> None:
        """The drafter may have lost everything: sends every sequence again, and those that are over
        and kept, too.
        """
        self.releases.clear()
        self.urgent.clear()
        for sequence_id, history in self.by_id.items():
            history.num_sent = 0
            history.num_rewinds = 0
            if not history.is_held:
                self.backlog[sequence_id] = history

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that are fed, without those that are over."""
        return [each.sequence for each in self.by_id.values() if each.end is None]

    @property
    def num_waiting(self) -> int:
        """Sequences that are over, and whose text is still to be sent."""
        return len(self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is fed or unsent."""
        return not (self.by_id or self.releases)

    def cut(
        self, unsent: dict[str, History], room_tokens: int, room_bytes: int
    ) -> tuple[list[Delta], list[tuple[History, int, int]]]:
        """Removes deltas of at most `room_tokens` tokens and `room_bytes` bytes from `unsent`.

        Returns:
            The deltas; and for each its history, the length at which it requests a draft (0: none),
            and how many tokens of it.
        """
        deltas: list[Delta] = []
        requested: list[tuple[History, int, int]] = []
        done: list[str] = []
        for sequence_id, history in unsent.items():
            base_length = history.num_sent
            encoded_params, trace_parent = None, ""
            room_bytes -= _DELTA_BYTES
            if not base_length:
                encoded_params = history.drafted_by.encoded_params
                trace_parent = history.drafted_by.trace_parent
                room_bytes -= len(encoded_params) + len(trace_parent)
            num_tokens = min(room_tokens, MAX_DELTA_TOKENS, room_bytes // TOKEN_BYTES)
            if num_tokens <= 0 or len(deltas) == MAX_DELTAS:
                break
            length = history.length
            end = min(length, base_length + num_tokens)
            num_wanted = history.num_wanted if end == length else 0
            sequence, num_before = history.sequence, len(history.predicted)
            deltas.append(
                Delta(
                    sequence_id,
                    base_length,
                    history.tokens(base_length, end),
                    num_before + sequence.prompt_length,
                    num_wanted,
                    num_before + sequence.max_length,
                    encoded_params,
                    trace_parent,
                )
            )
            requested.append((history, end if num_wanted else 0, num_wanted))
            history.num_sent = end
            room_tokens -= end - base_length
            room_bytes -= TOKEN_BYTES * (end - base_length)
            if end == length:
                done.append(sequence_id)
        for sequence_id in done:
            history = unsent.pop(sequence_id)
            if history.end is not None:
                # This batch completes it; the next one releases it, because a message's releases
                # apply before its tokens.
                self._drop(sequence_id, history)
        return deltas, requested

    def recover(
        self, history: History, proposal: Proposal, batch_id: int, *, next_batch_id: int
    ) -> str:
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
        history.rewound_at = next_batch_id
        if not history.is_held:
            self._enqueue(sequence_id, history)
        return ""

    def check_integrity(self) -> None:
        """Asserts the invariants of texts that wait."""
        assert self.num_waiting_tokens == sum(each.length for each in self.waiting.values())
        for sequence_id, history in self.waiting.items():
            assert self.by_id[sequence_id] is history
            assert history.end is not None
            assert not history.is_held

    def _drop(self, sequence_id: str, history: History) -> None:
        """Stops feeding a sequence; releases it if the drafter has some of it."""
        del self.by_id[sequence_id]
        self.urgent.pop(sequence_id, None)
        self.backlog.pop(sequence_id, None)
        self._stop_waiting(sequence_id)
        if history.num_sent:
            length = history.length if history.num_sent > history.length else 0
            self.releases.add(Release(sequence_id, history.keep, length))

    def _stop_waiting(self, sequence_id: str) -> None:
        if (history := self.waiting.pop(sequence_id, None)) is not None:
            self.num_waiting_tokens -= history.length

    def _enqueue(self, sequence_id: str, history: History) -> None:
        if history.num_wanted and history.length - history.num_sent <= _MAX_URGENT_TOKENS:
            self.urgent[sequence_id] = history
            if self.backlog:
                self.backlog.pop(sequence_id, None)
        else:
            self.backlog[sequence_id] = history
            self.urgent.pop(sequence_id, None)


def _predicted(sequence: Sequence, drafted_by: DraftedBy) -> SequenceOf[int]:
    """What a drafter has before the sequence's own tokens."""
    if not (predicted := drafted_by.predicted_token_ids):
        return ()
    lead = sequence.token_ids[: sequence.prompt_length][-_MAX_LEAD_TOKENS:]
    return [*lead, *predicted]
