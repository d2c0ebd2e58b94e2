"""Thousands of short random requests through one engine with too few K/V blocks.

Mixed lengths, priorities and salts, shared prefixes, right and wrong drafts, cancels; so few blocks
that sequences are preempted all the time. Every text is requested many times and must be the same
each time, whatever was cached, drafted or preempted. At the end all blocks must be free or cached,
and the engine's state consistent.
"""

import queue
import random
import time
from dataclasses import dataclass, field

from tandem.values import DraftWait, FinishReason
from verifier.drafts.draft_buffer import Hint
from verifier.engine.engine import Engine
from verifier.engine.messages import Close, Decided, Event, Hints, Open, Opened, Rejected, StepStats
from verifier.sampling import Sampling
from verifier.scheduling.sequence import OpenSequence

PATIENCE_S = 60.0


class SoakError(Exception):
    """The engine broke a promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A request that is repeated."""

    prompt_token_ids: list[int]
    sampling: Sampling
    # The longest output so far; all others must agree with it.
    output_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class SoakCounts:
    """Counts of the run."""

    num_requests: int = 0
    num_cancelled: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class _RunningRequest:
    text: Text
    num_output_tokens: int = 0


class Soak:
    """One client of an engine, in the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        *,
        vocab_size: int,
        longest_prompt: int,
        longest_output: int,
        num_at_once: int = 24,
        num_texts: int = 60,
        seed: int = 1,
    ) -> None:
        self.counts = SoakCounts()
        self._engine = engine
        self._vocab_size = vocab_size
        self._longest_output = longest_output
        self._num_at_once = num_at_once
        self._draw = random.Random(seed)
        self._batches: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._session_id = engine.attach(self._sink)
        self._running: dict[str, _RunningRequest] = {}
        beginnings = [self._tokens(longest_prompt) for _ in range(4)]
        self._texts = [
            self._text(self._draw.choice(beginnings), longest_prompt) for _ in range(num_texts)
        ]

    def run(self, num_requests: int) -> None:
        """Requests `num_requests` texts, reads all events, then checks that nothing is left.

        Raises:
            SoakError: a text differed, or the engine rejected a request.
        """
        num_to_open = num_requests
        while num_to_open or self._running:
            while num_to_open and len(self._running) < self._num_at_once:
                self._open()
                num_to_open -= 1
            hints: list[Hint] = []
            for event in self._batches.get(timeout=PATIENCE_S):
                self._handle(event, hints)
            if hints:
                command = Hints(
                    session_id=self._session_id, hints=hints, received_at_s=time.monotonic()
                )
                self._engine.submit(command)
        self._engine.when_idle().result(PATIENCE_S)
        self._engine.call(self._engine.check_integrity).result(PATIENCE_S)
        load = self._engine.load
        if load.num_kv_blocks_used or load.num_running or load.num_waiting:
            raise SoakError(f"state is left: {load}")

    def _sink(self, events: list[Event], step: StepStats | None) -> None:
        self._batches.put(events)

    def _text(self, beginning: list[int], longest_prompt: int) -> Text:
        draw = self._draw
        start = beginning[: draw.randint(1, longest_prompt - 1)]
        prompt_token_ids = start + self._tokens(
            draw.randint(1, min(8, longest_prompt - len(start)))
        )
        temperature = draw.choice([0.0, 0.0, 0.8])
        sampling = Sampling(temperature=temperature, seed=draw.getrandbits(63))
        return Text(prompt_token_ids=prompt_token_ids, sampling=sampling)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]

    def _open(self) -> None:
        draw = self._draw
        text = draw.choice(self._texts)
        self.counts.num_requests += 1
        sequence_id = str(self.counts.num_requests)
        self._running[sequence_id] = _RunningRequest(text=text)
        sequence = OpenSequence(
            sequence_id=sequence_id,
            token_ids=text.prompt_token_ids,
            prompt_length=len(text.prompt_token_ids),
            sampling=text.sampling,
            max_new_tokens=draw.randint(1, self._longest_output),
            stop_token_ids=frozenset(),
            draft_wait=draw.choice(list(DraftWait)),
            drafting=draw.random() < 0.9,
            num_speculative_tokens=draw.choice([0, 3, 7]),
            cache_salt=draw.choice(["", "", "", "other"]),
            priority=draw.choice([0, 0, 0, -1, 1]),
        )
        self._engine.submit(Open(session_id=self._session_id, sequence=sequence))
        if draw.random() < 0.02:
            self._close(sequence_id)

    def _close(self, sequence_id: str) -> None:
        self._engine.submit(Close(session_id=self._session_id, sequence_id=sequence_id))

    def _handle(self, event: Event, hints: list[Hint]) -> None:
        request = self._running.get(event.sequence_id)
        if request is None:
            raise SoakError(f"an event after its end: {event}")
        match event:
            case Opened():
                self.counts.num_cached_tokens += event.num_cached_tokens
            case Rejected():
                raise SoakError(f"rejected: {event.error}")
            case Decided():
                self._check(request, event)
                if event.finish_reason is not None:
                    self.counts.num_cancelled += event.finish_reason is FinishReason.CANCELLED
                    del self._running[event.sequence_id]
                    return
                hints.append(self._hint(request, event.sequence_id))
                if self._draw.random() < 0.01:
                    self._close(event.sequence_id)

    def _check(self, request: _RunningRequest, decided: Decided) -> None:
        known, start = request.text.output_token_ids, request.num_output_tokens
        if decided.base_length != len(request.text.prompt_token_ids) + start:
            raise SoakError(f"does not continue {start} output tokens: {decided}")
        expected = known[start : start + len(decided.token_ids)]
        if decided.token_ids[: len(expected)] != expected:
            raise SoakError(f"{expected} came before, now: {decided}")
        known += decided.token_ids[len(expected) :]
        request.num_output_tokens += len(decided.token_ids)
        self.counts.num_output_tokens += len(decided.token_ids)
        self.counts.num_draft_tokens += decided.num_draft_tokens
        self.counts.num_accepted_tokens += decided.num_accepted_tokens

    def _hint(self, request: _RunningRequest, sequence_id: str) -> Hint:
        """The known continuation of the text, or random tokens, or nothing."""
        start = request.num_output_tokens
        kind = self._draw.randrange(4)
        right = request.text.output_token_ids[start : start + 12] if kind < 2 else []
        wrong = self._tokens(4) if kind == 1 or kind == 2 else []
        return Hint(
            sequence_id=sequence_id,
            base_length=len(request.text.prompt_token_ids) + start,
            token_ids=right + wrong,
            matched_ngram_length=2,
        )
