"""The sequences that are open, and the verifier and drafter of each.

Owns these assignments and frees what they hold. Knows no events and no hints. A sequence is found
here from its Open until its terminal event, its stop string or its close, whichever comes first;
later messages about it are ignored. From then on until its output is final, only its drafter is
remembered: its pool gets the output.
"""

import dataclasses
from collections.abc import Sequence

from gateway.generation.generation import Generation
from gateway.messages.request import Keep
from gateway.messages.response import FinishReason
from gateway.metrics import GatewayMetrics
from gateway.peers.drafter_link import DrafterLink
from gateway.peers.verifier_link import VerifierLink


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """One open sequence.

    Attributes:
        drafter: keeps its history; None if it gets no drafts.
        expects_hints: whether the verifier was last told to expect hints.
        is_running: whether the verifier has admitted it to its batch.
    """

    generation: Generation
    verifier: VerifierLink
    drafter: DrafterLink | None
    expects_hints: bool
    is_running: bool = False


class LiveSequences:
    """All open sequences; on the event loop.

    Invariant: each verifier's `num_sequences` counts its sequences here.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._by_id: dict[str, LiveSequence] = {}
        self._unreleased: dict[str, DrafterLink] = {}
        self._num_running = 0
        #: The sequence of an id, or None; hot path.
        self.find = self._by_id.get

    def add(self, sequence: LiveSequence) -> None:
        self._by_id[sequence.generation.sequence_id] = sequence
        sequence.verifier.num_sequences += 1
        self._report_load()

    def set_running(self, sequence: LiveSequence) -> None:
        """The verifier has admitted it to its batch."""
        sequence.is_running = True
        self._num_running += 1
        self._report_load()

    def of_verifier(self, verifier: VerifierLink) -> Sequence[LiveSequence]:
        return [each for each in self._by_id.values() if each.verifier is verifier]

    def of_drafter(self, drafter: DrafterLink) -> Sequence[LiveSequence]:
        return [each for each in self._by_id.values() if each.drafter is drafter]

    def forget(self, sequence: LiveSequence) -> None:
        """The sequence is over: frees all but its drafter's history, until `release`."""
        sequence_id = sequence.generation.sequence_id
        del self._by_id[sequence_id]
        sequence.verifier.num_sequences -= 1
        sequence.verifier.forget(sequence_id)
        if sequence.drafter is not None:
            self._unreleased[sequence_id] = sequence.drafter
        if sequence.is_running:
            self._num_running -= 1
        self._report_load()

    def release(self, generation: Generation) -> None:
        """The output is final: frees its drafter's history, and its pool gets the text."""
        drafter = self._unreleased.pop(generation.sequence_id, None)
        if drafter is None:
            return
        request = generation.request
        has_ended = generation.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        is_kept = has_ended or request.pool_keep_cancelled
        drafter.remove(
            generation.sequence_id, keep=request.ngram.pool_keep if is_kept else Keep.NOTHING
        )

    def check_idle(self) -> None:
        """Checks that there is none.

        Raises:
            AssertionError: there is one; it names it.
        """
        assert not self._by_id, f"live sequences: {list(self._by_id)}"
        assert not self._unreleased, f"unreleased sequences: {list(self._unreleased)}"
        assert self._num_running == 0, f"{self._num_running} count as running"

    def _report_load(self) -> None:
        self._metrics.set_load(
            num_running=self._num_running, num_waiting=len(self._by_id) - self._num_running
        )
