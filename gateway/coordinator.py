"""The flow of one verifier step: the heart of the gateway.

    verifier --(events of one step)--> coordinator
        on_step    every sequence's new tokens are appended to its generation
        publish    soon after, few clients at a time, they become text and go to the streams

A step of many sequences is appended at once, without text, counting, a task per sequence or a lock.
`publish` runs later (`generation/delivery.py`), so that no client's text delays the next step.

A verifier that dies, does not respond or shuts down loses no request: the generation holds prompt,
output and seed, and another verifier goes on from there (`routing/resumption.py`).

Drafting needs no message of the gateway: each Open names a drafter, and the verifier talks to it.
The gateway chooses which one, moves sequences away from those that their verifier reports as slow
or gone, and says what a pool keeps when only it knows where the text ends.

Owns what each event means for its sequence; `routing/live_sequences.py` owns the sequences.
Everything here runs on the event loop and no method awaits, so every method sees and leaves a
consistent state.
"""

import secrets
import time
from collections.abc import Callable, Sequence

from gateway.errors import (
    RETRY_AFTER_MS,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnreadError,
    VerifierError,
    from_verifier,
)
from gateway.generation.delivery import Delivery
from gateway.generation.generation import Generation, Resume
from gateway.messages.verifier import (
    Decided,
    DrafterState,
    DrafterStatus,
    Draining,
    OpenCommand,
    Opened,
    PromptScored,
    Rejected,
    StepTraced,
    UnreadableEvent,
    VerifierEvent,
)
from gateway.metrics import GatewayMetrics
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.drafter_moves import DrafterMoves
from gateway.routing.fleet import Fleet
from gateway.routing.live_sequences import LiveSequence, LiveSequences
from gateway.routing.resumption import Displaced, Resumption
from gateway.routing.retry_budget import RetryBudgets
from gateway.routing.waiting_moves import WaitingMoves
from servicekit.errors import RequestError
from servicekit.logs import Logger
from tandem.values import DraftWait, FinishReason


class Coordinator:
    """Moves tokens from one fleet's verifiers to the clients' streams."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        draft_wait: DraftWait,
        max_resumes: int,
        resume_timeout_s: float,
        stream_interval_s: float,
        metrics: GatewayMetrics,
        logger: Logger,
        on_availability: Callable[[], None],
    ) -> None:
        """Begins with no sequence.

        Args:
            fleet: the coordinator listens to its verifiers.
            draft_wait: how long verifiers may wait for drafts.
            max_resumes: how often another verifier may go on with a choice whose own was lost.
            resume_timeout_s: how long a choice may wait for that verifier.
            stream_interval_s: for how long a stream's tokens are gathered, at least.
            on_availability: called when a verifier comes or goes.
        """
        self._fleet = fleet
        self._draft_wait = draft_wait
        self._max_resumes = max_resumes
        self._metrics = metrics
        self._logger = logger
        self._on_availability = on_availability
        self._sequences = LiveSequences(self._report_load)
        self._moves = DrafterMoves(drafters=fleet.drafters, sequences=self._sequences)
        # What moves for room only must not use up the moves that a choice needs.
        self._waiting_moves = WaitingMoves(
            fleet=fleet,
            sequences=self._sequences,
            max_losses=(max_resumes - 1) // 2,
            move=self._move,
        )
        self._delivery = Delivery(
            self._publish,
            interval_s=stream_interval_s,
            num_streams=lambda: self._sequences.num_running,
        )
        self._retries = RetryBudgets()
        self._resumption = Resumption(
            timeout_s=resume_timeout_s,
            place=self._place,
            fail=self._fail_displaced,
            on_load=self._report_load,
        )

    # A verifier's step ended.

    def on_step(self, verifier: VerifierLink, events: Sequence[VerifierEvent]) -> None:
        """VerifierListener: the events of one step."""
        for event in events:
            sequence = self._sequences.find(event.sequence_id)
            if sequence is None or sequence.verifier is not verifier:
                if isinstance(event, DrafterStatus):
                    self._on_drafter_status(verifier, event)
                elif isinstance(event, Draining) and not verifier.is_draining:
                    self._on_draining(verifier)
                else:
                    self._ignore(verifier, event, is_foreign=sequence is not None)
                continue
            try:
                if type(event) is not Decided:
                    self._on_other_event(sequence, event)
                    continue
                sequence.generation.append(event)
            except Exception as error:
                # The event is invalid, or its client does not read: no other sequence fails.
                self._abort(sequence, error)
                continue
            self._delivery.add(sequence.generation)
            if event.finish_reason:
                sequence.has_ended = True
                self._sequences.forget(sequence)
        self._waiting_moves.after_step()

    def _publish(self, generations: Sequence[Generation]) -> None:
        """Shows what was decided to the clients, and counts it."""
        for generation in generations:
            if generation.is_over:
                continue
            had_started = generation.has_started
            try:
                steps = generation.publish()
            except Exception as error:
                # A text that cannot be made fails alone; the client's call logs and answers it.
                generation.fail(error)
                self.close(generation)
                continue
            metrics = self._metrics.of_model(generation.request.model_id)
            if steps:
                if not had_started:
                    metrics.count_prompt(generation.prompt_length)
                metrics.count_steps(steps)
            if generation.finish_reason is not None:
                metrics.count_end(generation.finish_reason)
                metrics.observe_acceptance(generation.usage())
                # After a stop string the verifier still generates; otherwise it is done already,
                # or waits for what the pool keeps.
                self.close(generation)

    # Requests come and go.

    def open(self, generations: Sequence[Generation]) -> None:
        """Starts the choices of one request, all at one verifier.

        Raises:
            UnavailableError: no verifier serves the model; nothing was started.
        """
        verifier = self._fleet.find_verifier(generations[0].request, num_choices=len(generations))
        for generation in generations:
            self._retries.add_request(generation.request.model_id)
            self._start(generation, verifier)

    def _start(
        self,
        generation: Generation,
        verifier: VerifierLink,
        refused_by: frozenset[str] = frozenset(),
        displaced: Displaced | None = None,
        *,
        was_queued: bool = False,
    ) -> None:
        sequence = LiveSequence(
            generation=generation,
            verifier=verifier,
            numerics_digest=verifier.numerics_digest,
            opened_length=len(generation.token_ids),
            refused_by=refused_by,
            displaced=displaced,
            was_queued=was_queued,
        )
        self._sequences.add(sequence)
        self._send_open(sequence)

    def _send_open(self, sequence: LiveSequence) -> None:
        generation = sequence.generation
        verifier = sequence.verifier
        assert verifier.welcome is not None, "it was chosen, so it is connected"
        if generation.request.wants_drafts:
            sequence.drafter = self._fleet.drafters.choose(verifier.name, sequence.drafter_key)
            sequence.opened_drafter = sequence.drafter
        verifier.open(
            OpenCommand(
                sequence_id=sequence.sequence_id,
                token_ids=generation.token_ids,
                request=generation.request,
                sampling=generation.sampling,
                seed=generation.seed,
                num_speculative_tokens=min(
                    generation.request.num_speculative_tokens,
                    verifier.welcome.max_num_speculative_tokens,
                ),
                draft_wait=self._draft_wait,
                drafter=sequence.drafter,
            )
        )

    def close(self, generation: Generation) -> None:
        """The client is gone, or has all it gets: frees what the choice holds."""
        self._delivery.discard(generation)
        sequence = self._sequences.find(generation.sequence_id)
        if sequence is not None:
            self._sequences.forget(sequence)
        if not generation.is_over:
            generation.cancel()
            metrics = self._metrics.of_model(generation.request.model_id)
            metrics.count_end(FinishReason.CANCELLED)
        self._sequences.close(generation)

    def is_running(self, generation: Generation) -> bool:
        """Whether its verifier has admitted the choice to its batch, and not ended it."""
        sequence = self._sequences.find(generation.sequence_id)
        return sequence is not None and sequence.is_running

    def check_idle(self) -> None:
        """Checks that nothing is left of any request.

        Raises:
            AssertionError: something is; it names it.
        """
        self._sequences.check_idle()
        assert not self._resumption.num_waiting, "choices wait for a verifier"
        assert self._moves.is_idle, "sequences are still to be moved"
        assert self._delivery.is_idle, "clients are still to be served"
        self._fleet.check_idle()

    # Events other than decisions.

    def _on_other_event(self, sequence: LiveSequence, event: VerifierEvent) -> None:
        generation = sequence.generation
        if isinstance(event, StepTraced):
            generation.append_trace(event.step)
            self._delivery.add(generation)
        elif isinstance(event, PromptScored):
            generation.append_prompt_logprobs(event)
        elif isinstance(event, Opened):
            if sequence.is_running:
                raise VerifierError("the verifier opened the sequence twice")
            if event.num_cached_tokens > len(generation.token_ids):
                raise VerifierError(
                    f"the verifier had {event.num_cached_tokens} cached tokens of a sequence of "
                    f"{len(generation.token_ids)}"
                )
            if generation.admitted_at_s is None:
                # Output that the client brought along may be cached, too.
                generation.num_cached_tokens = min(
                    event.num_cached_tokens, generation.prompt_length
                )
                generation.admitted_at_s = time.monotonic()
            if (displaced := sequence.displaced) is not None:
                self._metrics.count_resume(displaced.reason)
                generation.resumes.append(
                    Resume(time.monotonic(), displaced.reason, sequence.verifier.name)
                )
                sequence.displaced = None
            sequence.was_queued = False
            self._sequences.set_running(sequence)
        elif isinstance(event, Rejected):
            if event.field == "drafter_address" and sequence.drafter and not sequence.is_running:
                self._open_elsewhere(sequence, event.message)
                return
            sequence.has_ended = True
            error = from_verifier(
                code=event.code,
                message=event.message,
                field=event.field,
                retry_after_ms=event.retry_after_ms,
            )
            self._on_rejection(sequence, error)
        elif isinstance(event, UnreadableEvent):
            raise VerifierError(f"an event of the verifier cannot be read: {event.reason}")

    def _ignore(self, verifier: VerifierLink, event: VerifierEvent, *, is_foreign: bool) -> None:
        """Records an event of a sequence that is not live, or not at this verifier."""
        detail = ""
        if is_foreign:
            reason = "foreign_sequence"
        elif event.sequence_id:
            if verifier.is_late(event):
                return
            reason = "unknown_sequence"
        elif isinstance(event, Rejected):
            reason, detail = "rejected_command", event.message
        else:
            reason = "odd_event"
            detail = event.reason if isinstance(event, UnreadableEvent) else type(event).__name__
        verifier.ignored.record(reason, detail)

    # Sequences fail.

    def _abort(self, sequence: LiveSequence, error: Exception) -> None:
        """Ends a sequence that its verifier still generates."""
        verifier = sequence.verifier
        if isinstance(error, VerifierError):
            verifier.ignored.record("odd_event", error.message)
        elif not isinstance(error, UnreadError):
            # A bug of the gateway; the client's call logs it with its traceback.
            verifier.ignored.record("internal_error", repr(error))
        self._fail(sequence, error)

    def _fail(self, sequence: LiveSequence, error: Exception) -> None:
        """The sequence is over: its client gets what was decided, then the error."""
        generation = sequence.generation
        self._sequences.forget(sequence)
        self._delivery.discard(generation)
        self._publish([generation])
        generation.fail(error)
        self._sequences.close(generation)

    def fail_all(self, error: RequestError) -> None:
        """Every choice is over: its client gets what was decided, then the error."""
        for sequence in self._sequences.all():
            self._fail(sequence, error)
        for generation in self._resumption.generations():
            self._publish([generation])
            generation.fail(error)

    def on_unsendable(
        self, verifier: VerifierLink, sequence_id: str, error: InvalidRequestError
    ) -> None:
        """VerifierListener: the sequence's Open is larger than a message may be."""
        sequence = self._sequences.find(sequence_id)
        if sequence is not None:
            sequence.has_ended = True
            self._fail(sequence, error)

    # Peers come and go.

    def on_verifier_up(self, verifier: VerifierLink) -> None:
        """VerifierListener: requests can be routed to it."""
        if (welcome := verifier.welcome) is not None:
            self._metrics.expect_model(welcome.model_id, welcome.max_num_speculative_tokens)
        self.on_verifiers_changed()
        self._resumption.wake()

    def on_verifier_down(self, verifier: VerifierLink) -> None:
        """VerifierListener: its sequences are gone with it; other verifiers go on with them."""
        self._fleet.drafters.forget(verifier.name)
        reason = "verifier_draining" if verifier.is_draining else "verifier_gone"
        for sequence in self._sequences.of_verifier(verifier):
            try:
                self._displace(sequence, reason)
            except Exception as error:
                # Neither its client nor the others may wait for ever.
                sequence.generation.fail(_gone())
                verifier.ignored.record("internal_error", repr(error))
        self.on_verifiers_changed()

    def _on_draining(self, verifier: VerifierLink) -> None:
        """It takes no more sequences, and ends those that it has if it can."""
        verifier.is_draining = True
        self.on_verifiers_changed()

    def on_verifiers_changed(self) -> None:
        """Other verifiers can serve requests, or one left the fleet."""
        self._fleet.check_models()
        self._fleet.report_connected()
        self._on_availability()

    # Choices move to another verifier.

    def _on_rejection(self, sequence: LiveSequence, error: RequestError) -> None:
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
            self._resumption.add(
                generation,
                f"verifier_{reason}" if displaced is None else displaced.reason,
                (sequence if displaced is None else displaced).refused_by | {verifier.name},
            )
            return
        if sequence.displaced is not None:
            # It was not taken: it waits on, as before, and has not moved.
            self._sequences.drop(sequence)
            sequence.displaced.refused_by |= {verifier.name}
            self._resumption.put_back(sequence.displaced)
            return
        if generation.has_output:
            self._displace(sequence, f"verifier_{reason}")
            return
        refused_by = sequence.refused_by | {verifier.name}
        try:
            other = self._fleet.find_verifier(
                generation.request, num_choices=1, refused_by=refused_by
            )
        except UnavailableError:
            self._fail(sequence, error)
            return
        if not self._retries.take(generation.request.model_id):
            self._fail(sequence, error)
            return
        self._metrics.count_retry(reason)
        self._sequences.drop(sequence)
        generation.sequence_id = new_sequence_id()
        self._start(generation, other, refused_by)

    def _displace(self, sequence: LiveSequence, reason: str) -> None:
        """The sequence's verifier no longer has it: another one goes on."""
        generation = sequence.generation
        # A rollout moves a long one often. Only what verifiers are lost with may be its own fault.
        generation.num_losses += reason != "verifier_draining"
        if generation.num_losses > self._max_resumes:
            sequence.has_ended = True
            self._fail(sequence, _gone())
            return
        self._sequences.drop(sequence)
        self._delivery.discard(generation)
        if len(generation.token_ids) > sequence.opened_length:
            generation.numerics_digest = sequence.numerics_digest
        self._resumption.add(generation, reason)

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
        self._start(generation, verifier, displaced=displaced)
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
        self._start(generation, verifier, sequence.refused_by, sequence.displaced, was_queued=True)

    def _fail_displaced(self, displaced: Displaced) -> None:
        """No verifier took the choice in time; its client has what was decided."""
        displaced.generation.fail(_gone())

    def _report_load(self) -> None:
        sequences = self._sequences
        self._metrics.set_load(
            num_running=sequences.num_running,
            num_waiting=sequences.num_waiting + self._resumption.num_waiting,
        )

    # Drafters.

    def set_drafters(self, addresses: Sequence[str]) -> None:
        """These are the drafters now: sequences move away from all others."""
        self._fleet.drafters.set_addresses(addresses)
        self._fleet.report_connected()
        for verifier in self._fleet.verifiers:
            self._moves.start(verifier)

    def _on_drafter_status(self, verifier: VerifierLink, status: DrafterStatus) -> None:
        """The verifier gets drafts from a drafter again, or no longer, or not in time."""
        drafters = self._fleet.drafters
        if not drafters.may_report(verifier.name, status.drafter):
            verifier.ignored.record("unknown_drafter", status.drafter)
        elif drafters.set_state(verifier.name, status.drafter, status.state):
            self._fleet.report_connected()
            if drafters.has_unable(verifier.name):
                self._moves.start(verifier)

    def _open_elsewhere(self, sequence: LiveSequence, reason: str) -> None:
        """The verifier may not talk to the sequence's drafter: opens it with another, or none."""
        verifier = sequence.verifier
        # It may have been moved meanwhile, to a drafter that nobody refused.
        refused = sequence.opened_drafter
        # Others may have been opened before it was known.
        if self._fleet.drafters.set_state(verifier.name, refused, DrafterState.REFUSED):
            verifier.ignored.record("refused_drafter", reason)
        sequence.drafter = ""
        self._send_open(sequence)


def _gone() -> UnavailableError:
    """What a client gets whose choice no verifier goes on with; it may go on elsewhere."""
    return UnavailableError("the verifier is gone", retry_after_ms=RETRY_AFTER_MS)


def new_sequence_id() -> str:
    """128 random bits: never used again, and nobody can guess them."""
    return secrets.token_hex(16)
