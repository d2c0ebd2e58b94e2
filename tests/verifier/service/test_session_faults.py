"""A session under floods and faults of our own: it never ends with OK, and no other is affected."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tandem.v1 import sampling_pb2
from tandem.v1 import verifier_pb2 as pb
from tests.scripted_model import VOCAB_SIZE, continue_by, hashed
from tests.verifier.running_engine import PATIENCE_S, RunningEngine, StartEngine
from verifier.engine.messages import DetachSession, Event, Open, Rejected
from verifier.engine.observation import Fault
from verifier.errors import InternalError, OverloadedError
from verifier.service import command_wire, event_wire
from verifier.service.command_flow import COMMAND_COST, SLICE_COST, WINDOW_COST
from verifier.service.named_drafters import MAX_NEW_NAMES, NamedDrafters
from verifier.service.sequence_spans import SequenceSpans
from verifier.service.served_model import ServedModel
from verifier.service.session import Session
from verifier.structured.grammars import Grammars

HELLO = pb.SessionRequest(commands=[pb.Command(hello=pb.Hello(protocol_version=1))])
PROMPT = [1, 2, 0]
INTERNAL = grpc.StatusCode.INTERNAL.value[0]


def served_by(running: RunningEngine) -> ServedModel:
    return ServedModel(
        model_id="scripted", model_digest="", numerics_digest="", instance_id="", architecture="",
        dtype="", device="", numerics="", attention_backend="", max_model_len=200, max_num_seqs=8,
        max_num_batched_tokens=64, max_num_speculative_tokens=7, vocab_size=VOCAB_SIZE,
        block_size=4, num_kv_blocks=64, eos_token_ids=frozenset(),
        tokenizer_digest="digest",
    )  # fmt: skip


def make_open(sequence_id: str = "a", **fields: Any) -> pb.Command:
    values: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 5}
    return pb.Command(open=pb.Open(sequence_id=sequence_id, **(values | fields)))


def make_draft(sequence_id: str) -> pb.Command:
    return pb.Command(draft=pb.Draft(sequence_id=sequence_id, token_ids=[1]))


REGEX = sampling_pb2.SamplingParams(
    structured_output=sampling_pb2.StructuredOutput(regex="a"),
)
LONG_DRAFT = make_draft("x" * 1000)


class TestFlood:
    async def test_reading_stops_while_too_much_is_unhandled_and_others_are_served(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine()
        num_read = 0

        async def flood() -> AsyncIterator[pb.SessionRequest]:
            nonlocal num_read
            yield HELLO
            drafts = [pb.Command(draft=pb.Draft(sequence_id="nobody"))] * 64
            for _ in range(200):
                num_read += len(drafts)
                yield pb.SessionRequest(commands=drafts)

        async def one() -> AsyncIterator[pb.SessionRequest]:
            yield HELLO
            yield pb.SessionRequest(commands=[make_open()])
            await asyncio.Event().wait()

        flooding = new_session(running)
        other = new_session(running)
        with running.held():
            reading = asyncio.create_task(flooding.read(flood()))
            reading_other = asyncio.create_task(other.read(one()))
            for _ in range(20_000):
                await asyncio.sleep(0)
            assert not reading.done()
            assert num_read <= 2 * WINDOW_COST // COMMAND_COST + 64
        output: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            async for response in other.responses():
                output += [t for event in response.events for t in event.decided.token_ids]
                if len(output) == 5:
                    break
            assert output == continue_by(hashed, PROMPT, 5)
            await reading
        assert num_read == 200 * 64
        reading_other.cancel()
        flooding.close()
        other.close()


class TestOwnFaults:
    async def test_a_command_whose_handling_raises_is_rejected_alone(
        self, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = command_wire.open_sequence, command_wire.hint

        def open_sequence(message: pb.Open, served: ServedModel, **options: Any) -> Any:
            if message.sequence_id == "bad":
                raise ZeroDivisionError
            return whole[0](message, served, **options)

        def hint(message: pb.Draft, served: ServedModel) -> Any:
            if message.sequence_id == "bad":
                raise ZeroDivisionError
            return whole[1](message, served)

        monkeypatch.setattr(command_wire, "open_sequence", open_sequence)
        monkeypatch.setattr(command_wire, "hint", hint)
        running = start_engine()
        bad_draft = pb.Command(draft=pb.Draft(sequence_id="bad"))
        with capture_logs() as log:
            events = await events_of(running, bad_draft, make_open("bad"), make_open("good"))
        assert [event.rejected.code for event in events if event.HasField("rejected")] == [INTERNAL]
        check_good(events)
        assert [entry["event"] for entry in log] == ["command_failed"] * 2
        assert {entry["sequence_id"] for entry in log} == {"bad"}

    async def test_an_event_that_cannot_be_written_ends_its_sequence_alone(
        self, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = event_wire._write_event

        def write(message: pb.Event, event: Any) -> None:
            if event.sequence_id == "bad" and hasattr(event, "base_length"):
                raise ZeroDivisionError
            whole(message, event)

        monkeypatch.setattr(event_wire, "_write_event", write)
        running = start_engine()
        with capture_logs():
            events = await events_of(
                running, make_open("bad", max_new_tokens=100), make_open("good")
            )
            running.engine.when_idle().result(PATIENCE_S)
        of_bad = [
            event.WhichOneof("event")
            for event in events
            if "bad" in (event.opened.sequence_id, event.rejected.sequence_id)
        ]
        assert of_bad == ["opened", "rejected"]
        check_good(events)
        assert running.observer.faults == [Fault.PUBLISH]


class TestOverload:
    """Its client does not read: `responses` is not called before the end."""

    @pytest.mark.parametrize("in_one_message", [True, False])
    @pytest.mark.parametrize(
        ("refused", "late"),
        [
            pytest.param(HELLO.commands[0], make_open("late"), id="open"),
            pytest.param(HELLO.commands[0], make_open("late", sampling=REGEX), id="grammar"),
            pytest.param(LONG_DRAFT, make_draft("late"), id="draft"),
        ],
    )
    async def test_what_comes_after_the_overload_that_ends_a_session_is_not_handled(
        self,
        start_engine: StartEngine,
        monkeypatch: pytest.MonkeyPatch,
        refused: pb.Command,
        late: pb.Command,
        in_one_message: bool,
    ) -> None:
        running = start_engine()
        session = new_session(running, max_event_bytes=2000)
        # More than a slice, whose Rejecteds are more than the client may leave unread.
        messages = [[refused] * (2 * SLICE_COST // COMMAND_COST), [late], [late]]
        if in_one_message:
            messages = [[each for commands in messages for each in commands]]
        num_read = 0

        async def requests() -> AsyncIterator[pb.SessionRequest]:
            nonlocal num_read
            yield HELLO
            for commands in messages:
                num_read += 1
                yield pb.SessionRequest(commands=commands)

        submitted: list[object] = []
        submit = running.engine.submit

        def record(command: Any) -> None:
            submitted.append(command)
            submit(command)

        monkeypatch.setattr(running.engine, "submit", record)
        async with asyncio.timeout(PATIENCE_S):
            await session.read(requests())
        assert [type(each) for each in submitted] == [DetachSession]
        assert len(session.uncompiled) == 0
        # The second of three, to see that it is over.
        assert num_read == min(2, len(messages))
        with pytest.raises(OverloadedError, match="events are unread"):
            async for _ in session.responses():
                pass
        session.close()

    async def test_a_step_may_have_more_events_than_may_be_left_unread(
        self, start_engine: StartEngine
    ) -> None:
        session = new_session(start_engine(), max_event_bytes=100)
        events: list[Event] = [Rejected(sequence_id="x" * 200, error=InternalError())]
        responses = aiter(session.responses())
        for _ in range(3):
            session._deliver(events, None)
            assert len((await anext(responses)).events) == 1
        for _ in range(2):
            session._deliver(events, None)
        with pytest.raises(OverloadedError, match="over 100 bytes of events are unread"):
            await anext(responses)
        session.close()


def new_session(
    running: RunningEngine, spans: SequenceSpans | None = None, *, max_event_bytes: int = 1 << 20
) -> Session:
    return Session(
        running.engine,
        served_by(running),
        Grammars(Path("no tokenizer"), vocab_size=VOCAB_SIZE, end_token_ids=[0]),
        admits_drafter=lambda address: False,
        may_wait=lambda num_tokens: True,
        max_event_bytes=max_event_bytes,
        spans=spans,
    )


async def events_of(
    running: RunningEngine, *commands: pb.Command, spans: SequenceSpans | None = None
) -> list[pb.Event]:
    """A session's events until its sequence "good" has ended."""
    session = new_session(running, spans)

    async def requests() -> AsyncIterator[pb.SessionRequest]:
        yield HELLO
        with running.held():
            yield pb.SessionRequest(commands=commands)
        await asyncio.Event().wait()

    reading = asyncio.create_task(session.read(requests()))
    events: list[pb.Event] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for response in session.responses():
                events += response.events
                if any(event.decided.finish_reason for event in events):
                    return events
    finally:
        reading.cancel()
        session.close()
    return events


def check_good(events: list[pb.Event]) -> None:
    output = [
        t
        for event in events
        if event.decided.sequence_id == "good"
        for t in event.decided.token_ids
    ]
    assert output == continue_by(hashed, PROMPT, 5)


def test_a_law_is_passed_on_without_what_this_version_does_not_know(
    start_engine: StartEngine,
) -> None:
    # Field 1000, of another version or of an attacker: a message's room is for tokens.
    unknown = bytes([0xC2, 0x3E, 0xFF, 0xFF, 0x3F]) + bytes((1 << 20) - 1)
    opened = make_open().open
    opened.ngram.MergeFromString(unknown)
    opened.ngram.pool_id = "p"
    assert len(opened.ngram.SerializeToString()) > 1 << 20
    running = start_engine()
    drafters = NamedDrafters(lambda address: True)
    sequence = command_wire.open_sequence(opened, served_by(running), drafters=drafters)
    assert sequence.drafted_by is not None
    assert len(sequence.drafted_by.encoded_params) < 10


@pytest.mark.parametrize("draft_wait", [pb.DRAFT_WAIT_ADAPTIVE, pb.DRAFT_WAIT_ALWAYS])
def test_one_new_drafter_too_many_costs_its_sequence_nothing_but_drafts(
    start_engine: StartEngine, draft_wait: pb.DraftWait.ValueType
) -> None:
    running = start_engine()
    session = running.attach()
    drafters = NamedDrafters(lambda address: True, clock=lambda: 0.0)
    for index in range(MAX_NEW_NAMES):
        assert drafters.admit(f"drafter-{index}:1", field="")
    opened = make_open(draft_wait=draft_wait, drafter_address="new:1").open
    sequence = command_wire.open_sequence(opened, served_by(running), drafters=drafters)
    assert sequence.drafted_by is not None
    assert sequence.drafted_by.address == ""
    running.engine.submit(Open(session_id=session.session_id, sequence=sequence))
    session.wait_end("a")
    assert session.output("a") == continue_by(hashed, PROMPT, sequence.max_new_tokens)
    # An Update that names another leaves the drafter as it is, and makes no step wait.
    message = pb.Update(sequence_id="a", drafting=True, drafter_address="newer:1")
    update = command_wire.update(message, session.session_id, drafters=drafters)
    assert (update.drafter_address, update.drafting) == (None, False)
    message.drafter_address = "drafter-0:1"
    update = command_wire.update(message, session.session_id, drafters=drafters)
    assert (update.drafter_address, update.drafting) == ("drafter-0:1", True)
