"""The flow of one verifier step through the gateway.

    verifier --(events of one step)--> coordinator
        on_step    every sequence's new tokens are appended to its generation
        publish    soon after, few clients at a time, they become text and go to the streams

A step of many sequences is appended at once, without text, counting, a task per sequence or a lock.
`publish` runs later (`generation/delivery.py`), so that no client's text delays the next step.

A verifier that dies, does not respond or shuts down loses no request: the generation holds prompt,
output and seed, and another verifier goes on from there (`routing/failover.py`).

Drafting needs no message of the gateway: each Open names a drafter, and the verifier talks to it.
The gateway chooses which one, moves sequences away from those that their verifier reports as slow
or gone, says what a pool keeps when only it knows where the text ends, and has the other drafters
keep that too (`peers/pool_copies.py`).

Owns what each event means for its sequence; `routing/live_sequences.py` owns the sequences.
Everything here runs on the event loop and no method awaits, so every method sees and leaves a
consistent state.
"""

import time
from collections.abc import Callable, Sequence

from gateway.errors import InvalidRequestError, UnreadError, VerifierError, from_verifier
from gateway.generation.delivery import Delivery
from gateway.generation.generation import Generation, Resume
from gateway.messages.response import Step
from gateway.messages.verifier import (
    Decided,
    DrafterStatus,
    Draining,
    Opened,
    PromptScored,
    Rejected,
    StepTraced,
    UnreadableEvent,
    VerifierEvent,
)
from gateway.metrics import GatewayMetrics
from gateway.model_metrics import ModelMetrics
from gateway.peers.pool_copies import PoolCopies
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.drafter_moves import DrafterMoves
from gateway.routing.failover import Failover, verifier_gone
from gateway.routing.fleet import Fleet
from gateway.routing.live_sequences import LiveSequence, LiveSequences
from gateway.routing.opening import Opening
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
        copies: PoolCopies,
    ) -> None:
        """Begins with no sequence.

        Args:
            fleet: the coordinator listens to its verifiers.
            draft_wait: how long verifiers may wait for drafts.
            max_resumes: how often another verifier may go on with a choice whose own was lost.
            resume_timeout_s: how long a choice may wait for that verifier.
            stream_interval_s: for how long a stream's tokens are gathered, at least.
            on_availability: called when a verifier comes or goes.
            copies: takes pools' new texts to the drafters that lack them.
        """
        self._fleet = fleet
        self._metrics = metrics
        self._on_availability = on_availability
        self._copies = copies
        sequences = self._sequences = LiveSequences(self._report_load, self._on_kept)
        self._opening = Opening(drafters=fleet.drafters, sequences=sequences, draft_wait=draft_wait)
        self._moves = DrafterMoves(drafters=fleet.drafters, sequences=sequences)
        self._delivery = Delivery(
            self._publish,
            interval_s=stream_interval_s,
            num_streams=lambda: self._sequences.num_running,
        )
        self._failover = Failover(
            fleet=fleet,
            sequences=sequences,
            opening=self._opening,
            delivery=self._delivery,
            max_resumes=max_resumes,
            resume_timeout_s=resume_timeout_s,
            metrics=metrics,
            logger=logger,
            publish=self._publish,
            fail=self._fail,
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
        self._failover.waiting_moves.after_step()

    def _publish(self, generations: Sequence[Generation]) -> None:
        """Shows what was decided to the clients, and counts it."""
        shown: dict[ModelMetrics, list[Step]] = {}
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
                shown.setdefault(metrics, []).extend(steps)
            if generation.finish_reason is not None:
                metrics.count_end(generation.finish_reason)
                metrics.note_usage(generation.usage())
                # After a stop string the verifier still generates; otherwise it is done already,
                # or waits for what the pool keeps.
                self.close(generation)
        for metrics, all_steps in shown.items():
            metrics.count_steps(all_steps)

    # Requests come and go.

    def open(self, generations: Sequence[Generation]) -> None:
        """Starts the choices of one request, all at one verifier.

        Raises:
            UnavailableError: no verifier serves the model; nothing was started.
        """
        verifier = self._fleet.find_verifier(generations[0].request, num_choices=len(generations))
        for generation in generations:
            self._failover.retries.add_request(generation.request.model_id)
            self._opening.start(generation, verifier)

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
        assert not self._failover.resumption.num_waiting, "choices wait for a verifier"
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
                self._opening.with_other_drafter(sequence, event.message)
                return
            sequence.has_ended = True
            error = from_verifier(
                code=event.code,
                message=event.message,
                field=event.field,
                retry_after_ms=event.retry_after_ms,
            )
            self._failover.on_rejection(sequence, error)
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
        for generation in self._failover.resumption.generations():
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
        self._failover.resumption.wake()

    def on_verifier_down(self, verifier: VerifierLink) -> None:
        """VerifierListener: its sequences are gone with it; other verifiers go on with them."""
        self._fleet.drafters.forget(verifier.name)
        reason = "verifier_draining" if verifier.is_draining else "verifier_gone"
        for sequence in self._sequences.of_verifier(verifier):
            try:
                self._failover.displace(sequence, reason)
            except Exception as error:
                # Neither its client nor the others may wait for ever.
                sequence.generation.fail(verifier_gone())
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

    def _report_load(self) -> None:
        sequences = self._sequences
        self._metrics.set_load(
            num_running=sequences.num_running,
            num_waiting=sequences.num_waiting + self._failover.resumption.num_waiting,
        )

    # Drafters.

    def set_drafters(self, addresses: Sequence[str]) -> None:
        """These are the drafters now: sequences move away from all others."""
        self._fleet.drafters.set_addresses(addresses)
        self._fleet.report_connected()
        for verifier in self._fleet.verifiers:
            self._moves.start(verifier)

    def _on_kept(self, sequence: LiveSequence, token_ids: Sequence[int]) -> None:
        """Its pool has a text at its drafter: the model's other drafters get a copy."""
        request = sequence.generation.request
        others = self._fleet.drafters_of(request.model_id) - {sequence.drafter}
        self._copies.add(others, request.ngram.pool_id, token_ids)

    def _on_drafter_status(self, verifier: VerifierLink, status: DrafterStatus) -> None:
        """The verifier gets drafts from a drafter again, or no longer, or not in time."""
        drafters = self._fleet.drafters
        if not drafters.may_report(verifier.name, status.drafter):
            verifier.ignored.record("unknown_drafter", status.drafter)
        elif drafters.set_state(verifier.name, status.drafter, status.state):
            self._fleet.report_connected()
            if drafters.has_unable(verifier.name):
                self._moves.start(verifier)
