"""The flow of one verifier step: the heart of the gateway.

    verifier --(events of one step)--> coordinator
        (a) on_step    every sequence's new tokens go to its drafter: one message per drafter
        (b) on_hints   the drafter's proposals go back as hints: one message to the verifier
        (c) publish    only then the tokens become text and go to the clients' streams

(a) to (b) is what the next step may be waiting for, so nothing else happens there: no text, no
counting, no client, no task per sequence, no lock; only appends to lists and sets. The links'
writers pick up what was collected and put it into one message. (c) runs behind the hints, or
after a bounded delay when there are none to come (`delivery.py`).

Drafts are only ever hints. A drafter that is down, late or wrong costs its sequences nothing but
their drafts: the verifier is told not to wait for them (`Update{drafting: false}`), and told to
expect them again when the first hint is there after the history was replayed.

Owns which sequences are live and which links each of them has. Everything here runs on the event
loop, no method awaits, and so every method sees and leaves a consistent state.
"""

import asyncio
import dataclasses
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
from gateway.messages.request import Keep
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
from gateway.peers.ignored_messages import IgnoredMessages
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet
from servicekit.logs import Logger


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One live sequence: open at its verifier and not yet known to be over.

    Attributes:
        drafter: who keeps its history; None if it is not drafted for.
        expects_hints: what the verifier was told last: whether hints may come.
        is_running: whether the verifier has admitted it to its batch.
    """

    generation: Generation
    verifier: VerifierLink
    drafter: DrafterLink | None
    expects_hints: bool
    is_running: bool = False


class Coordinator:
    """Moves tokens and hints between one fleet's verifiers, drafters and the clients' streams.

    Invariants: a sequence is in `_sequences` from `open` until its terminal event, its stop
    string or its `close`, whichever comes first; what a verifier or drafter still says of it
    after that is ignored. Each verifier's `num_sequences` counts its entries. From then on until
    its output is shown, and it is known where that ends, its drafter is in `_unreleased`.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        draft_wait: DraftWait,
        client_delay_s: float,
        metrics: GatewayMetrics,
        ignored_messages: IgnoredMessages,
        on_availability: Callable[[], None],
        logger: Logger,
    ) -> None:
        """Begins with no sequence.

        Args:
            fleet: the peers; the coordinator listens to them all.
            draft_wait: how long verifiers may wait for hints.
            client_delay_s: how long hints may hold up clients.
            metrics: the gateway's.
            ignored_messages: is told what is ignored.
            on_availability: called when a verifier comes or goes, and when a drafter comes.
            logger: the gateway's.
        """
        self._fleet = fleet
        self._draft_wait = draft_wait
        self._metrics = metrics
        self._ignored_messages = ignored_messages
        self._on_availability = on_availability
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._sequences: dict[str, _Sequence] = {}
        self._unreleased: dict[str, DrafterLink] = {}
        self._num_running = 0
        # Verifiers that get no requests: another model goes by the name of theirs.
        self._outvoted: list[VerifierLink] = []
        self._delivery = Delivery(
            publish=self._publish,
            awaits_drafts=fleet.awaits_drafts,
            max_delay_s=client_delay_s,
        )

    # Requests come and go.

    def open(self, generations: Sequence[Generation]) -> None:
        """Starts the choices of one request, all at one verifier.

        The prompt goes to verifier and drafter at the same time: indexing overlaps prefill.

        Raises:
            UnavailableError: no verifier serves the model; nothing was started.
        """
        verifier = self._fleet.find_verifier(generations[0].request)
        for generation in generations:
            sequence_id = generation.sequence_id
            wants_drafts = generation.request.wants_drafts
            drafter = self._fleet.find_drafter(sequence_id) if wants_drafts else None
            sequence = _Sequence(
                generation=generation,
                verifier=verifier,
                drafter=drafter,
                expects_hints=drafter is not None and drafter.is_up and not drafter.is_slow,
            )
            self._sequences[sequence_id] = sequence
            verifier.num_sequences += 1
            verifier.open(self._open_command(sequence))
            if drafter is not None:
                drafter.add(generation)
        self._report_load()

    def close(self, generation: Generation) -> None:
        """Nobody wants the choice any more (or all of it was taken): frees what it holds."""
        self._delivery.discard(generation)
        sequence = self._sequences.get(generation.sequence_id)
        if sequence is not None:
            sequence.verifier.close(generation.sequence_id)
            self._forget(sequence)
        if not generation.is_over:
            generation.cancel()
            self._metrics.count_end(FinishReason.CANCELLED)
        self._release(generation)

    # (a) A verifier's step ended.

    def on_step(
        self, verifier: VerifierLink, events: Sequence[VerifierEvent], received_s: float
    ) -> None:
        """VerifierListener: the events of one step, and when they arrived."""
        drafters: dict[DrafterLink, None] = {}
        for event in events:
            sequence = self._sequences.get(event.sequence_id)
            if sequence is None or sequence.verifier is not verifier:
                self._ignore_event(verifier, event, is_foreign=sequence is not None)
                continue
            try:
                if type(event) is StepTraced:
                    sequence.generation.append_trace(event.step)
                    self._delivery.add(sequence.generation, received_s)
                    continue
                if type(event) is not Decided:
                    self._on_rare_event(sequence, event)
                    continue
                sequence.generation.append(event)
            except OverloadedError as error:
                # Its client does not read.
                verifier.close(event.sequence_id)
                self._fail(sequence, error)
                continue
            except Exception as error:
                self._fail_odd(sequence, error)
                continue
            self._delivery.add(sequence.generation, received_s)
            if event.finish_reason:
                self._forget(sequence)
            elif sequence.drafter is not None:
                sequence.drafter.advance(event.sequence_id, event.num_wanted_draft_tokens)
                drafters[sequence.drafter] = None
        for drafter in drafters:
            drafter.flush(received_s)
        self._go_on_with_clients()

    def _on_rare_event(self, sequence: _Sequence, event: VerifierEvent) -> None:
        if isinstance(event, PromptScored):
            sequence.generation.append_prompt_logprobs(event)
        elif isinstance(event, UnreadableEvent):
            raise VerifierError(f"the verifier said what makes no sense: {event.reason}")
        elif isinstance(event, Opened):
            num_tokens = len(sequence.generation.token_ids)
            if sequence.is_running or event.num_cached_tokens > num_tokens:
                raise VerifierError(
                    f"the verifier opened a sequence with {event.num_cached_tokens} cached tokens, "
                    "which cannot be, or twice"
                )
            sequence.generation.num_cached_tokens = event.num_cached_tokens
            sequence.is_running = True
            self._num_running += 1
            self._report_load()
        elif isinstance(event, Rejected):
            self._fail(
                sequence,
                from_verifier(
                    code=event.code,
                    message=event.message,
                    field=event.field,
                    retry_after_ms=event.retry_after_ms,
                ),
            )

    def _ignore_event(
        self, verifier: VerifierLink, event: VerifierEvent, *, is_foreign: bool
    ) -> None:
        """An event of a sequence that is not live, or not at this verifier."""
        if is_foreign:
            self._ignored_messages.record("verifier", verifier.name, "foreign_sequence")
        elif event.sequence_id:
            if not verifier.is_late(event):
                self._ignored_messages.record("verifier", verifier.name, "unknown_sequence")
        elif isinstance(event, Rejected):
            self._ignored_messages.record(
                "verifier", verifier.name, "rejected_command", event.message
            )
        else:
            detail = event.reason if isinstance(event, UnreadableEvent) else type(event).__name__
            self._ignored_messages.record("verifier", verifier.name, "odd_event", detail)

    def _fail_odd(self, sequence: _Sequence, error: Exception) -> None:
        """An event makes no sense, or could not be taken: its sequence fails, and no other."""
        verifier = sequence.verifier
        if isinstance(error, VerifierError):
            self._ignored_messages.record("verifier", verifier.name, "odd_event", error.message)
        else:
            # A mistake of ours; the client's call logs it with its traceback.
            self._ignored_messages.record("verifier", verifier.name, "internal_error", repr(error))
        verifier.close(sequence.generation.sequence_id)
        self._fail(sequence, error)

    # (b) A drafter answered.

    def on_hints(self, drafter: DrafterLink, hints: Sequence[Hint]) -> None:
        """DrafterListener: proposals for sequences that asked, empty ones too."""
        hints_of: dict[VerifierLink, list[Hint]] = {}
        for hint in hints:
            sequence = self._sequences.get(hint.sequence_id)
            if sequence is None:
                continue
            if not sequence.expects_hints and not drafter.is_slow:
                sequence.expects_hints = True
                sequence.verifier.update(hint.sequence_id, drafting=True)
            hints_of.setdefault(sequence.verifier, []).append(hint)
        for verifier, its_hints in hints_of.items():
            verifier.hint(its_hints)
        self._go_on_with_clients()

    # (c) Clients, behind the hints.

    def _go_on_with_clients(self) -> None:
        # Behind the writers that were woken before.
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
                # After a stop string the verifier is still at work; otherwise it is done already.
                self.close(generation)
        if counted:
            self._metrics.count_steps(counted)

    def on_unsendable(
        self, verifier: VerifierLink, sequence_id: str, error: InvalidRequestError
    ) -> None:
        """VerifierListener: the sequence's Open is larger than a message may be."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._fail(sequence, error)

    # Peers come and go.

    def on_verifier_up(self, verifier: VerifierLink) -> None:
        """VerifierListener: it can be routed to."""
        if verifier.welcome is not None:
            self._metrics.expect_positions(verifier.welcome.limits.max_num_speculative_tokens)
        self._on_verifiers_changed()

    def on_verifier_down(self, verifier: VerifierLink) -> None:
        """VerifierListener: its sequences are gone with it.

        Each client hears UNAVAILABLE. The generation still holds all that is needed to open the
        sequence at another verifier: that is what will happen here.
        """
        for sequence in [s for s in self._sequences.values() if s.verifier is verifier]:
            gone = UnavailableError("the verifier is gone", retry_after_ms=RETRY_AFTER_MS)
            try:
                self._fail(sequence, gone)
            except Exception as error:
                # Whatever it is, its client must not wait for ever, and neither must the others.
                sequence.generation.fail(gone)
                self._ignored_messages.record(
                    "verifier", verifier.name, "internal_error", repr(error)
                )
        self._on_verifiers_changed()

    def on_drafter_up(self, drafter: DrafterLink) -> None:
        """DrafterListener: it is being sent the histories; hints follow by themselves."""
        self._on_availability()

    def on_drafter_slow(self, drafter: DrafterLink) -> None:
        """DrafterListener: hints come, but nobody shall wait for them."""
        self.on_drafter_down(drafter)

    def on_drafter_down(self, drafter: DrafterLink) -> None:
        """DrafterListener: no hints until further notice."""
        for sequence in self._sequences.values():
            if sequence.drafter is drafter:
                self._expect_no_hints(sequence)
        self._delivery.resume()

    def on_given_up(self, drafter: DrafterLink, sequence_id: str) -> None:
        """DrafterListener: this sequence will have no drafts."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._expect_no_hints(sequence)
            sequence.drafter = None

    def check_idle(self) -> None:
        """Checks that nothing is left of any request.

        Raises:
            AssertionError: something is; it says what.
        """
        assert not self._sequences, f"live sequences: {list(self._sequences)}"
        assert not self._unreleased, f"unreleased sequences: {list(self._unreleased)}"
        assert self._num_running == 0, f"{self._num_running} count as running"
        assert self._delivery.is_idle, "clients are still to be served"
        busy = self._fleet.busy_parts()
        assert not busy, f"links that are not idle: {busy}"

    def _open_command(self, sequence: _Sequence) -> OpenCommand:
        generation = sequence.generation
        request = generation.request
        return OpenCommand(
            sequence_id=generation.sequence_id,
            token_ids=generation.token_ids,
            prompt_length=generation.prompt_length,
            sampling=generation.sampling,
            seed=generation.seed,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            draft_wait=self._draft_wait,
            drafting=sequence.expects_hints,
            num_speculative_tokens=request.num_speculative_tokens,
            cache_salt=request.cache_salt,
            priority=request.priority,
            expected_model_digest=request.model_digest,
            tokens_per_match=request.ngram.tokens_per_match,
            trace=request.trace,
        )

    def _on_verifiers_changed(self) -> None:
        outvoted = [each for each in self._fleet.verifiers if self._fleet.is_outvoted(each)]
        for verifier in outvoted:
            # One that comes may also outvote others.
            if verifier not in self._outvoted and verifier.welcome is not None:
                self._logger.warning(
                    "model_digests_differ",
                    verifier=verifier.name,
                    model_id=verifier.welcome.model_id,
                    model_digest=verifier.welcome.model_digest,
                )
        self._outvoted = outvoted
        self._metrics.set_verifiers_outvoted(len(outvoted))
        self._on_availability()

    def _expect_no_hints(self, sequence: _Sequence) -> None:
        if sequence.expects_hints:
            sequence.expects_hints = False
            sequence.verifier.update(sequence.generation.sequence_id, drafting=False)

    def _fail(self, sequence: _Sequence, error: Exception) -> None:
        """The sequence is over there: its client gets what was decided, then the error."""
        generation = sequence.generation
        self._forget(sequence)
        self._delivery.discard(generation)
        self._publish([generation])
        generation.fail(error)
        self._release(generation)

    def _release(self, generation: Generation) -> None:
        """Its output is as it stays: the drafter may forget it, and its pool gets its text."""
        drafter = self._unreleased.pop(generation.sequence_id, None)
        if drafter is None:
            return
        request = generation.request
        has_ended = generation.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        is_kept = has_ended or request.pool_keep_cancelled
        drafter.remove(
            generation.sequence_id, keep=request.ngram.pool_keep if is_kept else Keep.NOTHING
        )

    def _forget(self, sequence: _Sequence) -> None:
        """Frees everything that is held for a sequence, but the tokens that were decided."""
        sequence_id = sequence.generation.sequence_id
        del self._sequences[sequence_id]
        sequence.verifier.num_sequences -= 1
        sequence.verifier.forget(sequence_id)
        if sequence.drafter is not None:
            self._unreleased[sequence_id] = sequence.drafter
        if sequence.is_running:
            self._num_running -= 1
        self._report_load()

    def _report_load(self) -> None:
        self._metrics.set_load(
            num_running=self._num_running,
            num_waiting=len(self._sequences) - self._num_running,
        )
