"""The engine: one thread that owns the model, the KV blocks and every sequence.

Read `Engine.step` first: schedule, lay out, forward, verify, commit, publish. Other threads only
put commands on a queue and get events through their session's sink; the engine never waits for
a client.

Who pays for a fault of our own, an exception that nobody foresaw:

- One sequence, where it was met while handling, scheduling, sampling, scoring or committing that
  sequence: it is rejected with INTERNAL, and nothing more of it enters the prefix cache. A hint
  is lost alone. A session whose events cannot be handed over is ended.
- Nobody, where it was met while telling an observer.
- Everybody, where what everybody shares can no longer be trusted: the model's forward pass (K/V
  half written, memory gone, a device or another rank in an unknown state), the layout of a step,
  or taking a sequence out of the scheduler. The thread ends with the error, and the process with
  it: clients hear UNAVAILABLE at once instead of wrong tokens or silence.

Each is logged once, with its sequence's id, and counted (`faults.py`).
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from servicekit.logs import get_logger
from verifier.batch.batch_expansion import expand
from verifier.batch.batch_layout import BatchLayout, lay_out
from verifier.batch.numerics import Numerics
from verifier.batch.target_model import TargetModel
from verifier.drafts.draft_buffer import DraftBuffer, HintOutcome, Source
from verifier.drafts.draft_wait import DraftWaitEstimates
from verifier.drafts.proposal_log import ProposalTrace
from verifier.drafts.speculation_policy import num_drafts_wanted
from verifier.engine.faults import Fault
from verifier.engine.messages import (
    AttachSession,
    Call,
    Close,
    Command,
    Decided,
    DetachSession,
    EventSink,
    Forget,
    Hint,
    Hints,
    Open,
    StepStats,
    StepTraced,
    Stop,
    Update,
    WhenIdle,
)
from verifier.engine.profiling import ranged
from verifier.engine.sequence_table import SequenceTable
from verifier.engine.step_scoring import StepScoring
from verifier.engine.step_trace import trace_of
from verifier.errors import NOT_FINITE_LOGITS, IdleError, InternalError, ModelOutputError
from verifier.sampling.logits_processing import History
from verifier.sampling.rejection_sampler import (
    AcceptanceRule,
    BoolArray,
    JudgedSequence,
    Verdict,
    verify,
)
from verifier.sampling.separate_verification import verify_separately
from verifier.scheduling.scheduler import ScheduledSequence, Scheduler
from verifier.scheduling.sequence import DraftWait, FinishReason, ScoringMethod, Sequence

logger = get_logger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's own limits; the scheduler has others."""

    numerics: Numerics
    trash_slot: int
    max_model_len: int
    max_num_waiting: int
    max_waiting_tokens: int
    # Under DRAFT_WAIT_ALWAYS: longest wait for a draft.
    idle_timeout_s: float
    acceptance_rule: AcceptanceRule = AcceptanceRule.MATCH
    verification: ScoringMethod = ScoringMethod.SINGLE_PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A snapshot, replaced after every step."""

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks_total: int = 0
    # What happened so far.
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    step_duration_s: float = 0.0
    hop_duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Everything about a step that an observer may want."""

    # Those that the verdict is on, those whose prompt goes on, then those that are only scored.
    scheduled: list[ScheduledSequence]
    layout: BatchLayout
    verdict: Verdict
    stats: StepStats
    # Seconds by phase: schedule (with layout), forward, verify, commit (with publish).
    phase_durations_s: dict[str, float]


class EngineObserver(Protocol):
    """Metrics and tests. Called by the engine thread; must be quick. See `observers.py`."""

    def stepped(self, record: StepRecord) -> None: ...

    def hint_ended(self, outcome: HintOutcome) -> None: ...

    def hop_measured(self, duration_s: float) -> None: ...

    def settled(self, load: EngineLoad) -> None: ...

    def fault_met(self, fault: Fault) -> None: ...


class Engine:
    """The public methods and attributes are for any thread; `step` and all else belong to the
    engine thread.
    """

    def __init__(
        self,
        *,
        model: TargetModel,
        scheduler: Scheduler,
        options: EngineOptions,
        observer: EngineObserver,
    ) -> None:
        self.load = EngineLoad(num_kv_blocks_total=scheduler.block_pool.num_blocks)
        self.stopped: Future[None] = Future()  # done when the thread has ended, with its error
        self._model = model
        self._scheduler = scheduler
        self._options = options
        self._observer = observer
        self._table = SequenceTable(
            scheduler,
            max_model_len=options.max_model_len,
            max_num_waiting=options.max_num_waiting,
            max_waiting_tokens=options.max_waiting_tokens,
        )
        self._estimates = DraftWaitEstimates()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._session_ids = itertools.count(1)
        self._idle_futures: list[Future[None]] = []
        self._step_id = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_pending_commands(self) -> int:
        """Commands that the engine has not taken yet."""
        return self._commands.qsize()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step; what runs is dropped. Idempotent."""
        self._commands.put(Stop())

    def attach(self, sink: EventSink) -> int:
        """Starts a session; returns its id."""
        session_id = next(self._session_ids)
        self._commands.put(AttachSession(session_id=session_id, sink=sink))
        return session_id

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Runs a function on the engine thread, between steps."""
        future: Future[Result] = Future()
        self._commands.put(Call(function=function, future=future))
        return future

    def when_idle(self) -> "Future[None]":
        """Done once no sequence is open."""
        future: Future[None] = Future()
        self._commands.put(WhenIdle(future=future))
        return future

    def step(self) -> bool:
        """One model step over all sequences that are ready; False if none is."""
        self._admit()
        draft_wait_s = self._await_hints()
        clock = _PhaseClock()
        scheduled = ranged("schedule", self._schedule)
        if not scheduled:
            return False
        scoring = StepScoring(scheduled, self._options.verification)
        layout = ranged("lay_out", self._lay_out, scoring)
        clock.ended("schedule")
        logits = ranged("forward", self._model.forward, expand(layout))
        kv_is_finite = self._kv_is_finite(layout)
        if kv_is_finite is not None:
            scoring.reject_failed(self._table, layout, kv_is_finite)
        clock.ended("forward")
        verdict = ranged("verify", self._verify, scoring, layout, logits, kv_is_finite)
        clock.ended("verify")
        scoring.tell(self._table, layout, logits, self._model, self._fail_scoring)
        ranged("commit", self._commit, scoring, layout, verdict)
        stats = ranged("publish", self._publish, scheduled, layout, clock.total_s, draft_wait_s)
        clock.ended("commit")
        self._observer.stepped(
            StepRecord(
                scheduled=scoring.scheduled,
                layout=layout,
                verdict=verdict,
                stats=stats,
                phase_durations_s=clock.durations_s,
            )
        )
        return True

    def check_integrity(self) -> None:
        """Asserts the invariants of everything that the engine owns. Through `call`."""
        self._table.check_integrity()

    def _run(self) -> None:
        try:
            while True:
                self._take_commands(timeout_s=0.0)
                if self._is_stopping:
                    break
                self._reject_idle()
                if not self.step():
                    self._flush(None)
                    self._resolve_idle()
                    self._take_commands(timeout_s=self._idle_wait_s())
        except BaseException as error:
            self.stopped.set_exception(error)
        else:
            self.stopped.set_result(None)

    def _admit(self) -> None:
        """Lets waiting sequences run while there is room."""
        self._schedule_alone(self._table.admit)

    def _schedule(self) -> list[ScheduledSequence]:
        return self._schedule_alone(self._scheduler.schedule)

    def _schedule_alone(self, schedule: Callable[[], Result]) -> Result:
        """Has the scheduler do something; a sequence that it stumbles over is taken out first."""
        while True:
            try:
                return schedule()
            except Exception as error:
                if self._scheduler.at_hand is None:
                    raise
                self._fail(self._scheduler.at_hand, Fault.SCHEDULE, error)

    def _verify(
        self,
        scoring: StepScoring,
        layout: BatchLayout,
        logits: torch.Tensor,
        kv_is_finite: BoolArray | None,
    ) -> Verdict:
        rows = scoring.sampled_rows(logits, layout)
        judged = [_judged(item) for item in scoring.sampled]
        num_draft_tokens = layout.num_draft_tokens[: len(judged)]
        # Says no to a draft's row; what is not finite of a sequence's own tokens has rejected it.
        is_usable = None
        if kv_is_finite is not None:
            is_usable = kv_is_finite[layout.logits_indices[: len(rows)]]
        rule = self._options.acceptance_rule
        try:
            return verify(
                rows,
                judged,
                draft_token_ids=layout.draft_token_ids,
                num_draft_tokens=num_draft_tokens,
                is_usable=is_usable,
                rule=rule,
            )
        except Exception:
            return verify_separately(
                rows,
                judged,
                draft_token_ids=layout.draft_token_ids,
                num_draft_tokens=num_draft_tokens,
                is_usable=is_usable,
                rule=rule,
                fail=lambda i, error: self._fail(scoring.sampled[i].sequence, Fault.VERIFY, error),
            )

    def _fail_scoring(self, sequence: Sequence, error: Exception) -> None:
        self._fail(sequence, Fault.SCORE, error)

    def _fail(self, sequence: Sequence, fault: Fault, error: Exception) -> None:
        """Ends a sequence that we failed, not its client."""
        self._met(fault, error, sequence.sequence_id)
        # What it computed since may be wrong.
        sequence.num_computed_tokens = sequence.num_entered_blocks * self._scheduler.block_size
        self._table.reject(sequence, InternalError())

    def _met(self, fault: Fault, error: Exception, sequence_id: str = "") -> None:
        """Logs and counts a fault of ours that the engine survives."""
        logger.error("engine_fault", during=fault.value, sequence_id=sequence_id, exc_info=error)
        self._observer.fault_met(fault)

    def _lay_out(self, scoring: StepScoring) -> BatchLayout:
        return lay_out(
            scoring.entries,
            block_size=self._scheduler.block_size,
            trash_slot=self._options.trash_slot,
            row_multiple=self._options.numerics.row_multiple,
            wants_hidden_states=scoring.wants_hidden_states,
        )

    def _kv_is_finite(self, layout: BatchLayout) -> BoolArray | None:
        """[T], of the last step; None: everything is."""
        flags = self._model.kv_is_finite
        if flags is None:
            return None
        is_finite: BoolArray = flags[: layout.num_tokens].cpu().numpy()
        return None if is_finite.all() else is_finite

    def _commit(self, scoring: StepScoring, layout: BatchLayout, verdict: Verdict) -> None:
        for row, item in enumerate(scoring.continued):
            if not item.sequence.is_running:
                continue  # rejected in this step
            try:
                if item.samples:
                    self._commit_one(row, item, layout, verdict)
                else:
                    item.sequence.num_computed_tokens += item.num_new_tokens
                    self._trace(row, item.sequence, layout, num_accepted_tokens=0)
            except Exception as error:
                self._fail(item.sequence, Fault.COMMIT, error)

    def _commit_one(
        self, row: int, item: ScheduledSequence, layout: BatchLayout, verdict: Verdict
    ) -> None:
        """Moves a sequence forward by what was decided. Rejected drafts' K/V is forgotten by not
        counting it.

        Where the row behind some accepted drafts is not usable, these are decided first, as they
        are without drafts; then the sequence is rejected.
        """
        sequence = item.sequence
        num_accepted = int(verdict.num_accepted_tokens[row])
        is_finite = bool(verdict.is_finite[row])
        token_ids = verdict.output_token_ids[row, : num_accepted + is_finite].tolist()
        if not token_ids:
            self._table.reject(sequence, ModelOutputError(NOT_FINITE_LOGITS))
            return
        is_stopped = not sequence.stop_token_ids.isdisjoint(token_ids)
        if is_stopped:
            token_ids = _up_to_stop(token_ids, sequence.stop_token_ids)
            num_accepted = min(num_accepted, len(token_ids))
        base_length = len(sequence.token_ids)
        # The last token's K/V is the next step's: as a draft's, it may not even be usable.
        sequence.num_computed_tokens += item.num_new_tokens + len(token_ids) - 1
        sequence.token_ids += token_ids
        matched_ngram_length, source = 0, Source.UNSPECIFIED
        if item.draft_token_ids:
            # Nothing matches further back than the text goes, whatever was said.
            matched_ngram_length = min(sequence.draft_buffer.reach(base_length), base_length)
            source = sequence.draft_buffer.source
        finish_reason = (
            FinishReason.STOP
            if is_stopped
            else FinishReason.LENGTH
            if sequence.remaining == 0
            else None
        )
        if finish_reason is None:
            sequence.first_token_record.grew(sequence.token_ids)
            self._count_hint(sequence.draft_buffer.advance(sequence.token_ids))
        sequence.num_wanted_draft_tokens = (
            0
            if finish_reason is not None
            else num_drafts_wanted(
                num_speculative_tokens=sequence.num_speculative_tokens,
                remaining=sequence.remaining,
                length=len(sequence.token_ids),
                num_useless_hints=0
                if sequence.draft_wait is DraftWait.ALWAYS
                else sequence.first_token_record.num_useless_hints,
            )
        )
        self._trace(row, sequence, layout, num_accepted_tokens=num_accepted)
        self._table.tell_decided(
            sequence,
            Decided(
                sequence_id=sequence.sequence_id,
                base_length=base_length,
                token_ids=token_ids,
                num_draft_tokens=len(item.draft_token_ids),
                num_accepted_tokens=num_accepted,
                num_wanted_draft_tokens=sequence.num_wanted_draft_tokens,
                finish_reason=finish_reason,
                logprobs=verdict.logprobs.get(row, [])[: len(token_ids)],
                matched_ngram_length=matched_ngram_length,
                source=source,
            ),
        )
        if not is_finite and finish_reason is None:
            self._table.reject(sequence, ModelOutputError(NOT_FINITE_LOGITS))

    def _trace(
        self, entry: int, sequence: Sequence, layout: BatchLayout, *, num_accepted_tokens: int
    ) -> None:
        """Tells what the step did with a sequence, if it is to be told."""
        if sequence.proposals is None:
            return
        step = trace_of(
            entry,
            layout,
            step_id=self._step_id + 1,
            known_token_ids=sequence.token_ids,
            num_accepted_tokens=num_accepted_tokens,
            proposals=sequence.proposals.take(),
        )
        self._table.tell_step(sequence, StepTraced(sequence_id=sequence.sequence_id, step=step))

    def _publish(
        self,
        scheduled: list[ScheduledSequence],
        layout: BatchLayout,
        duration_s: float,
        draft_wait_s: float,
    ) -> StepStats:
        """Hands each session the step's events."""
        now_s = time.monotonic()
        for item in scheduled:
            if item.samples:
                item.sequence.publications.append((len(item.sequence.token_ids), now_s))
        self._step_id += 1
        stats = StepStats(
            step_id=self._step_id,
            num_sequences=len(scheduled),
            num_scheduled_tokens=layout.num_tokens,
            duration_s=duration_s,
            draft_wait_s=draft_wait_s,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_kv_blocks_used=self._scheduler.block_pool.num_used,
        )
        if all(item.samples and item.num_new_tokens == 1 for item in scheduled):
            self._estimates.step_s.observe(stats.duration_s)
        self._flush(stats)
        return stats

    def _flush(self, step: StepStats | None) -> None:
        """Hands out what is to be told, and then counts."""
        # Whoever hears of a step finds it in the load.
        self._update_load()
        if errors := self._table.flush(step):
            for error in errors:
                self._met(Fault.PUBLISH, error)
            self._update_load()
        self._observer.settled(self.load)

    def _await_hints(self) -> float:
        """Waits for hints under way while that pays; returns the seconds waited."""
        started_at_s = now_s = time.monotonic()
        while True:
            ready = [s for s in self._scheduler.running if not s.lacks_awaited_draft]
            lacking = [s for s in ready if s.hopes_for_draft]
            if not lacking:
                break
            longest_s = self._estimates.longest_wait_s(
                first_token_probabilities=[s.first_token_record.probability for s in lacking],
                num_sequences=len(ready),
                elapsed_s=now_s - max(s.published_at_s for s in lacking),
            )
            left_s = longest_s - (now_s - started_at_s)
            if left_s <= 0:
                break
            self._take_commands(timeout_s=left_s)
            self._admit()
            now_s = time.monotonic()
        return now_s - started_at_s

    def _take_commands(self, timeout_s: float | None) -> None:
        """Handles all commands that are there, in order; waits up to `timeout_s` for the first
        (None: for ever). No step is formed before: none of them delays another's hints.
        """
        try:
            command = self._commands.get(timeout_s != 0, timeout_s or None)
        except queue.Empty:
            return
        # Those that come meanwhile are the next step's: whoever sends without end holds up nobody.
        num_more = self._commands.qsize()
        self._handle(command)
        for _ in range(num_more):
            self._handle(self._commands.get_nowait())

    def _handle(self, command: Command) -> None:
        match command:
            case Open() | Close() | Update():
                self._handle_alone(command)
            case Hints():
                self._take_hints(command)
            case Forget():
                self._met(Fault.PUBLISH, command.error, command.sequence_id)
                self._table.forget(command)
            case AttachSession():
                self._table.attach(command.session_id, command.sink)
            case DetachSession():
                self._table.detach(command.session_id)
            case Call():
                command.run()
            case WhenIdle():
                self._idle_futures.append(command.future)
            case Stop():
                self._is_stopping = True

    def _handle_alone(self, command: Open | Close | Update) -> None:
        """Handles a command of one sequence, which alone pays if that fails."""
        try:
            match command:
                case Open():
                    if self._table.is_full(command.sequence):
                        # Of a burst, the first ones need not wait at all.
                        self._admit()
                    self._table.open(command)
                case Close():
                    self._table.close(command)
                case Update():
                    self._table.update(command)
        except Exception as error:
            if isinstance(command, Open):
                self._met(Fault.COMMAND, error, command.sequence.sequence_id)
                self._table.refuse(command, InternalError())
            elif sequence := self._table.find(command.session_id, command.sequence_id):
                self._fail(sequence, Fault.COMMAND, error)

    def _take_hints(self, command: Hints) -> None:
        hop_s: float | None = None
        for hint in command.hints:
            sequence = self._table.find(command.session_id, hint.sequence_id)
            if sequence is None:
                continue
            try:
                if sequence.proposals is not None:
                    sequence.proposals.add(_proposal_of(hint))
                if not sequence.can_draft:
                    continue
                published_at_s = self._take_hint(sequence, hint)
            except Exception as error:
                self._met(Fault.COMMAND, error, sequence.sequence_id)
                sequence.draft_buffer = DraftBuffer()
            else:
                if published_at_s is not None:
                    hop_s = command.received_at_s - published_at_s
        if hop_s is not None:
            self._estimates.hop_s.observe(hop_s)
            self._observer.hop_measured(hop_s)

    def _take_hint(self, sequence: Sequence, hint: Hint) -> float | None:
        """Returns when the length that the hint is for was published, if it is the first for it."""
        buffer, known = sequence.draft_buffer, sequence.token_ids
        told_at_s = None
        if buffer.answered_length < hint.base_length <= len(known):
            if hint.token_ids or not hint.is_indexing:
                sequence.first_token_record.hinted(hint.base_length, hint.token_ids, known)
            for length, published_at_s in sequence.publications:
                if length == hint.base_length:
                    told_at_s = published_at_s
        self._count_hint(
            buffer.offer(
                hint.base_length, hint.token_ids, hint.matched_ngram_length, known, hint.source
            )
        )
        return told_at_s

    def _reject_idle(self) -> None:
        now_s = time.monotonic()
        for sequence in [s for s in self._scheduler.running if s.lacks_awaited_draft]:
            if now_s - sequence.published_at_s > self._options.idle_timeout_s:
                message = f"no draft came within {self._options.idle_timeout_s:g} s"
                self._table.reject(sequence, IdleError(message))

    def _resolve_idle(self) -> None:
        if self._table.is_empty:
            for future in self._idle_futures:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._idle_futures.clear()

    def _idle_wait_s(self) -> float | None:
        """How long nothing can happen without a command; None: for ever."""
        awaiting: list[Sequence] = [s for s in self._scheduler.running if s.lacks_awaited_draft]
        if not awaiting:
            return None
        deadline_s = min(s.published_at_s for s in awaiting) + self._options.idle_timeout_s
        return max(0.001, deadline_s - time.monotonic())

    def _update_load(self) -> None:
        self.load = EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_kv_blocks_used=self._scheduler.block_pool.num_used,
            num_kv_blocks_total=self._scheduler.block_pool.num_blocks,
            num_prefix_cache_queries=self._scheduler.counts.num_prefix_cache_queries,
            num_prefix_cache_hits=self._scheduler.counts.num_prefix_cache_hits,
            num_preemptions=self._scheduler.counts.num_preemptions,
            num_steps=self._step_id,
            step_duration_s=self._estimates.step_s.value or 0.0,
            hop_duration_s=self._estimates.hop_s.value or 0.0,
        )

    def _count_hint(self, outcome: HintOutcome | None) -> None:
        if outcome is not None:
            self._observer.hint_ended(outcome)


def _proposal_of(hint: Hint) -> ProposalTrace:
    return ProposalTrace(
        base_length=hint.base_length,
        token_ids=hint.token_ids,
        matched_ngram_length=hint.matched_ngram_length,
        source=hint.source,
    )


def _judged(item: ScheduledSequence) -> JudgedSequence:
    sequence = item.sequence
    end = sequence.num_computed_tokens + item.num_new_tokens
    if sequence.sampling.adjusts_logits:
        history = History(
            prompt_token_ids=sequence.token_ids[: sequence.prompt_length],
            output_token_ids=sequence.token_ids[sequence.prompt_length :],
            draft_token_ids=item.draft_token_ids,
            stop_token_ids=sequence.stop_token_ids,
        )
    else:
        history = History(
            prompt_token_ids=(), output_token_ids=(), draft_token_ids=item.draft_token_ids
        )
    return JudgedSequence(sampling=sequence.sampling, history=history, first_position=end)


def _up_to_stop(token_ids: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    first = next(i for i, token_id in enumerate(token_ids) if token_id in stop_token_ids)
    return token_ids[: first + 1]


class _PhaseClock:
    """Durations of the phases of one step, by name."""

    def __init__(self) -> None:
        self.durations_s: dict[str, float] = {}
        self._started_at_s = self._phase_started_at_s = time.perf_counter()

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._started_at_s

    def ended(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.durations_s[phase] = now_s - self._phase_started_at_s
        self._phase_started_at_s = now_s
