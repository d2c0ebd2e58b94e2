"""Which sequence has which slot of the device's sampler, by the id of its block table.

A sequence keeps a table's id from its admission on, and gets another one after a preemption; its
slot is opened when it is first sampled under an id. The engine does not say when a sequence ends:
where no slot is free, the least recently used one is opened anew.
"""

import weakref
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from verifier.gpu.sampling.sampler import DeviceSampler, StagedSequence
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence


class _Held(NamedTuple):
    slot: int
    sampling: Sampling
    # A weak reference: the sequence may have ended, and its grammar and tokens must not be kept.
    adjustments: weakref.ref[Adjustments] | None

    def is_of(self, sampling: Sampling, adjustments: Adjustments | None) -> bool:
        held = None
        if self.adjustments is not None:
            held = self.adjustments()
            if held is None:
                return False  # Its sequence has ended.
        return held is adjustments and self.sampling == sampling


class SequenceSlots:
    """Owned by the thread that verifies. Has all slots of the sampler."""

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        # By table id, the last used at the end. Ids under zero: of one step only.
        self._held: OrderedDict[int, _Held] = OrderedDict()

    def stage(
        self, sequences: SequenceOf[JudgedSequence], table_ids: SequenceOf[int]
    ) -> dict[int, Exception]:
        """Stages a step's sequences, each with its slot.

        Args:
            table_ids: of each sequence; 0: nothing is known of it.

        Returns:
            Of sequences that could not be staged, by their indices: ignore their verdicts.
        """
        for table_id in [each for each in self._held if each < 0]:
            self._sampler.close(self._held.pop(table_id).slot)
        for table_id in table_ids:
            if table_id in self._held:
                self._held.move_to_end(table_id)
        staged: list[StagedSequence] = []
        failures: dict[int, Exception] = {}
        for index, (sequence, table_id) in enumerate(zip(sequences, table_ids, strict=True)):
            try:
                staged.append(self._staged(sequence, table_id or -1 - index))
            except Exception as error:
                # One sequence's parameters, counts or grammar.
                failures[index] = error
                staged.append(_without_slot(sequence))
        self._sampler.stage(staged)
        return failures

    def _staged(self, sequence: JudgedSequence, table_id: int) -> StagedSequence:
        adjustments = sequence.history.adjustments
        stop_token_ids: frozenset[int] = adjustments.stop_token_ids if adjustments else frozenset()
        drafts = sequence.history.draft_token_ids
        constraint = None if adjustments is None else adjustments.constraint
        return StagedSequence(
            # First, since a grammar may raise.
            allowed=None if constraint is None else constraint.allowed(drafts),
            slot=self._slot_of(sequence.sampling, adjustments, stop_token_ids, table_id),
            token_ids=() if adjustments is None else adjustments.token_ids,
            draft_token_ids=drafts,
            first_position=sequence.first_position,
        )

    def _slot_of(
        self,
        sampling: Sampling,
        adjustments: Adjustments | None,
        stop_token_ids: frozenset[int],
        table_id: int,
    ) -> int:
        held = self._held.get(table_id)
        if held is not None:
            if held.is_of(sampling, adjustments):
                return held.slot
            del self._held[table_id]
            self._sampler.close(held.slot)
        elif len(self._held) == self._sampler.max_num_seqs:
            # It is not of this step: this step's sequences were all moved behind it, and fit.
            self._sampler.close(self._held.popitem(last=False)[1].slot)
        slot = self._sampler.open(
            sampling,
            prompt_length=0 if adjustments is None else adjustments.prompt_length,
            stop_token_ids=stop_token_ids,
        )
        self._held[table_id] = _Held(
            slot, sampling, None if adjustments is None else weakref.ref(adjustments)
        )
        return slot


def _without_slot(sequence: JudgedSequence) -> StagedSequence:
    return StagedSequence(
        slot=None,
        token_ids=(),
        draft_token_ids=sequence.history.draft_token_ids,
        first_position=sequence.first_position,
    )
