"""An engine over a scripted model whose drafters are played by the test."""

import threading
from dataclasses import dataclass, field
from typing import Any

from tandem.v1 import drafter_pb2 as pb
from tests.scripted_model import Rule, continue_by, hashed
from tests.verifier.drafters.fake_link import FakeLink, FakeLinks
from tests.verifier.drafters.feeding import drafted_by
from tests.verifier.drafters.scripted_drafter import appended
from tests.verifier.running_engine import (
    PATIENCE_S,
    EngineSession,
    RunningEngine,
    StartEngine,
)
from verifier.drafts.draft_wait import RunningMean

A, B = "a:1", "b:1"


class Gate:
    """A rule that waits at given lengths, so that a test knows where the engine is."""

    def __init__(self, rule: Rule = hashed) -> None:
        self._rule = rule
        self._lock = threading.Condition()
        self._closed_at = 1 << 30
        self._length = 0

    def __call__(self, known: list[int]) -> int | None:
        with self._lock:
            self._length = len(known)
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: len(known) < self._closed_at, PATIENCE_S)
        return self._rule(known)

    def close_at(self, length: int) -> None:
        """Lets steps run, until one is to decide what follows `length` tokens."""
        with self._lock:
            self._closed_at = length
            self._lock.notify_all()

    def wait_at(self, length: int) -> None:
        """Waits until a step stands there."""
        with self._lock:
            assert self._lock.wait_for(lambda: self._length >= length, PATIENCE_S)
            assert self._length == length

    def open(self) -> None:
        self.close_at(1 << 30)


@dataclass
class Foreteller:
    """Proposes what the model will say, up to `num_tokens` of it."""

    num_tokens: int
    rule: Rule = hashed
    histories: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, delta: pb.SequenceDelta) -> pb.Proposal:
        known = self.histories.setdefault(delta.sequence_id, [])
        assert delta.base_length <= len(known), "a gap"
        del known[delta.base_length :]
        known += delta.token_ids
        num_tokens = min(self.num_tokens, delta.max_draft_tokens)
        if not num_tokens:
            return appended(delta)
        return appended(
            delta,
            status=pb.STATUS_OK,
            token_ids=continue_by(self.rule, known, num_tokens),
            matched_ngram_length=2,
            source=pb.SOURCE_SEQUENCE,
        )


@dataclass
class DirectEngine:
    running: RunningEngine
    links: FakeLinks
    session: EngineSession

    def connect(self, address: str = A) -> FakeLink:
        """A drafter that is up, and has been sent nothing."""
        self.session.wait_end(
            self.session.open([1], max_new_tokens=1, drafted_by=drafted_by(address))
        )
        self.links[address].up()
        self.running.sync()
        assert not self.links[address].sent
        return self.links[address]

    def open(self, token_ids: list[int], address: str = A, **fields: Any) -> str:
        policy = {k: fields.pop(k) for k in ("pool_id", "hint_tokens", "keep") if k in fields}
        return self.session.open(token_ids, drafted_by=drafted_by(address, **policy), **fields)

    def believe(self, *, step_s: float, hop_s: float) -> None:
        """Fixes the estimates of the wait rule."""

        def fix() -> None:
            estimates = self.running.engine._estimates
            estimates.step_s = RunningMean(1.0, step_s)
            estimates.hop_s = RunningMean(1.0, hop_s)

        self.running.engine.call(fix).result(PATIENCE_S)

    def trust(self, sequence_id: str, probability: float = 1.0) -> None:
        """Sets a sequence's p1, once the engine is there."""

        def fix() -> None:
            sequence = self.running.engine._table.find(self.session.session_id, sequence_id)
            assert sequence is not None
            sequence.hint_record.first_token_probability = probability

        self.running.engine.call(fix)


def start_direct(start_engine: StartEngine, **options: Any) -> DirectEngine:
    links = FakeLinks()
    running = start_engine(open_link=links.open, **options)
    links.post = running.engine.submit
    return DirectEngine(running, links, running.attach())
