"""The slots of a model's recurrent states: of running sequences, and of snapshots.

Unlike K/V, states cannot be cut: they are those after one token. So a cached prefix is of use up to
a snapshot only, a copy of states after whole blocks, by the digest of the last of them. One is
taken where a prompt's last whole block ends, and where it parts from what others have computed;
another follows an answer from whole block to whole block, so that a chat goes on behind it.
Running sequences need slots more than snapshots do, of which the least recently used one goes.

Knows no tensor and no sequence.
"""

import bisect
import collections
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple


class Save(NamedTuple):
    """States that a step copies: after how many tokens, to which slot, and whether they follow the
    sequence's answer.
    """

    num_tokens: int
    slot: int
    follows: bool = False


@dataclass(slots=True, kw_only=True)
class SequenceStates:
    """Of one running sequence.

    Attributes:
        slot: its own.
        source: the slot of the snapshot that it begins with, until its first tokens are computed;
            -1: none, or its own.
        length: after how many tokens its slot has states, accepted drafts of the last step not
            among them; until its first step has run, after how many it begins.
        end: that length after the step that was formed last.
        due: numbers of tokens, whole blocks, after which snapshots are to be taken; rising.
        saves: those that steps take now; rising.
        following: the digest and the slot of the snapshot that follows its answer; None: there is
            none yet.
    """

    slot: int
    source: int
    length: int
    end: int
    due: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    following: tuple[bytes, int] | None = None


class StateSlots:
    """Owned by the running set.

    Invariant: every slot is free, a running sequence's own, one that a step copies states to, or a
    snapshot's; snapshots that sequences are to begin with stay.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self._block_size = block_size
        # The next one to be taken is the last: memory that was used before is used first.
        self._free = list(range(num_slots))[::-1]
        # Least recently used first.
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        # How many sequences are to begin with a slot's states.
        self._num_readers: collections.Counter[int] = collections.Counter()

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def has_room(self) -> bool:
        """Whether a sequence can begin now."""
        return bool(self._free) or self._oldest() is not None

    def num_covered_blocks(self, digests: list[bytes]) -> int:
        """Blocks of a cached prefix up to the last snapshot in it."""
        for count in range(len(digests), 0, -1):
            if digests[count - 1] in self._snapshots:
                return count
        return 0

    def begin(self, digests: list[bytes], num_blocks: int, *, due: list[int]) -> SequenceStates:
        """Gives a slot to a sequence that begins after its first `num_blocks`; it must `has_room`.

        Args:
            digests: of the sequence's first blocks.
            due: as in `SequenceStates`.
        """
        source = -1
        if num_blocks:
            digest = digests[num_blocks - 1]
            source = self._snapshots[digest]
            self._snapshots.move_to_end(digest)
            self._num_readers[source] += 1
        slot = self._take()
        if slot is None:
            # The snapshot itself is the only room.
            assert self._num_readers[source] == 1
            self._unread(source)
            del self._snapshots[digest]
            slot, source = source, -1
        start = num_blocks * self._block_size
        return SequenceStates(
            slot=slot,
            source=source,
            length=start,
            end=start,
            due=sorted({n for n in due if n > start}),
        )

    def request(self, states: SequenceStates, num_tokens: int) -> None:
        """Has a snapshot taken after so many tokens, none of which must be computed yet."""
        if num_tokens not in states.due:
            bisect.insort(states.due, num_tokens)

    def plan(self, states: SequenceStates, end: int, *, follows: bool) -> None:
        """Takes slots for the snapshots up to `end`, the number of tokens after a step, drafts not
        among them.

        Args:
            follows: whether one is due after the last whole block, too, in place of the one that
                followed the answer so far.
        """
        states.end = end
        while states.due and states.due[0] <= end:
            num_tokens = states.due.pop(0)
            if (slot := self._take()) is not None:
                states.saves.append(Save(num_tokens, slot))
        num_tokens = end - end % self._block_size
        last = states.saves[-1].num_tokens if states.saves else states.length
        if follows and num_tokens > last and (slot := self._take_following(states)) is not None:
            states.saves.append(Save(num_tokens, slot, follows=True))

    def settle(self, states: SequenceStates, digests: list[bytes], num_tokens: int) -> None:
        """So many tokens are computed, whose whole blocks have these digests: enters snapshots, if
        the step that was formed last is among what was computed.
        """
        if states.end == states.length or num_tokens < states.end:
            return
        if states.source >= 0:
            self._unread(states.source)
            states.source = -1
        states.length = states.end
        while states.saves and states.saves[0].num_tokens <= states.length:
            save = states.saves.pop(0)
            digest = digests[save.num_tokens // self._block_size - 1]
            # Another sequence may have computed the same.
            if digest in self._snapshots:
                self._free.append(save.slot)
                continue
            self._snapshots[digest] = save.slot
            if save.follows:
                states.following = digest, save.slot

    def end(self, states: SequenceStates) -> None:
        """A sequence runs no more: frees what it holds."""
        if states.source >= 0:
            self._unread(states.source)
        self._free += [states.slot, *(save.slot for save in states.saves)]

    def check_integrity(self, running: list[SequenceStates]) -> None:
        """Asserts the invariant; `running` are all that hold slots."""
        held = [slot for each in running for slot in (each.slot, *(s.slot for s in each.saves))]
        slots = [*held, *self._free, *self._snapshots.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or used twice"
        readers = collections.Counter(each.source for each in running if each.source >= 0)
        assert readers == self._num_readers, "a snapshot miscounts who begins with it"
        assert self._num_readers.keys() <= set(self._snapshots.values())

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        digest = self._oldest()
        return None if digest is None else self._snapshots.pop(digest)

    def _take_following(self, states: SequenceStates) -> int | None:
        """The slot of the snapshot that followed an answer, which goes, unless others are to begin
        with it; else another.
        """
        if states.following is not None:
            digest, slot = states.following
            states.following = None
            if self._snapshots.get(digest) == slot and slot not in self._num_readers:
                del self._snapshots[digest]
                return slot
        return self._take()

    def _oldest(self) -> bytes | None:
        """The least recently used snapshot that nobody is to begin with."""
        unread = (d for d, slot in self._snapshots.items() if slot not in self._num_readers)
        return next(unread, None)

    def _unread(self, slot: int) -> None:
        self._num_readers[slot] -= 1
        if not self._num_readers[slot]:
            del self._num_readers[slot]
