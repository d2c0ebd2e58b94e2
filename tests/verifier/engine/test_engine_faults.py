"""Faults of the engine's own: each ends one sequence at most, and is counted.

The values sent here would never pass the session's checks; they stand for whatever the checks or
the engine do not foresee.
"""

from typing import Any

import pytest
from structlog.testing import capture_logs

from tandem.values import DraftWait
from tests.scripted_model import continue_by, hashed
from tests.verifier.running_engine import (
    PATIENCE_S,
    EngineSession,
    RecordingObserver,
    RunningEngine,
    StartEngine,
    start_engine_with,
)
from verifier.drafts.depth_policy import DepthPolicy
from verifier.engine.messages import Event, Rejected, StepStats
from verifier.engine.observation import Fault, StepRecord
from verifier.errors import InternalError
from verifier.sampling import Sampling
from verifier.scheduling.sequence import Scoring, ScoringMethod
from verifier.service.score_call import DraftsToScore, ScoreCall, ScoreOptions

pytestmark = pytest.mark.stand_in

PROMPT = [1, 2, 0, 2, 1, 0]


class Bystander:
    """A stream that runs before, during and after the fault; its text must not change."""

    def __init__(self, running: RunningEngine) -> None:
        self.session = running.attach()
        self.sequence_id = self.session.open([0, 1], max_new_tokens=60)
        self.session.wait_decided(self.sequence_id, 1)

    def check(self) -> None:
        self.session.wait_end(self.sequence_id)
        assert self.session.output(self.sequence_id) == continue_by(hashed, [0, 1], 60)
        late = self.session.open(PROMPT, max_new_tokens=5)
        self.session.wait_end(late)
        assert self.session.output(late) == continue_by(hashed, PROMPT, 5)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"priority": "a"}, Fault.COMMAND),
        ({"token_ids": ["a", *PROMPT]}, Fault.SCHEDULE),
        ({"tokens_per_match": "a"}, Fault.SCHEDULE),
        ({"sampling": Sampling(temperature=1.0, seed="a")}, Fault.VERIFY),  # type: ignore[arg-type]
        ({"sampling": Sampling(prompt_logprobs="a")}, Fault.SCORE),  # type: ignore[arg-type]
        ({"stop_token_ids": None}, Fault.COMMIT),
    ],
    ids=lambda value: value.value if isinstance(value, Fault) else "",
)
def test_a_sequence_that_makes_the_engine_raise_fails_alone(
    start_engine: StartEngine, fields: dict[str, Any], fault: Fault
) -> None:
    running = start_engine()
    bystander = Bystander(running)
    session = running.attach()
    with capture_logs() as log:
        values: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 20}
        with running.held():
            sequence_id = session.open(**(values | fields))
            session.hint(sequence_id, len(PROMPT), continue_by(hashed, PROMPT, 8))
        end = session.wait_end(sequence_id)
    assert isinstance(end, Rejected)
    assert isinstance(end.error, InternalError)
    assert end.error.message == "internal error", "it leaks what went wrong"
    bystander.check()
    running.sync()
    assert running.observer.faults == [fault]
    [entry] = [entry for entry in log if entry["log_level"] == "error"]
    assert (entry["during"], entry["sequence_id"]) == (fault.value, sequence_id)


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": None}, {"num_speculative_tokens": "a"}], ids=["before", "after"]
)
def test_a_sequence_that_fails_leaves_nothing_in_the_prefix_cache(
    start_engine: StartEngine, fields: dict[str, Any]
) -> None:
    """Before its tokens count as computed, or after that."""
    running = start_engine()
    session = running.attach()
    broken = session.open(PROMPT * 4, **fields)
    assert isinstance(session.wait_end(broken), Rejected)
    assert not running.engine._scheduler.block_pool.cache._digests


def test_a_hint_that_makes_the_engine_raise_is_lost_alone(start_engine: StartEngine) -> None:
    running = start_engine()
    bystander = Bystander(running)
    session = running.attach()
    sequence_id = session.open(PROMPT, max_new_tokens=20, draft_wait=DraftWait.ALWAYS)
    session.wait_decided(sequence_id, 1)
    known = PROMPT + session.output(sequence_id)
    with running.held():
        session.hint(sequence_id, "a", [1])  # type: ignore[arg-type]
        session.hint(sequence_id, len(known), continue_by(hashed, known, 3))
    assert session.wait_decided(sequence_id, 2).num_accepted_tokens == 3
    bystander.check()
    assert running.observer.faults == [Fault.COMMAND]


@pytest.mark.parametrize("method", ["choose", "learn"])
def test_a_depth_policy_that_raises_is_dropped_and_counted(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    policy = DepthPolicy(max_rows=64, max_depth=7)

    def fail(*arguments: Any, **named: Any) -> Any:
        raise ValueError(method)

    monkeypatch.setattr(policy, method, fail)
    running = start_engine(depth_policy=policy)
    bystander = Bystander(running)
    session = running.attach()
    with running.held():
        sequence_id = session.open(PROMPT, max_new_tokens=9)
        session.hint(sequence_id, len(PROMPT), continue_by(hashed, PROMPT, 8))
    session.wait_end(sequence_id)
    assert session.output(sequence_id) == continue_by(hashed, PROMPT, 9)
    bystander.check()
    assert running.observer.faults == [Fault.SCHEDULE]
    assert sum(step.num_accepted_tokens for step in session.decided(sequence_id)) == 7


def test_a_session_whose_sink_raises_is_ended_and_others_get_their_events(
    start_engine: StartEngine,
) -> None:
    def sink(events: list[Event], step: StepStats | None) -> None:
        raise RuntimeError("the line is dead")

    running = start_engine()
    bystander = Bystander(running)
    session = EngineSession(running.engine)
    session.session_id = running.engine.attach(sink)
    session.open(PROMPT, max_new_tokens=100)
    bystander.check()
    running.engine.when_idle().result(PATIENCE_S)
    assert running.observer.faults == [Fault.PUBLISH]


def test_a_score_call_that_makes_the_engine_raise_fails_as_our_fault(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_engine()
    bystander = Bystander(running)
    monkeypatch.setattr("verifier.engine.scores._scored", lambda *_: 1 / 0)
    options = ScoreOptions(
        scoring=Scoring(method=ScoringMethod.SINGLE_PASS, num_top=0), sampling=Sampling()
    )
    drafts = DraftsToScore(token_ids=PROMPT, draft_token_ids=[1])
    call = ScoreCall(running.engine, [drafts], options)
    with pytest.raises(InternalError):
        call.result.result(PATIENCE_S)
    call.close()
    bystander.check()


class FailingObserver(RecordingObserver):
    def stepped(self, record: StepRecord) -> None:
        raise RuntimeError("no metrics today")

    def hop_measured(self, duration_s: float) -> None:
        raise RuntimeError("nor hops")


def test_an_observer_that_raises_affects_nobody_and_is_logged_once() -> None:
    with capture_logs() as log:
        running = start_engine_with(observer=FailingObserver())
        session = running.attach()
        sequence_id = session.open(PROMPT, max_new_tokens=20, draft_wait=DraftWait.ALWAYS)
        for count in range(1, 19):
            session.wait_decided(sequence_id, count)
            known = PROMPT + session.output(sequence_id)
            session.hint(sequence_id, len(known), [(hashed(known) + 1) % 3])
        session.wait_end(sequence_id)
        assert session.output(sequence_id) == continue_by(hashed, PROMPT, 20)
        running.stop()
    methods = [entry["method"] for entry in log if entry["event"] == "observer_failed"]
    assert sorted(methods) == ["hop_measured", "stepped"]
    assert running.observer.faults.count(Fault.OBSERVE) > 20, "not counted each time"


def test_commands_of_several_messages_take_effect_in_order(start_engine: StartEngine) -> None:
    running = start_engine()
    session = running.attach()
    with running.held():
        session.open([1], sequence_id="x", max_new_tokens=9)
        session.hint("x", 1, continue_by(hashed, [1], 6))
        session.close("x")
        session.hint("x", 1, [0])  # for a sequence that has ended
        session.open([2], sequence_id="x", max_new_tokens=9)
        session.hint("x", 1, continue_by(hashed, [2], 6))
    running.engine.when_idle().result(PATIENCE_S)
    session.read_all()
    assert session.output("x") == continue_by(hashed, [2], 9)
    assert max(decided.num_accepted_tokens for decided in session.decided("x")) > 3
    session.events.clear()  # the id was used twice, against the protocol
