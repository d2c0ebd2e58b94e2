"""A started engine over a scripted model, and the sessions of a test."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tandem.values import DraftSource, Keep, StepTrace, TokenLogprob
from tests.scripted_model import Rule, ScriptedModel, hashed
from tests.verifier.sequences import make_open
from verifier.drafters.drafters import Drafters
from verifier.drafters.messages import DrafterFault, Link
from verifier.drafts.depth_policy import DepthPolicy
from verifier.drafts.draft_buffer import Hint, HintOutcome
from verifier.drafts.draft_wait import WaitOutcome
from verifier.engine.engine import Engine, EngineOptions
from verifier.engine.messages import (
    Close,
    Decided,
    DetachSession,
    Event,
    Hints,
    Open,
    Opened,
    PromptScored,
    Rejected,
    StepStats,
    StepTraced,
    Update,
)
from verifier.engine.observation import EngineObserver, Fault, Observers, StepRecord
from verifier.scheduling.block_pool import BlockPool
from verifier.scheduling.scheduler import Scheduler

# Far longer than anything here takes.
PATIENCE_S = 60.0

StartEngine = Callable[..., "RunningEngine"]


@dataclass
class RecordingObserver(EngineObserver):
    """Filled by the engine thread; read it when the engine is idle."""

    steps: list[StepRecord] = field(default_factory=list)
    hops_s: list[float] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    waits: list[WaitOutcome] = field(default_factory=list)
    drafter_faults: list[DrafterFault] = field(default_factory=list)

    @property
    def num_drafts_scheduled(self) -> int:
        return sum(len(item.draft_token_ids) for step in self.steps for item in step.scheduled)

    def stepped(self, record: StepRecord) -> None:
        self.steps.append(record)

    def hop_measured(self, duration_s: float) -> None:
        self.hops_s.append(duration_s)

    def fault_met(self, fault: Fault) -> None:
        self.faults.append(fault)

    def wait_ended(self, outcome: WaitOutcome) -> None:
        self.waits.append(outcome)

    def drafter_failed(self, fault: DrafterFault) -> None:
        self.drafter_faults.append(fault)


class EngineSession:
    """One session: sends commands, collects events by sequence."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batches: queue.SimpleQueue[tuple[list[Event], StepStats | None]] = queue.SimpleQueue()
        self.session_id = engine.attach(lambda events, step: self._batches.put((events, step)))
        self.events: list[Event] = []
        self.steps: list[StepStats | None] = []

    def open(self, token_ids: list[int], **fields: object) -> str:
        """Opens a sequence; returns its id."""
        sequence = make_open(token_ids, **fields)
        self._engine.submit(Open(session_id=self.session_id, sequence=sequence))
        return sequence.sequence_id

    def close(self, sequence_id: str, *, keep: Keep = Keep.NOTHING, keep_length: int = 0) -> None:
        self._engine.submit(
            Close(
                session_id=self.session_id,
                sequence_id=sequence_id,
                keep=keep,
                keep_length=keep_length,
            )
        )

    def update(
        self, sequence_id: str, *, drafting: bool = True, drafter_address: str | None = None
    ) -> None:
        self._engine.submit(
            Update(
                session_id=self.session_id,
                sequence_id=sequence_id,
                drafting=drafting,
                drafter_address=drafter_address,
            )
        )

    def hint(
        self,
        sequence_id: str,
        base_length: int,
        token_ids: Iterable[int],
        *,
        matched_ngram_length: int = 2,
        is_indexing: bool = False,
        source: DraftSource | None = None,
    ) -> None:
        hint = Hint(
            sequence_id=sequence_id,
            base_length=base_length,
            token_ids=list(token_ids),
            matched_ngram_length=matched_ngram_length,
            is_indexing=is_indexing,
            source=source,
        )
        self._engine.submit(
            Hints(session_id=self.session_id, hints=[hint], received_at_s=time.monotonic())
        )

    def detach(self) -> None:
        self._engine.submit(DetachSession(session_id=self.session_id))

    def read(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits for the next batch of events."""
        events, step = self._batches.get(timeout=timeout_s)
        self.events += events
        self.steps.append(step)

    def read_all(self) -> None:
        """Reads all batches that have arrived."""
        while not self._batches.empty():
            self.read()

    def of(self, sequence_id: str) -> list[Event]:
        return [event for event in self.events if event.sequence_id == sequence_id]

    def decided(self, sequence_id: str) -> list[Decided]:
        return [event for event in self.of(sequence_id) if isinstance(event, Decided)]

    def traced(self, sequence_id: str) -> list[StepTrace]:
        return [e.step for e in self.of(sequence_id) if isinstance(e, StepTraced)]

    def output(self, sequence_id: str) -> list[int]:
        return [t for event in self.decided(sequence_id) for t in event.token_ids]

    def prompt_logprobs(self, sequence_id: str) -> list[TokenLogprob]:
        """Of all chunks, which must be contiguous."""
        reported: list[TokenLogprob] = []
        for event in self.of(sequence_id):
            if isinstance(event, PromptScored):
                assert event.base_length == len(reported) + 1
                reported += event.logprobs
        return reported

    def wait_decided(self, sequence_id: str, count: int) -> Decided:
        """The sequence's `count`th decision, waited for."""
        while len(self.decided(sequence_id)) < count:
            self.read()
        return self.decided(sequence_id)[count - 1]

    def wait_end(self, sequence_id: str) -> Decided | Rejected:
        """The sequence's terminal event, waited for."""
        while True:
            for event in self.of(sequence_id):
                if is_terminal(event):
                    assert isinstance(event, Decided | Rejected)
                    return event
            self.read()


def is_terminal(event: Event) -> bool:
    return isinstance(event, Rejected) or (
        isinstance(event, Decided) and event.finish_reason is not None
    )


@dataclass
class RunningEngine:
    engine: Engine
    model: ScriptedModel
    observer: RecordingObserver
    sessions: list[EngineSession] = field(default_factory=list)

    @property
    def num_hints(self) -> dict[HintOutcome, int]:
        """By outcome, so far; only those that there were."""
        counts = self.engine.call(self.engine._scheduler.counts.hints.copy).result(PATIENCE_S)
        return {outcome: count for outcome, count in counts.items() if count}

    def attach(self) -> EngineSession:
        session = EngineSession(self.engine)
        self.sessions.append(session)
        return session

    def sync(self) -> None:
        """Waits until the engine has handled earlier commands, and checks its integrity."""
        self.engine.call(self.engine.check_integrity).result(PATIENCE_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pauses the engine between two steps, so that commands submitted meanwhile are handled
        together.
        """
        stands_still, goes_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            stands_still.set()
            goes_on.wait(PATIENCE_S)

        self.engine.call(stand_still)
        assert stands_still.wait(PATIENCE_S)
        try:
            yield
        finally:
            goes_on.set()

    def stop(self) -> None:
        """Closes all sessions; checks that nothing is left and the thread ends without an error."""
        for session in self.sessions:
            session.detach()
        self.engine.when_idle().result(PATIENCE_S)
        self.sync()
        assert self.engine.load.num_kv_blocks_used == 0
        assert self.engine.load.num_running == self.engine.load.num_waiting == 0
        self.engine.stop()
        self.engine.stopped.result(PATIENCE_S)
        for session in self.sessions:
            session.read_all()
            check_contract(session)


def check_contract(session: EngineSession) -> None:
    """Asserts the contract of every sequence's events."""
    for sequence_id in {event.sequence_id for event in session.events}:
        events = session.of(sequence_id)
        assert not any(is_terminal(event) for event in events[:-1]), "something follows the end"
        assert not any(isinstance(event, Opened) for event in events[1:])
        expected_base = None
        for event in session.decided(sequence_id):
            assert expected_base in (None, event.base_length), "a gap between decisions"
            expected_base = event.base_length + len(event.token_ids)
            assert event.num_accepted_tokens <= min(event.num_draft_tokens, len(event.token_ids))
            assert event.token_ids or event.finish_reason is not None
            assert event.finish_reason is None or event.num_wanted_draft_tokens == 0


def no_link(address: str) -> Link:
    """Of an engine whose sequences name no drafter."""
    raise AssertionError("no sequence names a drafter")


def start_engine_with(
    *,
    rule: Rule = hashed,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    max_num_waiting: int = 100,
    max_waiting_tokens: int = 1 << 20,
    max_scored_rows: int = 256,
    draft_timeout_s: float = 60.0,
    poison: frozenset[int] = frozenset(),
    observer: RecordingObserver | None = None,
    depth_policy: DepthPolicy | None = None,
    open_link: Callable[[str], Link] = no_link,
    drafter_idle_timeout_s: float = 60.0,
) -> RunningEngine:
    observer = observer or RecordingObserver()
    observers = Observers([observer])
    model = ScriptedModel(
        rule, num_slots=num_blocks * block_size, block_size=block_size, poison=poison
    )
    engine = Engine(
        model=model,
        scheduler=Scheduler(
            block_pool=BlockPool(num_blocks),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_scored_rows=max_scored_rows,
            depth_policy=depth_policy,
        ),
        options=EngineOptions(
            max_model_len=max_model_len,
            max_num_waiting=max_num_waiting,
            max_waiting_tokens=max_waiting_tokens,
            draft_timeout_s=draft_timeout_s,
        ),
        drafters=Drafters(
            open_link=open_link,
            vocab_size=model.vocab_size,
            unused_timeout_s=drafter_idle_timeout_s,
            count_fault=observers.drafter_failed,
        ),
        observer=observers,
    )
    engine.start()
    return RunningEngine(engine=engine, model=model, observer=observer)
