"""The sequences that are open, and the verifier and drafter of each.

Owns these assignments and frees what they hold. Knows no events. A sequence is found here from its
Open until its terminal event, its stop string or its close, whichever comes first; later messages
about it are ignored. From then on until its output is final, it is remembered only if its verifier
is still to be sent a Close, or if its pool may keep some of its text.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from gateway.generation.generation import Generation
from gateway.messages.request import AcceptedRequest
from gateway.messages.verifier import CloseCommand
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.resumption import Displaced
from tandem.values import FinishReason, Keep


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """One open sequence.

    Attributes:
        numerics_digest: of its verifier; "" if that promises nothing.
        opened_length: the number of tokens that it was opened with.
        refused_by: names of verifiers that had no room for it.
        displaced: what it is the resumption of, until its verifier takes it.
        was_queued: whether it left another verifier's queue for this one, until this one takes it.
        opened_drafter: the drafter that its Open named.
        drafter: the address of the drafter that its verifier was told; "" if it gets no drafts.
        is_running: whether the verifier has admitted it to its batch.
        has_ended: whether the verifier has sent its last event.
    """

    generation: Generation
    verifier: VerifierLink
    numerics_digest: str = ""
    opened_length: int
    refused_by: frozenset[str] = frozenset()
    displaced: Displaced | None = None
    was_queued: bool = False
    opened_drafter: str = ""
    drafter: str = ""
    is_running: bool = False
    has_ended: bool = False

    @property
    def sequence_id(self) -> str:
        return self.generation.sequence_id

    @property
    def may_feed(self) -> bool:
        """Whether its drafter's pool keeps some of its text, if it ends well."""
        request = self.generation.request
        has_pool = bool(self.drafter and request.ngram.pool_id)
        return has_pool and request.pool_keep is not Keep.NOTHING

    @property
    def needs_close(self) -> bool:
        """Whether the verifier waits for a Close."""
        return not self.has_ended or (
            bool(self.drafter) and self.generation.request.is_kept_by_close
        )


class LiveSequences:
    """All open sequences; on the event loop.

    Invariant: each verifier's `num_sequences` counts its sequences here.

    Attributes:
        num_running: how many their verifier has admitted to its batch.
    """

    def __init__(
        self,
        on_load: Callable[[], None],
        on_kept: Callable[[LiveSequence, Sequence[int]], None],
    ) -> None:
        """Args:
        on_load: called when `num_running` or `num_waiting` has changed.
        on_kept: called with a sequence that is over, and what its drafter's pool keeps of it.
        """
        self._on_load = on_load
        self._on_kept = on_kept
        self._by_id: dict[str, LiveSequence] = {}
        self._by_verifier: dict[VerifierLink, dict[str, LiveSequence]] = {}
        self._unclosed: dict[str, LiveSequence] = {}
        # Those that are not running; the last one came last.
        self._waiting: dict[VerifierLink, dict[str, LiveSequence]] = {}
        self.num_running = 0
        #: The sequence of an id, or None; hot path.
        self.find = self._by_id.get

    @property
    def num_waiting(self) -> int:
        """How many their verifier has not admitted to its batch."""
        return len(self._by_id) - self.num_running

    def add(self, sequence: LiveSequence) -> None:
        self._by_id[sequence.sequence_id] = sequence
        self._by_verifier.setdefault(sequence.verifier, {})[sequence.sequence_id] = sequence
        self._waiting.setdefault(sequence.verifier, {})[sequence.sequence_id] = sequence
        sequence.verifier.num_sequences += 1
        self._on_load()

    def set_running(self, sequence: LiveSequence) -> None:
        """The verifier has admitted it to its batch."""
        self._end_wait(sequence)
        sequence.is_running = True
        self.num_running += 1
        self._on_load()

    def all(self) -> Sequence[LiveSequence]:
        return list(self._by_id.values())

    def of_verifier(self, verifier: VerifierLink) -> Sequence[LiveSequence]:
        return list(self._by_verifier.get(verifier, {}).values())

    def has_waiting(self, verifier: VerifierLink) -> bool:
        """Whether the verifier has not admitted all that were opened there."""
        return verifier in self._waiting

    def last_waiting(self, verifier: VerifierLink) -> Iterator[LiveSequence]:
        """Those that the verifier has not admitted, the last one first; until any comes or goes."""
        return reversed(self._waiting.get(verifier, {}).values())

    def is_computing_prompt(self, request: AcceptedRequest, verifier: VerifierLink) -> bool:
        """Whether another choice of a request computes their prompt there."""
        return request.num_choices > 1 and any(
            each.is_running
            and each.generation.request is request
            and len(each.generation.token_ids) == each.opened_length
            for each in self._by_verifier.get(verifier, {}).values()
        )

    def forget(self, sequence: LiveSequence) -> None:
        """The sequence is over: frees all but what is needed for `close`."""
        self.drop(sequence)
        if sequence.needs_close or sequence.may_feed:
            self._unclosed[sequence.sequence_id] = sequence

    def drop(self, sequence: LiveSequence) -> None:
        """Its verifier no longer has the sequence, and gets no Close."""
        sequence_id = sequence.sequence_id
        del self._by_id[sequence_id]
        of_verifier = self._by_verifier[sequence.verifier]
        del of_verifier[sequence_id]
        if not of_verifier:
            del self._by_verifier[sequence.verifier]
        sequence.verifier.num_sequences -= 1
        sequence.verifier.forget(sequence_id)
        if sequence.is_running:
            self.num_running -= 1
        else:
            self._end_wait(sequence)
        self._on_load()

    def close(self, generation: Generation) -> None:
        """The output of a forgotten sequence is final: its verifier is told, if it waits for that.

        Its pool gets the text if it ended by itself, or if the request wants that anyway.
        """
        sequence = self._unclosed.pop(generation.sequence_id, None)
        if sequence is None:
            return
        request = generation.request
        has_finished = generation.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        is_kept = has_finished or request.pool_keep_cancelled
        if sequence.needs_close:
            sequence.verifier.close(
                CloseCommand(
                    generation.sequence_id,
                    request.pool_keep if is_kept else Keep.NOTHING,
                    len(generation.token_ids),
                ),
                has_ended=sequence.has_ended,
            )
        if is_kept and sequence.may_feed:
            first = generation.prompt_length if request.pool_keep is Keep.OUTPUT else 0
            self._on_kept(sequence, generation.token_ids[first:])

    def withdraw(self, sequence: LiveSequence) -> None:
        """Its verifier ends the sequence, of which it has decided nothing, and keeps none of it."""
        self.drop(sequence)
        command = CloseCommand(sequence.sequence_id, Keep.NOTHING, sequence.opened_length)
        sequence.verifier.close(command, has_ended=False)

    def check_idle(self) -> None:
        """Checks that there is none.

        Raises:
            AssertionError: there is one; it names it.
        """
        assert not self._by_id, f"live sequences: {list(self._by_id)}"
        assert not self._by_verifier, "verifiers without sequences are remembered"
        assert not self._unclosed, f"sequences that are not closed: {list(self._unclosed)}"
        assert not self._waiting, "verifiers without sequences that wait are remembered"
        assert self.num_running == 0, f"{self.num_running} count as running"

    def _end_wait(self, sequence: LiveSequence) -> None:
        waiting = self._waiting[sequence.verifier]
        del waiting[sequence.sequence_id]
        if not waiting:
            del self._waiting[sequence.verifier]
