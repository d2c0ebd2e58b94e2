"""A verifier's engine in this process, with drafts from the drafter's own kernel, without RPC.

Drafts are made on the engine's thread when it publishes a step's events, so no step waits for one:
only the verifier is measured.
"""

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.drafter_texts import PARAMS, propose
from benchmarks.turns import Variant, blocking
from benchmarks.workloads import Task
from drafter.ngram.text import IndexedText
from tandem.values import DraftWait
from verifier.build import LoadedModel, build_engine, load_model
from verifier.config import VerifierConfig
from verifier.drafts.draft_buffer import Hint
from verifier.engine.engine import Engine
from verifier.engine.messages import Decided, Event, Hints, Open, Rejected, StepStats
from verifier.engine.observation import EngineObserver, StepRecord
from verifier.sampling import Sampling
from verifier.scheduling.sequence import OpenSequence

HINT_TOKENS = 32
PATIENCE_S = 600.0


@dataclass(slots=True, kw_only=True)
class Counts:
    """Of a run's steps. Filled by the engine thread."""

    num_steps: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # In which the engine's thread made drafts, here and not where a drafter does.
    draft_s: float = 0.0


class InProcessEngine(EngineObserver):
    """A started engine; `run` is called from one thread at a time."""

    def __init__(self, config: VerifierConfig, loaded: LoadedModel | None = None) -> None:
        self._counts = Counts()
        self._loaded = loaded or load_model(config)
        self._engine: Engine = build_engine(self._loaded, config, [self])

    def stepped(self, record: StepRecord) -> None:
        self._counts.num_steps += 1

    def run(
        self,
        tasks: Sequence[Task],
        *,
        streams: int,
        speculate: bool,
        max_drafts: int | None = None,
        logprobs: int | None = None,
        observe: Callable[[Decided], None] | None = None,
    ) -> Counts:
        """Runs all tasks, `streams` at a time.

        Args:
            max_drafts: per sequence and step; None: the limit of the verifier.
            logprobs: how many of the likeliest tokens decisions tell; None: no logprobs.
            observe: called with each decision, whose `sequence_id` is the task's index.

        Raises:
            Exception: the engine's, a rejected sequence's or `observe`'s.
            TimeoutError: no task has ended for `PATIENCE_S`.
        """
        if max_drafts is None:
            max_drafts = self._loaded.served.max_num_speculative_tokens
        self._counts = Counts()
        drafting = _Drafting(self._engine) if speculate else None
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
            counts.draft_s += time.perf_counter() - started_at_s

        def open_next() -> None:
            if not waiting:
                return
            index, task = waiting.pop()
            if drafting is not None:
                drafting.open(str(index), task.prompt_token_ids)
            self._engine.submit(
                Open(
                    session_id=session_id,
                    sequence=self._opened(index, task, speculate, max_drafts, logprobs),
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
        return counts

    def _opened(
        self, index: int, task: Task, speculate: bool, max_drafts: int, logprobs: int | None
    ) -> OpenSequence:
        is_random = task.temperature > 0
        served = self._loaded.served
        return OpenSequence(
            sequence_id=str(index),
            token_ids=list(task.prompt_token_ids),
            prompt_length=len(task.prompt_token_ids),
            sampling=Sampling(temperature=task.temperature, seed=index, logprobs=logprobs),
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


def through_engine(
    engine: InProcessEngine,
    tasks: Sequence[Task],
    streams: int,
    *,
    name: str = "in process",
    speculate: bool,
    leaves_out_drafting: bool = False,
) -> Variant:
    """The tasks through an engine; tokens per second.

    Args:
        leaves_out_drafting: takes off the time in which the engine's thread makes drafts.
    """

    def tokens_per_s() -> float:
        started_at_s = time.perf_counter()
        counts = engine.run(tasks, streams=streams, speculate=speculate)
        duration_s = time.perf_counter() - started_at_s
        return counts.num_tokens / (duration_s - leaves_out_drafting * counts.draft_s)

    return blocking(name, streams, tokens_per_s)


class _Drafting:
    """Histories, and a hint for each decision that requests one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._texts: dict[str, IndexedText] = {}

    def open(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        text = IndexedText(params=PARAMS, max_tokens=1 << 20)
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
