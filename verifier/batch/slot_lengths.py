"""How far each slot of recurrent states is, and what a step does with them. Pure.

A slot holds the states of one sequence after its last certain token, and the raw inputs of the
tokens around it; or states that were kept for others to begin with.
"""

from dataclasses import dataclass

import numpy as np

from verifier.batch.batch_layout import BatchLayout, IntArray, StateUse

DEFAULT_MAX_DRAFTS = 31
_SAME = StateUse(slot=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntries:
    """What a step's B sequences do with their states; all int64. A step's rows of a sequence are
    the accepted drafts of its last one, then its tokens.

    Attributes:
        entries: [B, 4]: the slot; the slot that holds its states so far, -1: none does; how many of
            its last drafts were accepted; how many drafts it has now.
        save_offsets: [B + 1], in `saves`.
        saves: [S, 2]: after how many rows states are copied, rising within a sequence, and the slot
            that they are copied to.
    """

    entries: IntArray
    save_offsets: IntArray
    saves: IntArray


class SlotLengths:
    """Owned by the decoder.

    Invariant: slot i holds states after `_lengths[i]` tokens, then `_num_drafts[i]` drafts' raw
    inputs; a length of -1: nothing that is known.
    """

    def __init__(self, *, num_slots: int, max_drafts: int) -> None:
        self.num_slots = num_slots
        self.max_drafts = max_drafts
        self._lengths = [-1] * num_slots
        self._num_drafts = [0] * num_slots

    def begin(self, layout: BatchLayout) -> StateEntries:
        """What a layout does with its states. One that tells none has one sequence, in slot 0.

        Raises:
            ValueError: the layout contradicts itself, or what is known of a slot.
        """
        starts = layout.positions[layout.cu_seqlens_q[:-1]].tolist()
        num_drafts = layout.num_draft_tokens.tolist()
        uses = _uses(layout)
        entries, saves, offsets = [], [], [0]
        written: set[int] = set()
        for use, start, drafts, end in zip(
            uses, starts, num_drafts, layout.seq_lens.tolist(), strict=True
        ):
            if use is None:
                raise ValueError("the layout has a sequence without a place for its states")
            num_accepted = self._num_accepted(use, start)
            if drafts > self.max_drafts:
                raise ValueError(f"the layout has {drafts} drafts, over {self.max_drafts}")
            source = -1 if start == 0 else use.slot if use.source < 0 else use.source
            entries.append((use.slot, source, num_accepted, drafts))
            slots = [use.slot, *(slot for _, slot in use.saves)]
            if not written.isdisjoint(slots) or len(set(slots)) < len(slots):
                raise ValueError("the layout writes states twice to one slot")
            written.update(slots)
            first = start - num_accepted
            ends = [length for length, _ in use.saves]
            if ends != sorted(set(ends)) or any(
                not first < length <= end - drafts or not 0 <= slot < self.num_slots
                for length, slot in use.saves
            ):
                raise ValueError("the layout saves states of no certain token, or to no slot")
            saves += [(length - first, slot) for length, slot in use.saves]
            offsets.append(len(saves))
        if any(use.source in written for use in uses if use and use.source != use.slot):
            raise ValueError("the layout overwrites states that it begins with")
        return StateEntries(
            entries=np.array(entries, dtype=np.int64),
            save_offsets=np.array(offsets, dtype=np.int64),
            saves=np.array(saves, dtype=np.int64).reshape(-1, 2),
        )

    def end(self, layout: BatchLayout) -> None:
        """After the pass of a layout: notes how far its slots are."""
        for use, end, drafts in zip(
            _uses(layout), layout.seq_lens.tolist(), layout.num_draft_tokens.tolist(), strict=True
        ):
            assert use is not None
            self._lengths[use.slot], self._num_drafts[use.slot] = end - drafts, drafts
            for length, slot in use.saves:
                self._lengths[slot], self._num_drafts[slot] = length, 0

    def assume(self, layout: BatchLayout) -> None:
        """Takes the layout's slots to be as far as it says: of steps whose results nobody reads."""
        starts = layout.positions[layout.cu_seqlens_q[:-1]].tolist()
        for use, start in zip(_uses(layout), starts, strict=True):
            assert use is not None
            self._lengths[use.slot], self._num_drafts[use.slot] = start, 0

    def _num_accepted(self, use: StateUse, start: int) -> int:
        """How many drafts of the last step a sequence that goes on at a position has accepted."""
        own = use.source in (-1, use.slot)
        slot = use.slot if own else use.source
        if not (0 <= slot < self.num_slots and 0 <= use.slot < self.num_slots):
            raise ValueError("the layout has a slot for states that there is not")
        if start == 0:
            return 0
        ahead = start - self._lengths[slot]
        if self._lengths[slot] < 0 or not 0 <= ahead <= (self._num_drafts[slot] if own else 0):
            raise ValueError(
                f"the layout goes on at token {start}, and slot {slot} has states after "
                f"{self._lengths[slot]} tokens and {self._num_drafts[slot]} drafts"
            )
        return ahead


def _uses(layout: BatchLayout) -> list[StateUse | None]:
    return list(layout.states) or [_SAME] * len(layout.seq_lens)
