"""The slots of a model's recurrent states: of running sequences, and of snapshots.

Unlike K/V, states cannot be cut: they are those after one token. So a cached prefix is of use up to
a snapshot only, a copy of states after whole blocks, by the digest of the last of them. One is
taken where a prompt's last whole block ends, and where it parts from what others have computed.
Running sequences need slots more than snapshots do, of which the least recently used one goes.

Knows no tensor and no sequence.
"""

import bisect
import collections
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SequenceStates:
    """Of one running sequence.

    Attributes:
        slot: its own.
        source: the slot of the snapshot that it begins with, until its first tokens are computed;
            -1: none, or its own.
        start: after how many tokens it begins.
        due: numbers of tokens, whole blocks, after which snapshots are to be taken; rising.
        saves: those that steps take now, each with the slot that it goes to.
    """

    slot: int
    source: int
    start: int
    due: list[int] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)


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
            slot=slot, source=source, start=start, due=sorted({n for n in due if n > start})
        )

    def request(self, states: SequenceStates, num_tokens: int) -> None:
        """Has a snapshot taken after so many tokens, none of which must be computed yet."""
        if num_tokens not in states.due:
            bisect.insort(states.due, num_tokens)

    def plan(self, states: SequenceStates, end: int) -> None:
        """Takes slots for the snapshots up to `end`, the number of tokens after a step."""
        while states.due and states.due[0] <= end:
            num_tokens = states.due.pop(0)
            if (slot := self._take()) is not None:
                states.saves.append((num_tokens, slot))

    def settle(self, states: SequenceStates, digests: list[bytes], num_tokens: int) -> None:
        """So many tokens are computed, whose whole blocks have these digests: enters snapshots."""
        if num_tokens <= states.start:
            return
        if states.source >= 0:
            self._unread(states.source)
            states.source = -1
        while states.saves and states.saves[0][0] <= num_tokens:
            length, slot = states.saves.pop(0)
            digest = digests[length // self._block_size - 1]
            # Another sequence may have computed the same.
            if digest in self._snapshots:
                self._free.append(slot)
            else:
                self._snapshots[digest] = slot

    def end(self, states: SequenceStates) -> None:
        """A sequence runs no more: frees what it holds."""
        if states.source >= 0:
            self._unread(states.source)
        self._free += [states.slot, *(slot for _, slot in states.saves)]

    def check_integrity(self, running: list[SequenceStates]) -> None:
        """Asserts the invariant; `running` are all that hold slots."""
        held = [slot for each in running for slot in (each.slot, *(s for _, s in each.saves))]
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

    def _oldest(self) -> bytes | None:
        """The least recently used snapshot that nobody is to begin with."""
        unread = (d for d, slot in self._snapshots.items() if slot not in self._num_readers)
        return next(unread, None)

    def _unread(self, slot: int) -> None:
        self._num_readers[slot] -= 1
        if not self._num_readers[slot]:
            del self._num_readers[slot]
