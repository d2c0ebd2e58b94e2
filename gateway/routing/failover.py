"""Another verifier goes on with a choice: its own refused it, is gone, or lets it wait.

A verifier that dies, does not respond or shuts down loses no request: the generation holds prompt,
output and seed. Owns what a refusal or a loss means for a choice, and how often it may move.
"""

import time
from collections.abc import Callable, Sequence

from gateway.errors import RETRY_AFTER_MS, OverloadedError, UnavailableError
from gateway.generation.delivery import Delivery
from gateway.generation.generation import Generation
from gateway.metrics import GatewayMetrics
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet
from gateway.routing.live_sequences import LiveSequence, LiveSequences
from gateway.routing.opening import Opening, new_sequence_id
from gateway.routing.resumption import Displaced, Resumption
from gateway.routing.retry_budget import RetryBudgets
from gateway.routing.waiting_moves import WaitingMoves
from servicekit.errors import RequestError
from servicekit.logs import Logger


class Failover:
    """The choices of all verifiers; on the event loop.

    Attributes:
        retries: how many refused requests may be offered to another verifier.
        resumption: the choices without a verifier.
        waiting_moves: of choices that wait while another verifier has room.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        sequences: LiveSequences,
        opening: Opening,
        delivery: Delivery,
        max_resumes: int,
        resume_timeout_s: float,
        metrics: GatewayMetrics,
        logger: Logger,
        publish: Callable[[Sequence[Generation]], None],
        fail: Callable[[LiveSequence, Exception], None],
        on_load: Callable[[], None],
    ) -> None:
        """Args:
        max_resumes: how often another verifier may go on with a choice whose own was lost.
        resume_timeout_s: how long a choice may wait for that verifier.
        publish: shows what was decided to the clients.
        fail: ends a sequence; its client gets what was decided, then the error.
        on_load: called when the number of choices that wait has changed.
        """
        self._fleet = fleet
        self._sequences = sequences
        self._opening = opening
        self._delivery = delivery
        self._max_resumes = max_resumes
        self._metrics = metrics
        self._logger = logger
        self._publish = publish
        self._fail = fail
        self.retries = RetryBudgets()
        self.resumption = Resumption(
            timeout_s=resume_timeout_s,
            place=self._place,
            fail=_fail_displaced,
            on_load=on_load,
        )
        # What moves for room only must not use up the moves that a choice needs.
        self.waiting_moves = WaitingMoves(
            fleet=fleet,
            sequences=sequences,
            max_losses=(max_resumes - 1) // 2,
            move=self._move,
        )

    def on_rejection(self, sequence: LiveSequence, error: RequestError) -> None:
        """A verifier has no room for the sequence, shuts down or cannot run it, or the request is
        at fault.
        """
        verifier, generation = sequence.verifier, sequence.generation
        if isinstance(error, OverloadedError | UnavailableError):
            # A verifier that names a field lacks room for what the field asks for, such as a
            # grammar: it may have room for other requests.
            if not error.field:
                until_s = time.monotonic() + (error.retry_after_ms or RETRY_AFTER_MS) / 1000
                verifier.load.full_until_s = until_s
                if generation.goes_on:
                    verifier.load.overfull_until_s = until_s
            reason = "full" if isinstance(error, OverloadedError) else "draining"
        elif sequence.was_queued or (
            sequence.displaced is not None and generation.admitted_at_s is not None
        ):
            # Another one ran or would run it: this one is of another version, or configured
            # otherwise.
            verifier.ignored.record("rejected_command", error.message)
            reason = "unable"
        else:
            self._fail(sequence, error)
            return
        if sequence.was_queued:
            # It would have run elsewhere, and has as much time for that as if it were displaced.
            displaced = sequence.displaced
            self._sequences.drop(sequence)
            self.resumption.add(
                generation,
                f"verifier_{reason}" if displaced is None else displaced.reason,
                (sequence if displaced is None else displaced).refused_by | {verifier.name},
            )
            return
        if sequence.displaced is not None:
            # It was not taken: it waits on, as before, and has not moved.
            self._sequences.drop(sequence)
            sequence.displaced.refused_by |= {verifier.name}
            self.resumption.put_back(sequence.displaced)
            return
        if generation.has_output:
            self.displace(sequence, f"verifier_{reason}")
            return
        refused_by = sequence.refused_by | {verifier.name}
        try:
            other = self._fleet.find_verifier(
                generation.request, num_choices=1, refused_by=refused_by
            )
        except UnavailableError:
            self._fail(sequence, error)
            return
        if not self.retries.take(generation.request.model_id):
            self._fail(sequence, error)
            return
        self._metrics.count_retry(reason)
        self._sequences.drop(sequence)
        generation.sequence_id = new_sequence_id()
        self._opening.start(generation, other, refused_by)

    def displace(self, sequence: LiveSequence, reason: str) -> None:
        """The sequence's verifier no longer has it: another one goes on."""
        generation = sequence.generation
        # A rollout moves a long one often. Only what verifiers are lost with may be its own fault.
        generation.num_losses += reason != "verifier_draining"
        if generation.num_losses > self._max_resumes:
            sequence.has_ended = True
            self._fail(sequence, verifier_gone())
            return
        self._sequences.drop(sequence)
        self._delivery.discard(generation)
        if len(generation.token_ids) > sequence.opened_length:
            generation.numerics_digest = sequence.numerics_digest
        self.resumption.add(generation, reason)

    def _place(self, displaced: Displaced) -> bool:
        """Opens a displaced choice at a verifier. Returns False if none can take it now."""
        generation = displaced.generation
        # What was decided may end in a stop string.
        self._publish([generation])
        if generation.is_over:
            return True
        verifier = self._find_taker(displaced)
        if verifier is None:
            # All were asked. By the next try, those that refused it may have room.
            displaced.refused_by = frozenset()
            return False
        generation.sequence_id, old_id = new_sequence_id(), generation.sequence_id
        self._logger.info(
            "choice_resumed",
            request_id=generation.request.request_id,
            choice_index=generation.choice_index,
            sequence_id=generation.sequence_id,
            former_sequence_id=old_id,
            verifier=verifier.name,
            reason=displaced.reason,
            num_tokens=len(generation.token_ids),
        )
        self._opening.start(generation, verifier, displaced=displaced)
        return True

    def _find_taker(self, displaced: Displaced) -> VerifierLink | None:
        generation = displaced.generation
        try:
            verifier = self._fleet.find_verifier(
                generation.request,
                num_choices=1,
                refused_by=displaced.refused_by,
                numerics_digest=generation.numerics_digest,
            )
        except UnavailableError:
            return None
        load = verifier.load
        full_until_s = load.overfull_until_s if generation.goes_on else load.full_until_s
        return None if full_until_s > time.monotonic() else verifier

    def _move(self, sequence: LiveSequence, verifier: VerifierLink) -> None:
        """Opens a choice at this verifier that waits at another one."""
        generation = sequence.generation
        self._metrics.count_retry("waiting")
        self._sequences.withdraw(sequence)
        generation.sequence_id, old_id = new_sequence_id(), generation.sequence_id
        self._logger.info(
            "choice_moved",
            request_id=generation.request.request_id,
            choice_index=generation.choice_index,
            sequence_id=generation.sequence_id,
            former_sequence_id=old_id,
            verifier=verifier.name,
            former_verifier=sequence.verifier.name,
        )
        self._opening.start(
            generation, verifier, sequence.refused_by, sequence.displaced, was_queued=True
        )


def _fail_displaced(displaced: Displaced) -> None:
    """No verifier took the choice in time; its client has what was decided."""
    displaced.generation.fail(verifier_gone())


def verifier_gone() -> UnavailableError:
    """What a client gets whose choice no verifier goes on with; it may go on elsewhere."""
    return UnavailableError("the verifier is gone", retry_after_ms=RETRY_AFTER_MS)
