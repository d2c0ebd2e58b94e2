"""The engine: one thread that owns the model, the KV blocks and every sequence.

Read `Engine.step` first. Other threads only queue commands (`inbox.py`) and receive events through
their session's sink (`messages.py`); the engine never waits for a client. `faults.py` says what an
unforeseen exception ends.

After a step:

1. Its tokens are committed. If the next step may wait for hints, they go to the drafters now.
2. The next step is launched.
3. Then, while a device computes or before a CPU does, the depth policy learns from the last step,
   its events go to the sessions, and tokens to the drafters that have not got them yet.

Events wait until then because gateways and clients would compete with the drafter for the
processor. Exceptions: a session that makes the hints itself gets its events in (1); a step that
waits for hints learns from the last one during that wait.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from verifier.batch.batch_layout import BatchLayout, lay_out
from verifier.batch.target_model import TargetModel
from verifier.drafters.drafters import Drafters
from verifier.drafts.draft_wait import DraftWaitEstimates, WaitOutcome
from verifier.engine.commit import Committer
from verifier.engine.depth_learning import learn_from_step
from verifier.engine.faults import FaultHandler
from verifier.engine.inbox import Inbox
from verifier.engine.messages import (
    AttachSession,
    Call,
    Command,
    DetachSession,
    EventSink,
    StepStats,
    Stop,
    WhenIdle,
)
from verifier.engine.observation import (
    EngineLoad,
    EngineObserver,
    Fault,
    PhaseClock,
    StepRecord,
    ranged,
)
from verifier.engine.sequence_table import SequenceTable
from verifier.engine.step_batch import StepBatch
from verifier.errors import IdleError
from verifier.scheduling.scheduler import DepthPolicyError, ScheduledSequence, Scheduler
from verifier.scheduling.sequence import Sequence

# The most that a queue can wait for depends on the platform.
_LONGEST_IDLE_WAIT_S = 3600.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's own limits; the scheduler has others."""

    max_model_len: int
    max_num_waiting: int
    max_waiting_tokens: int
    # Longest wait for a draft under DRAFT_WAIT_ALWAYS.
    draft_timeout_s: float
    # Sequences that may grow longer have the rotary embedding of long ones. None: there is one.
    max_short_tokens: int | None = None


class Engine:
    """Public methods and attributes are for any thread, except `step`, which belongs to the engine
    thread as everything private does.
    """

    def __init__(
        self,
        *,
        model: TargetModel,
        scheduler: Scheduler,
        options: EngineOptions,
        drafters: Drafters,
        observer: EngineObserver,
    ) -> None:
        self.load = EngineLoad(num_kv_blocks_total=scheduler.block_pool.num_blocks)
        self.stopped: Future[None] = Future()  # done when the thread has ended, with its error
        self._model = model
        self._scheduler = scheduler
        self._options = options
        self._observer = observer
        self._drafters = drafters
        self._table = SequenceTable(
            scheduler,
            drafters=drafters,
            max_model_len=options.max_model_len,
            max_num_waiting=options.max_num_waiting,
            max_waiting_tokens=options.max_waiting_tokens,
            max_short_tokens=options.max_short_tokens,
        )
        self._estimates = DraftWaitEstimates()
        self._faults = FaultHandler(self._table, scheduler, observer)
        self._inbox = Inbox(
            self._table,
            drafters=drafters,
            hint_counts=scheduler.counts.hints,
            estimates=self._estimates,
            faults=self._faults,
            observer=observer,
            admit=self._admit,
        )
        self._committer = Committer(
            self._table,
            drafters=drafters,
            hint_counts=scheduler.counts.hints,
            faults=self._faults,
        )
        self._session_ids = itertools.count(1)
        self._step_id = 0
        # The last step's statistics until its events are sent; its record until the depth policy
        # has learned from it.
        self._unflushed: StepStats | None = None
        self._unlearned: StepRecord | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def step(self) -> bool:
        """One model step over all sequences that are ready; False if none is."""
        self._admit()
        draft_wait_s = self._await_hints()
        clock = PhaseClock()
        scheduled = ranged("schedule", self._schedule)
        if not scheduled:
            return False
        self._step_id += 1
        batch = StepBatch(scheduled)
        layout = ranged("lay_out", self._lay_out, batch)
        sequences = batch.judged_sequences()
        clock.end("schedule")
        handle = ranged("launch", self._model.launch, layout, sequences)
        # A device computes meanwhile.
        self._learn()
        self._flush()
        self._drafters.flush()
        if self._model.computes_at_launch:
            # Beside the device. On a host nothing would run beside them, and few are needed.
            ranged("masks", batch.compute_masks)
        self._inbox.computing_since_s = time.monotonic()
        ranged("forward", handle.wait)
        clock.end("forward")
        result = ranged("verify", handle.result)
        clock.end("verify")
        ranged("commit", self._committer.commit, batch, layout, result, self._step_id)
        stats = ranged("publish", self._publish, batch, layout, clock.total_s, draft_wait_s)
        clock.end("commit")
        self._unlearned = StepRecord(
            scheduled=batch.scheduled,
            layout=layout,
            verdict=result.verdict,
            stats=stats,
            phase_durations_s=clock.durations_s,
        )
        return True

    @property
    def awaits_hints(self) -> bool:
        """Whether every running sequence waits for its hint, so that there is nothing to compute.
        Through `call`.
        """
        running = self._scheduler.running
        return bool(running) and all(sequence.must_await_hint for sequence in running)

    @property
    def num_pending_commands(self) -> int:
        """Commands that the engine has not handled yet."""
        return self._inbox.num_pending

    def hop_quantile_s(self, quantile: float) -> float:
        """The quantile of the hops that no step delayed; 0 before the first. For any thread."""
        return self._estimates.hop_quantile_s(quantile)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step; open sequences are dropped. Idempotent."""
        self._inbox.put(Stop())

    def attach(self, sink: EventSink) -> int:
        """Starts a session; returns its id."""
        session_id = next(self._session_ids)
        self._inbox.put(AttachSession(session_id=session_id, sink=sink))
        return session_id

    def submit(self, command: Command) -> None:
        self._inbox.put(command)

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Runs a function on the engine thread, between steps."""
        future: Future[Result] = Future()
        self._inbox.put(Call(function=function, future=future))
        return future

    def when_idle(self) -> "Future[None]":
        """Done once no sequence is open."""
        future: Future[None] = Future()
        self._inbox.put(WhenIdle(future=future))
        return future

    def check_integrity(self) -> None:
        """Asserts the invariants of everything that the engine owns. Through `call`."""
        self._table.check_integrity()

    def _run(self) -> None:
        try:
            while True:
                self._inbox.handle(timeout_s=0.0)
                if self._inbox.is_stopping:
                    break
                self._reject_idle()
                self._drafters.tick()
                if not self.step():
                    self._drafters.flush()
                    self._learn()
                    self._flush()
                    self._inbox.resolve_idle()
                    self._inbox.handle(timeout_s=self._idle_wait_s())
            self._drafters.stop()
        except BaseException as error:
            self.stopped.set_exception(error)
        else:
            self.stopped.set_result(None)

    def _admit(self) -> None:
        """Lets waiting sequences run while there is room."""
        self._isolating_faults(self._table.admit)

    def _schedule(self) -> list[ScheduledSequence]:
        try:
            return self._isolating_faults(self._scheduler.schedule)
        except DepthPolicyError as error:
            self._drop_depth_policy(error)
        return self._isolating_faults(self._scheduler.schedule)

    def _drop_depth_policy(self, error: Exception) -> None:
        """Goes on without the policy: steps verify as many drafts as they have room for, and the
        output is the same.
        """
        self._faults.record(Fault.SCHEDULE, error)
        self._scheduler.depth_policy = None

    def _isolating_faults(self, schedule: Callable[[], Result]) -> Result:
        """Calls the scheduler, until no sequence is left that makes it raise."""
        while True:
            try:
                return schedule()
            except Exception as error:
                if self._scheduler.current is None:
                    raise
                self._faults.fail(self._scheduler.current, Fault.SCHEDULE, error)

    def _await_hints(self) -> float:
        """Waits for hints under way while that pays; returns the seconds waited."""
        started_at_s = now_s = time.monotonic()
        awaited: list[Sequence] = []
        while True:
            running = self._scheduler.running
            without_draft = [s for s in running if s.may_await_hint]
            if not without_draft:
                break
            longest_s = self._estimates.longest_wait_s(
                first_token_probabilities=[
                    s.hint_record.first_token_probability for s in without_draft
                ],
                num_sequences=sum(not s.must_await_hint for s in running),
                elapsed_s=now_s - max(s.published_at_s for s in without_draft),
            )
            left_s = longest_s - (now_s - started_at_s)
            if left_s <= 0:
                if longest_s and awaited:
                    self._estimates.observe_vain_wait(
                        now_s - max(s.published_at_s for s in without_draft)
                    )
                    _mark_overdue(without_draft)
                break
            awaited = awaited or without_draft
            self._drafters.flush()
            self._learn()
            self._inbox.handle(timeout_s=left_s)
            self._admit()
            now_s = time.monotonic()
        if awaited:
            has_paid = any(sequence.has_draft for sequence in awaited)
            self._observer.wait_ended(WaitOutcome.PAID if has_paid else WaitOutcome.VAIN)
        return now_s - started_at_s

    def _lay_out(self, batch: StepBatch) -> BatchLayout:
        return lay_out(
            batch.entries,
            block_size=self._scheduler.block_size,
            wants_hidden_states=batch.wants_hidden_states,
        )

    def _publish(
        self,
        batch: StepBatch,
        layout: BatchLayout,
        duration_s: float,
        draft_wait_s: float,
    ) -> StepStats:
        """Notes what the sessions are told of the step; `_flush` tells them."""
        stats = StepStats(
            step_id=self._step_id,
            num_sequences=len(batch.scheduled),
            num_scheduled_tokens=layout.num_tokens,
            duration_s=duration_s,
            draft_wait_s=draft_wait_s,
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_kv_blocks_used=self._scheduler.block_pool.num_used,
            draft_round_trip_s=self._inbox.round_trip_s,
        )
        self._inbox.round_trip_s = 0.0
        if all(item.is_sampled and item.num_new_tokens == 1 for item in batch.scheduled):
            self._estimates.step_s.observe(stats.duration_s)
        self._unflushed = stats
        if any(item.sequence.is_drafted_by_session for item in batch.sampled):
            # Their sessions make hints of the events.
            self._flush()
        return stats

    def _learn(self) -> None:
        """Learns from the last step and lets it be observed, unless that is done."""
        record, self._unlearned = self._unlearned, None
        if record is None:
            return
        if (policy := self._scheduler.depth_policy) is not None:
            try:
                record.speculation = learn_from_step(policy, record)
            except Exception as error:
                self._drop_depth_policy(error)
        self._observer.stepped(record)

    def _flush(self) -> None:
        """Updates the load and hands each session its events."""
        step, self._unflushed = self._unflushed, None
        # A client that has received a step's events finds the step in the load.
        self._update_load()
        for session_id, error in self._table.flush(step).items():
            self._faults.record(Fault.PUBLISH, error)
            # Not now: a step may be under way with its sequences.
            self._inbox.put(DetachSession(session_id=session_id))

    def _update_load(self) -> None:
        self.load = EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_waiting_tokens=self._scheduler.num_waiting_tokens,
            num_kv_blocks_used=self._scheduler.block_pool.num_used,
            num_kv_blocks_total=self._scheduler.block_pool.num_blocks,
            num_prefix_cache_queries=self._scheduler.counts.num_prefix_cache_queries,
            num_prefix_cache_hits=self._scheduler.counts.num_prefix_cache_hits,
            num_preemptions=self._scheduler.counts.num_preemptions,
            num_steps=self._step_id,
            num_hints=self._scheduler.counts.hints.copy(),
            step_duration_s=self._estimates.step_s.value or 0.0,
            hop_duration_s=self._estimates.hop_s.value or 0.0,
            num_drafters=self._drafters.count_states(),
        )

    def _reject_idle(self) -> None:
        now_s = time.monotonic()
        for sequence in [s for s in self._scheduler.running if s.must_await_hint]:
            if now_s - sequence.published_at_s > self._options.draft_timeout_s:
                message = f"no draft came within {self._options.draft_timeout_s:g} s"
                self._table.reject(sequence, IdleError(message))

    def _idle_wait_s(self) -> float | None:
        """How long nothing can happen without a command; None: for ever."""
        now_s = time.monotonic()
        dues_s = [
            sequence.published_at_s + self._options.draft_timeout_s - now_s
            for sequence in self._scheduler.running
            if sequence.must_await_hint
        ]
        if (due_s := self._drafters.due_s()) is not None:
            dues_s.append(due_s)
        return max(0.001, min(*dues_s, _LONGEST_IDLE_WAIT_S)) if dues_s else None


def _mark_overdue(sequences: list[Sequence]) -> None:
    """No step waits again for the drafters of these sequences until they have answered."""
    for sequence in sequences:
        if sequence.drafter is not None:
            sequence.drafter.is_overdue = True
