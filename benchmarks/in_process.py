"""A verifier's engine in this process, with drafts from the drafter's own kernel, without RPC.

Drafts are made on the engine's thread when it publishes a step's events, so no step waits for one:
only the verifier is measured.
"""

import contextlib
import dataclasses
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.drafter_texts import propose
from benchmarks.workloads import Task
from drafter.ngram.params import DEFAULT_TOKENS_PER_MATCH, NgramParams, Tie
from drafter.ngram.text import IndexedText
from tandem.values import DraftWait
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import StepHandle, TargetModel
from verifier.build import LoadedModel, build_engine, load_model
from verifier.config import VerifierConfig
from verifier.drafts.draft_buffer import Hint
from verifier.engine.engine import Engine
from verifier.engine.messages import Decided, Event, Hints, Open, Rejected, StepStats
from verifier.engine.observation import EngineObserver, StepRecord
from verifier.sampling import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence
from verifier.scheduling.sequence import OpenSequence

HINT_TOKENS = 32
PATIENCE_S = 600.0


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts and times of a run's steps. Filled by the engine thread."""

    num_steps: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Seconds of all steps by phase, as in `StepRecord`, less those of the benchmark's own drafting.
    phase_durations_s: dict[str, float] = field(default_factory=dict)
    draft_s: float = 0.0
    # In which the engine's thread launched steps of the model or waited for them.
    model_s: float = 0.0

    def spent(self, phase: str, duration_s: float) -> None:
        self.phase_durations_s[phase] = self.phase_durations_s.get(phase, 0.0) + duration_s

    def add(self, other: "Counts") -> None:
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        for phase, duration_s in other.phase_durations_s.items():
            self.spent(phase, duration_s)
        self.draft_s += other.draft_s
        self.model_s += other.model_s

    @property
    def steps_s(self) -> float:
        """Of all steps, without drafting."""
        return sum(self.phase_durations_s.values())

    @property
    def host_share(self) -> float:
        """The share of the steps' time outside the model. Of the phase forward, too: the engine
        learns from the last step and sends messages there.
        """
        return 1 - self.model_s / self.steps_s


class StepTimes(NamedTuple):
    """What one step took."""

    # Sequences that sampled.
    num_sampled: int
    # As in `StepRecord`, without drafting.
    phase_durations_s: Mapping[str, float]
    # Of the benchmark's own drafting.
    draft_s: float


class TimedModel:
    """Implements `TargetModel`: another one, and the time that its caller spends in it.

    Attributes:
        is_under_way: whether a step is launched and was not waited for.
    """

    def __init__(self, model: TargetModel) -> None:
        self.vocab_size = model.vocab_size
        self.row_tile = model.row_tile
        self.computes_at_launch = model.computes_at_launch
        self.spent_s = 0.0
        self.is_under_way = False
        self._model = model

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        with self.timed():
            self.is_under_way = True
            return _TimedStep(self._model.launch(layout, sequences), self)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started_at_s = time.perf_counter()
        yield
        self.spent_s += time.perf_counter() - started_at_s


class _TimedStep:
    """Implements `StepHandle`."""

    def __init__(self, handle: StepHandle, model: TimedModel) -> None:
        self._handle = handle
        self._model = model
        self.result = handle.result

    def wait(self) -> None:
        with self._model.timed():
            self._handle.wait()
        self._model.is_under_way = False


class InProcessEngine(EngineObserver):
    """A started engine; `run` is called from one thread at a time."""

    def __init__(self, config: VerifierConfig, loaded: LoadedModel | None = None) -> None:
        self._counts = Counts()
        self._observe_step: Callable[[StepTimes], None] | None = None
        # Of drafting since a step was last observed, by the phase that holds it.
        self._drafted_s: dict[str, float] = {}
        self._loaded = loaded or load_model(config)
        self._config = config
        self._model = TimedModel(self._loaded.model)
        timed = dataclasses.replace(self._loaded, model=self._model)
        self._engine: Engine = build_engine(timed, config, [self])

    def stepped(self, record: StepRecord) -> None:
        counts = self._counts
        counts.num_steps += 1
        phase_durations_s = {
            phase: duration_s - self._drafted_s.get(phase, 0.0)
            for phase, duration_s in record.phase_durations_s.items()
        }
        draft_s = sum(self._drafted_s.values())
        self._drafted_s.clear()
        for phase, duration_s in phase_durations_s.items():
            counts.spent(phase, duration_s)
        if self._observe_step is not None:
            self._observe_step(
                StepTimes(
                    num_sampled=len(record.verdict.num_accepted_tokens),
                    phase_durations_s=phase_durations_s,
                    draft_s=draft_s,
                )
            )

    def _drafted(self, phase: str, duration_s: float) -> None:
        self._drafted_s[phase] = self._drafted_s.get(phase, 0.0) + duration_s

    def run(
        self,
        tasks: Sequence[Task],
        *,
        streams: int,
        speculate: bool,
        max_drafts: int | None = None,
        observe: Callable[[Decided], None] | None = None,
        observe_step: Callable[[StepTimes], None] | None = None,
    ) -> Counts:
        """Runs all tasks, `streams` at a time; `observe` is called with each decision, whose
        `sequence_id` is the task's index, and `observe_step` with each step.
        `max_drafts`: per sequence and step; None: the limit of the verifier.

        Raises:
            Exception: the engine's, a rejected sequence's or `observe`'s.
            TimeoutError: no task has ended for `PATIENCE_S`.
        """
        if max_drafts is None:
            max_drafts = self._loaded.served.max_num_speculative_tokens
        self._counts = Counts()
        self._observe_step = observe_step
        model_before_s = self._model.spent_s
        drafting = _Drafting(self._engine, self._counts) if speculate else None
        # For each task that has ended None, or what keeps the others from ending.
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        waiting = list(enumerate(tasks))[::-1]
        session_id = 0
        counts = self._counts

        def sink(events: list[Event], step: StepStats | None) -> None:
            try:
                publish(events)
            except Exception as error:
                done.put(error)
                raise  # the engine drops the session

        def publish(events: list[Event]) -> None:
            started_at_s = time.perf_counter()
            for event in events:
                if isinstance(event, Rejected):
                    raise event.error
            decided = [event for event in events if isinstance(event, Decided)]
            for event in decided:
                counts.num_tokens += len(event.token_ids)
                counts.num_draft_tokens += event.num_draft_tokens
                counts.num_accepted_tokens += event.num_accepted_tokens
                if observe is not None:
                    observe(event)
            if drafting is not None:
                drafting.append_decided(decided, session_id)
            for event in decided:
                if event.finish_reason is not None:
                    open_next()
                    done.put(None)
            draft_s = time.perf_counter() - started_at_s
            counts.draft_s += draft_s
            # The engine publishes a step whose drafts are wanted at once, others after the next
            # one's launch or, if there is none, outside of any step.
            if self._model.is_under_way:
                self._drafted("forward", draft_s)
            elif any(event.num_wanted_draft_tokens for event in decided):
                self._drafted("commit", draft_s)

        def open_next() -> None:
            if not waiting:
                return
            index, task = waiting.pop()
            if drafting is not None:
                drafting.open(str(index), task.prompt_token_ids)
            self._engine.submit(
                Open(
                    session_id=session_id, sequence=self._opened(index, task, speculate, max_drafts)
                )
            )

        stopped = self._engine.stopped
        stopped.add_done_callback(
            lambda _: done.put(stopped.exception() or RuntimeError("the engine was stopped"))
        )
        session_id = self._engine.attach(sink)
        for _ in range(streams):
            open_next()
        for _ in tasks:
            try:
                error = done.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise TimeoutError(f"no task has ended for {PATIENCE_S:g} s") from None
            if error is not None:
                raise error
        # The last step has been observed, since no hint is wanted after it: it was published later.
        counts.model_s = self._model.spent_s - model_before_s
        return counts

    def _opened(self, index: int, task: Task, speculate: bool, max_drafts: int) -> OpenSequence:
        is_random = task.temperature > 0
        served = self._loaded.served
        return OpenSequence(
            sequence_id=str(index),
            token_ids=list(task.prompt_token_ids),
            prompt_length=len(task.prompt_token_ids),
            sampling=Sampling(temperature=task.temperature, seed=index),
            max_new_tokens=task.max_new_tokens,
            stop_token_ids=frozenset() if is_random else served.eos_token_ids,
            draft_wait=DraftWait.NEVER,
            drafting=speculate,
            num_speculative_tokens=max_drafts if speculate else 0,
        )

    @contextlib.contextmanager
    def started(self) -> Iterator["InProcessEngine"]:
        self._engine.start()
        try:
            yield self
        finally:
            self._engine.stop()
            self._engine.stopped.result(PATIENCE_S)


class _Drafting:
    """Histories, and a hint for each decision that requests one."""

    def __init__(self, engine: Engine, counts: Counts) -> None:
        self._engine = engine
        self._counts = counts
        self._params = NgramParams(tie=Tie.LONGEST, tokens_per_match=DEFAULT_TOKENS_PER_MATCH)
        self._texts: dict[str, IndexedText] = {}

    def open(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        text = IndexedText(params=self._params, max_tokens=1 << 20)
        text.append(np.array(token_ids, dtype=np.uint32))
        self._texts[sequence_id] = text

    def append_decided(self, decided: Sequence[Decided], session_id: int) -> None:
        requesting = []
        for event in decided:
            text = self._texts[event.sequence_id]
            text.append(np.array(event.token_ids, dtype=np.uint32))
            if event.finish_reason is not None:
                del self._texts[event.sequence_id]
            elif event.num_wanted_draft_tokens:
                requesting.append(event)
        if not requesting:
            return
        drafts = propose(
            [self._texts[event.sequence_id] for event in requesting],
            [min(event.num_wanted_draft_tokens, HINT_TOKENS) for event in requesting],
        )
        hints = [
            Hint(
                sequence_id=event.sequence_id,
                base_length=event.base_length + len(event.token_ids),
                token_ids=token_ids,
                matched_ngram_length=match_length,
            )
            for event, (token_ids, match_length) in zip(requesting, drafts, strict=True)
        ]
        self._engine.submit(
            Hints(session_id=session_id, hints=hints, received_at_s=time.monotonic())
        )
