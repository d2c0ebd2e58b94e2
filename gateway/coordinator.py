"""The flow of one verifier step: the heart of the gateway.

    verifier --(events of one step)--> coordinator
        (a) on_step    every sequence's new tokens go to its drafter: one message per drafter
        (b) on_hints   the drafter's proposals go back as hints: one message to the verifier
        (c) publish    only then the tokens become text and go to the clients' streams

The next step may be waiting from (a) to (b), so nothing else happens there: no text, no counting,
no client, no task per sequence, no lock; only appends to lists and sets. The links' writers put
what was collected into one message. (c) runs after the hints, or after a bounded delay when none
are expected (`generation/delivery.py`).

Drafts are only ever hints. A drafter that is down, late or wrong costs its sequences nothing but
their drafts: the verifier is told not to wait for them (`Update{drafting: false}`), and to expect
them again with the first hint after the history was replayed.

Owns what each event and hint means for its sequence; `routing/live_sequences.py` owns the
sequences. Everything here runs on the event loop and no method awaits, so every method sees and
leaves a consistent state.
"""

import asyncio
from collections.abc import Callable, Sequence

from gateway.errors import (
    RETRY_AFTER_MS,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    VerifierError,
    from_verifier,
)
from gateway.generation.delivery import Delivery
from gateway.generation.generation import Generation
from gateway.generation.usage import Step
from gateway.messages.response import FinishReason
from gateway.messages.verifier import (
    Decided,
    DraftWait,
    Hint,
    OpenCommand,
    Opened,
    PromptScored,
    Rejected,
    StepTraced,
    UnreadableEvent,
    VerifierEvent,
)
from gateway.metrics import GatewayMetrics
from gateway.peers.drafter_link import DrafterLink
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet
from gateway.routing.live_sequences import LiveSequence, LiveSequences


class Coordinator:
    """Moves tokens and hints between one fleet's verifiers, drafters and the clients' streams."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        draft_wait: DraftWait,
        client_delay_s: float,
        metrics: GatewayMetrics,
        on_availability: Callable[[], None],
    ) -> None:
        """Begins with no sequence.

        Args:
            fleet: the peers; the coordinator listens to them all.
            draft_wait: how long verifiers may wait for hints.
            client_delay_s: how long hints may delay clients.
            on_availability: called when a verifier comes or goes, and when a drafter comes.
        """
        self._fleet = fleet
        self._draft_wait = draft_wait
        self._metrics = metrics
        self._on_availability = on_availability
        self._loop = asyncio.get_running_loop()
        self._sequences = LiveSequences(metrics)
        self._delivery = Delivery(
            publish=self._publish,
            awaits_drafts=fleet.awaits_drafts,
            max_delay_s=client_delay_s,
        )

    # (a) A verifier's step ended.

    def on_step(
        self, verifier: VerifierLink, events: Sequence[VerifierEvent], received_s: float
    ) -> None:
        """VerifierListener: the events of one step, and when they arrived."""
        drafters: dict[DrafterLink, None] = {}
        for event in events:
            sequence = self._sequences.find(event.sequence_id)
            if sequence is None or sequence.verifier is not verifier:
                self._ignore(verifier, event, is_foreign=sequence is not None)
                continue
            try:
                if type(event) is not Decided:
                    self._on_other_event(sequence, event, received_s)
                    continue
                sequence.generation.append(event)
            except Exception as error:
                # The event is invalid, or its client does not read: no other sequence fails.
                self._abort(sequence, error)
                continue
            self._delivery.add(sequence.generation, received_s)
            if event.finish_reason:
                self._sequences.forget(sequence)
            elif sequence.drafter is not None:
                sequence.drafter.advance(event.sequence_id, event.num_wanted_draft_tokens)
                drafters[sequence.drafter] = None
        for drafter in drafters:
            drafter.flush(received_s)
        self._resume_delivery()

    # (b) A drafter answered.

    def on_hints(self, drafter: DrafterLink, hints: Sequence[Hint]) -> None:
        """DrafterListener: the requested proposals, empty ones too."""
        hints_of: dict[VerifierLink, list[Hint]] = {}
        for hint in hints:
            sequence = self._sequences.find(hint.sequence_id)
            if sequence is None:
                continue
            if not sequence.expects_hints and not drafter.is_slow:
                sequence.expects_hints = True
                sequence.verifier.update(hint.sequence_id, drafting=True)
            hints_of.setdefault(sequence.verifier, []).append(hint)
        for verifier, its_hints in hints_of.items():
            verifier.hint(its_hints)
        self._resume_delivery()

    # (c) Clients, after the hints.

    def _resume_delivery(self) -> None:
        # The peers' writers, woken before, run first.
        self._loop.call_soon(self._delivery.resume)

    def _publish(self, generations: Sequence[Generation]) -> None:
        """Shows what was decided to the clients, and counts it."""
        counted: list[Step] = []
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
            if steps and not had_started:
                self._metrics.count_prompt(generation.prompt_length)
            counted += steps
            if generation.finish_reason is not FinishReason.UNFINISHED:
                self._metrics.count_end(generation.finish_reason)
                self._metrics.observe_acceptance(generation.usage())
                # After a stop string the verifier still generates; otherwise it is done already.
                self.close(generation)
        if counted:
            self._metrics.count_steps(counted)

    # Requests come and go.

    def open(self, generations: Sequence[Generation]) -> None:
        """Starts the choices of one request, all at one verifier.

        The prompt goes to verifier and drafter at the same time: indexing overlaps prefill.

        Raises:
            UnavailableError: no verifier serves the model; nothing was started.
        """
        verifier = self._fleet.find_verifier(generations[0].request)
        for generation in generations:
            request = generation.request
            sequence_id = generation.sequence_id
            drafter = self._fleet.find_drafter(sequence_id) if request.wants_drafts else None
            sequence = LiveSequence(
                generation=generation,
                verifier=verifier,
                drafter=drafter,
                expects_hints=drafter is not None and drafter.is_up and not drafter.is_slow,
            )
            self._sequences.add(sequence)
            verifier.open(
                OpenCommand(
                    sequence_id=sequence_id,
                    token_ids=generation.token_ids,
                    request=request,
                    sampling=generation.sampling,
                    seed=generation.seed,
                    draft_wait=self._draft_wait,
                    drafting=sequence.expects_hints,
                )
            )
            if drafter is not None:
                drafter.add(generation)

    def close(self, generation: Generation) -> None:
        """The client is gone, or has all it gets: frees what the choice holds."""
        self._delivery.discard(generation)
        sequence = self._sequences.find(generation.sequence_id)
        if sequence is not None:
            sequence.verifier.close(generation.sequence_id)
            self._sequences.forget(sequence)
        if not generation.is_over:
            generation.cancel()
            self._metrics.count_end(FinishReason.CANCELLED)
        self._sequences.release(generation)

    def check_idle(self) -> None:
        """Checks that nothing is left of any request.

        Raises:
            AssertionError: something is; it names it.
        """
        self._sequences.check_idle()
        assert self._delivery.is_idle, "clients are still to be served"
        self._fleet.check_idle()

    # Events other than decisions.

    def _on_other_event(
        self, sequence: LiveSequence, event: VerifierEvent, received_s: float
    ) -> None:
        generation = sequence.generation
        if isinstance(event, StepTraced):
            generation.append_trace(event.step)
            self._delivery.add(generation, received_s)
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
            generation.num_cached_tokens = event.num_cached_tokens
            self._sequences.set_running(sequence)
        elif isinstance(event, Rejected):
            error = from_verifier(
                code=event.code,
                message=event.message,
                field=event.field,
                retry_after_ms=event.retry_after_ms,
            )
            self._fail(sequence, error)
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
        elif not isinstance(error, OverloadedError):
            # A bug of the gateway; the client's call logs it with its traceback.
            verifier.ignored.record("internal_error", repr(error))
        verifier.close(sequence.generation.sequence_id)
        self._fail(sequence, error)

    def _fail(self, sequence: LiveSequence, error: Exception) -> None:
        """The sequence is over: its client gets what was decided, then the error."""
        generation = sequence.generation
        self._sequences.forget(sequence)
        self._delivery.discard(generation)
        self._publish([generation])
        generation.fail(error)
        self._sequences.release(generation)

    def on_unsendable(
        self, verifier: VerifierLink, sequence_id: str, error: InvalidRequestError
    ) -> None:
        """VerifierListener: the sequence's Open is larger than a message may be."""
        sequence = self._sequences.find(sequence_id)
        if sequence is not None:
            self._fail(sequence, error)

    # Peers come and go.

    def on_verifier_up(self, verifier: VerifierLink) -> None:
        """VerifierListener: requests can be routed to it."""
        if verifier.welcome is not None:
            self._metrics.expect_positions(verifier.welcome.max_num_speculative_tokens)
        self._fleet.check_models()
        self._on_availability()

    def on_verifier_down(self, verifier: VerifierLink) -> None:
        """VerifierListener: its sequences are gone with it.

        Each client gets UNAVAILABLE. The generation still holds all that is needed to open the
        sequence at another verifier: resumption will begin here.
        """
        for sequence in self._sequences.of_verifier(verifier):
            gone = UnavailableError("the verifier is gone", retry_after_ms=RETRY_AFTER_MS)
            try:
                self._fail(sequence, gone)
            except Exception as error:
                # Neither its client nor the others may wait for ever.
                sequence.generation.fail(gone)
                verifier.ignored.record("internal_error", repr(error))
        self._fleet.check_models()
        self._on_availability()

    def on_drafter_up(self, drafter: DrafterLink) -> None:
        """DrafterListener: it is being sent the histories; hints follow."""
        self._on_availability()

    def on_drafter_slow(self, drafter: DrafterLink) -> None:
        """DrafterListener: hints come, but no step may wait for them."""
        self.on_drafter_down(drafter)

    def on_drafter_down(self, drafter: DrafterLink) -> None:
        """DrafterListener: no hints until further notice."""
        for sequence in self._sequences.of_drafter(drafter):
            self._expect_no_hints(sequence)
        self._delivery.resume()

    def on_given_up(self, drafter: DrafterLink, sequence_id: str) -> None:
        """DrafterListener: this sequence will have no drafts."""
        sequence = self._sequences.find(sequence_id)
        if sequence is not None:
            self._expect_no_hints(sequence)
            sequence.drafter = None

    def _expect_no_hints(self, sequence: LiveSequence) -> None:
        if sequence.expects_hints:
            sequence.expects_hints = False
            sequence.verifier.update(sequence.generation.sequence_id, drafting=False)
