"""The drafters in use, as the engine has them: a feed and a link each.

Owned by the engine thread. A drafter is connected when the first sequence names it, and let go
when none has needed it for a while. What a drafter answers is only ever a hint: one that is down,
late or wrong costs its sequences nothing but their drafts.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from servicekit.logs import get_logger
from tandem.values import Keep
from verifier.drafters import wire
from verifier.drafters.batches import DrafterProtocolError
from verifier.drafters.feed import DraftFeed
from verifier.drafters.held import Held, HeldSequences
from verifier.drafters.messages import (
    DrafterAnswered,
    DrafterBack,
    DrafterDown,
    DrafterFault,
    DrafterLate,
    DrafterMessage,
    DrafterState,
    DrafterUp,
    Link,
)
from verifier.drafts.draft_buffer import Hint
from verifier.drafts.drafted_by import DraftedBy
from verifier.scheduling.sequence import Sequence

logger = get_logger(__name__)

# How long the Close of an ended sequence is awaited.
_HELD_S = 30.0
# How long a text that a pool keeps may wait for a drafter that is not connected.
_UNSENT_S = 30.0
# Texts that wait for their drafter, and their tokens: beyond that, no further one is kept. One
# drafter's may take as much as they leave free, so that a few that are down leave room for others.
_MAX_WAITING = 4_096
_MAX_WAITING_TOKENS = 2 << 20

# How often idle drafters and held sequences are looked for.
_TICK_S = 1.0

# Hints can be expected also of a drafter that is not reached yet.
_ANSWERING = (DrafterState.UP, DrafterState.CONNECTING)

# Drafters in use at a time; one that does not answer makes room for another.
_MAX_DRAFTERS = 256

# Of one reason why a drafter is at fault, one line is logged in this time; of one kind of fault, of
# so many reasons: they may be the drafter's own words.
_LOG_INTERVAL_S = 60.0
_MAX_LOGGED_REASONS = 8
# What differs from one fault to the next of the same reason: lengths, ids.
_NUMBER = re.compile(r"\d+")
# Of a drafter's own words, in a log line or an event.
_MAX_DETAIL_CHARACTERS = 200


class Answer(NamedTuple):
    """What an answer brought.

    Attributes:
        hints: by sequence; without tokens where there is no draft.
        sent_s: when the batch was made, if a step may have waited for it.
    """

    hints: list[tuple[Sequence, Hint]]
    sent_s: float | None


@dataclass(slots=True, eq=False)
class FedDrafter:
    """One drafter."""

    address: str
    link: Link
    feed: DraftFeed = field(default_factory=DraftFeed)
    state: DrafterState = DrafterState.CONNECTING
    reason: str = ""
    epoch: int = 0
    # A wait for its hints was in vain, and it has not answered since.
    is_overdue: bool = False
    # When it was last needed.
    used_at_s: float = 0.0
    # By fault and reason: when the next line may be logged.
    next_log_s: dict[DrafterFault, dict[str, float]] = field(default_factory=dict)

    @property
    def is_answering(self) -> bool:
        """Whether hints can be expected."""
        return self.state in _ANSWERING


class Drafters:
    """All drafters in use; owned by the engine thread.

    Attributes:
        state_changed: called with a drafter that came into use or whose state has changed.
    """

    def __init__(
        self,
        *,
        open_link: Callable[[str], Link],
        vocab_size: int,
        unused_timeout_s: float,
        count_fault: Callable[[DrafterFault], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with none. Compiles the kernel that reads answers, or loads it.

        Args:
            open_link: begins to connect to an address; returns at once.
            vocab_size: drafts hold smaller token ids only.
            unused_timeout_s: a drafter that no sequence needs for so long is let go.
        """
        self.state_changed: Callable[[FedDrafter], None] = lambda drafter: None
        self._open_link = open_link
        self._vocab_size = vocab_size
        self._unused_timeout_s = unused_timeout_s
        self._count_fault = count_fault
        self._clock = clock
        self._by_address: dict[str, FedDrafter] = {}
        self._held = HeldSequences()
        self._next_tick_s = 0.0

    @property
    def in_use(self) -> list[FedDrafter]:
        return list(self._by_address.values())

    # Sequences

    def move(self, sequence: Sequence, drafted_by: DraftedBy) -> None:
        """The sequence gets its drafts from this drafter from now on, and from no other."""
        self.close(sequence)
        drafter = self._find(drafted_by.address) if drafted_by.address else None
        if drafter is None:
            return
        if drafter.feed.histories.add(sequence, drafted_by):
            sequence.drafter = drafter
        else:
            self._record(drafter, DrafterFault.REFUSED_SEQUENCE, "another has the same id")

    def advance(self, sequence: Sequence) -> None:
        """The sequence has new tokens; hot path."""
        if (fed := _fed(sequence)) is not None:
            fed.feed.histories.advance(sequence)

    def end(self, sequence: Sequence, *, by_itself: bool) -> None:
        """The sequence is over, and was not closed.

        Args:
            by_itself: it ended at a stop token or its longest length, so its pool may keep it.
        """
        drafted_by, fed = sequence.drafted_by, _fed(sequence)
        if drafted_by is None or fed is None:
            return
        if by_itself and drafted_by.has_pool and drafted_by.keep is None:
            self._hold(fed.feed, sequence)
        else:
            self.close(sequence, (by_itself and drafted_by.keep) or Keep.NOTHING)

    def close(self, sequence: Sequence, keep: Keep = Keep.NOTHING, length: int = 0) -> None:
        """The sequence leaves its drafter, if it has one; its pool keeps this part of its text."""
        if (fed := _fed(sequence)) is not None:
            self._remove(fed.feed, sequence, keep, length)
            sequence.drafter = None

    def close_ended(
        self, session_id: int, sequence_id: str, keep: Keep = Keep.NOTHING, length: int = 0
    ) -> None:
        """Handles the Close of a sequence that is over; unknown ones are ignored."""
        held = self._held.pop(session_id, sequence_id)
        if held is not None:
            self._remove(held.feed, held.sequence, keep, length)

    def detach(self, session_id: int) -> None:
        """A session is over: no Close of its ended sequences will come."""
        self._give_up(self._held.of_session(session_id))

    def _hold(self, feed: DraftFeed, sequence: Sequence) -> None:
        """Awaits the Close of a sequence that is over; gives up others if too many are."""
        # The last sequence with this id: its Close cannot come any more.
        self.close_ended(sequence.session_id, sequence.sequence_id)
        while (excess := self._held.excess(sequence.session_id)) is not None:
            self._give_up([excess])
        feed.histories.hold(sequence.sequence_id)
        sequence.drafter = None
        self._held.add(Held(feed, sequence, self._clock() + _HELD_S))

    def _give_up(self, those: Iterable[Held]) -> None:
        """No Close is awaited any more, and nothing is kept."""
        for held in those:
            self.close_ended(held.sequence.session_id, held.sequence.sequence_id)

    def _remove(self, feed: DraftFeed, sequence: Sequence, keep: Keep, length: int) -> None:
        """The drafter is done with a sequence; without room to wait, its text is not kept."""
        if keep is not Keep.NOTHING and not self._may_wait(feed):
            keep = Keep.NOTHING
        feed.histories.remove(
            sequence.sequence_id,
            keep=keep,
            length=length,
            until_s=self._clock() + _UNSENT_S,
            only=sequence,
        )

    def _may_wait(self, feed: DraftFeed) -> bool:
        """Whether one more text may wait for this feed's drafter."""
        all_histories = [each.feed.histories for each in self._by_address.values()]
        num_free = _MAX_WAITING - sum(each.num_waiting for each in all_histories)
        num_free_tokens = _MAX_WAITING_TOKENS - sum(
            each.num_waiting_tokens for each in all_histories
        )
        histories = feed.histories
        return histories.num_waiting < num_free and histories.num_waiting_tokens < num_free_tokens

    def _find(self, address: str) -> FedDrafter | None:
        drafter = self._by_address.get(address)
        if drafter is None:
            if len(self._by_address) >= _MAX_DRAFTERS and not self._evict_unreachable():
                return None
            drafter = FedDrafter(address, self._open_link(address))
            self._by_address[address] = drafter
            self.state_changed(drafter)
        drafter.used_at_s = self._clock()
        return drafter

    def _evict_unreachable(self) -> bool:
        """Lets go of the drafter that was named first of those that do not answer, if one does not:
        sessions can make up names.
        """
        for drafter in self._by_address.values():
            if drafter.state is not DrafterState.UP:
                self._let_go(drafter, "others are needed")
                return True
        return False

    def _let_go(self, drafter: FedDrafter, reason: str) -> None:
        del self._by_address[drafter.address]
        drafter.link.close()
        for sequence in drafter.feed.histories.sequences:
            sequence.drafter = None
        self._change(drafter, DrafterState.IDLE, reason)

    # Messages

    def flush(self) -> None:
        """Sends every drafter what it is to be sent; hot path."""
        now_s = self._clock()
        for drafter in self._by_address.values():
            if drafter.state is not DrafterState.UP:
                continue
            try:
                while (batch := drafter.feed.next_batch(now_s)) is not None:
                    data = wire.request(batch)
                    drafter.link.send(drafter.epoch, data, batch.max_answer_bytes)
            except Exception as error:
                self._record(drafter, DrafterFault.INTERNAL_ERROR, repr(error))
                drafter.link.fail(drafter.epoch, "internal error")

    def answered(self, message: DrafterAnswered) -> Answer:
        """Reads an answer."""
        drafter = self._sender(message)
        if drafter is None or message.epoch != drafter.epoch:
            return Answer([], None)
        drafter.is_overdue = False
        try:
            batch_id, proposals = wire.proposals(
                message.data,
                num_expected=drafter.feed.num_expected,
                vocab_size=self._vocab_size,
            )
            result = drafter.feed.on_proposals(batch_id, proposals)
        except DrafterProtocolError as error:
            self._record(drafter, DrafterFault.PROTOCOL_ERROR, str(error))
            drafter.link.fail(drafter.epoch, f"an answer is invalid: {error}")
            return Answer([], None)
        for mistake in result.mistakes:
            self._record(drafter, DrafterFault.ODD_PROPOSAL, mistake)
        for sequence, reason in result.given_up:
            self._record(drafter, DrafterFault.REFUSED_SEQUENCE, reason)
            sequence.drafter, sequence.refused_by = None, drafter.address
        return Answer(result.hints, result.sent_s)

    def notice(self, message: DrafterUp | DrafterLate | DrafterBack | DrafterDown) -> None:
        """A drafter comes, goes, or is late."""
        drafter = self._sender(message)
        if drafter is None:
            return
        match message:
            case DrafterUp():
                drafter.epoch = message.epoch
                drafter.feed.restart()
                self._change(drafter, DrafterState.UP, "")
            case DrafterBack():
                self._change(drafter, DrafterState.UP, "")
            case DrafterLate():
                self._record(drafter, DrafterFault.LATE_ANSWER, "")
                if message.is_aside:
                    self._change(drafter, DrafterState.SLOW, "its answers are late")
            case DrafterDown():
                if message.fault is not None:
                    self._record(drafter, message.fault, message.reason)
                drafter.feed.restart()
                self._change(drafter, DrafterState.DOWN, message.reason)

    def _sender(self, message: DrafterMessage) -> FedDrafter | None:
        """The drafter whose link the message is from; None if it was let go."""
        for drafter in self._by_address.values():
            if drafter.link is message.link:
                return drafter
        return None

    def _change(self, drafter: FedDrafter, state: DrafterState, reason: str) -> None:
        drafter.is_overdue = False
        if state is not drafter.state:
            drafter.state, drafter.reason = state, reason[:_MAX_DETAIL_CHARACTERS]
            self.state_changed(drafter)

    def _record(self, drafter: FedDrafter, fault: DrafterFault, detail: str) -> None:
        """Counts a fault; per drafter and reason, logs one a minute at most."""
        self._count_fault(fault)
        detail = detail[:_MAX_DETAIL_CHARACTERS]
        reason = _NUMBER.sub("#", detail)
        now_s = self._clock()
        next_log_s = drafter.next_log_s.setdefault(fault, {})
        if now_s < next_log_s.get(reason, now_s):
            return
        if len(next_log_s) >= _MAX_LOGGED_REASONS and reason not in next_log_s:
            for each in [each for each, due_s in next_log_s.items() if due_s <= now_s]:
                del next_log_s[each]
            if len(next_log_s) >= _MAX_LOGGED_REASONS:
                return
        next_log_s[reason] = now_s + _LOG_INTERVAL_S
        logger.warning("drafter_fault", drafter=drafter.address, fault=fault.value, detail=detail)

    # Time

    def tick(self) -> None:
        """Lets go of what nobody needs; to be called now and then."""
        now_s = self._clock()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + _TICK_S
        self._give_up([held for held in self._held if held.until_s <= now_s])
        for drafter in self.in_use:
            drafter.feed.histories.expire(now_s)
            if not drafter.feed.is_idle:
                drafter.used_at_s = now_s
            elif now_s >= drafter.used_at_s + self._unused_timeout_s:
                self._let_go(drafter, "no sequence needs it")

    def due_s(self) -> float | None:
        """How long until `tick` or `flush` has something to do; None: until a command comes."""
        if not self._by_address:
            return None
        now_s = self._clock()
        dues_s = [max(0.0, self._next_tick_s - now_s)]
        for drafter in self._by_address.values():
            if drafter.state is DrafterState.UP:
                due_s = drafter.feed.due_s(now_s)
                dues_s += [] if due_s is None else [due_s]
        return min(dues_s)

    def stop(self) -> None:
        """Lets go of all drafters."""
        for drafter in self.in_use:
            drafter.link.close()
        self._by_address.clear()

    def count_states(self) -> dict[DrafterState, int]:
        """How many drafters are in each state."""
        counts: dict[DrafterState, int] = {}
        for drafter in self._by_address.values():
            counts[drafter.state] = counts.get(drafter.state, 0) + 1
        return counts

    def check_integrity(self) -> None:
        """Asserts that a drafter that is fed is in use, and that the totals are right."""
        self._held.check_integrity()
        for drafter in self._by_address.values():
            drafter.feed.histories.check_integrity()
        feeds = [drafter.feed for drafter in self._by_address.values()]
        for held in self._held:
            assert held.feed in feeds or not held.feed.histories.sequences


def _fed(sequence: Sequence) -> FedDrafter | None:
    """The drafter that has the sequence's tokens."""
    drafter = sequence.drafter
    return drafter if isinstance(drafter, FedDrafter) else None
