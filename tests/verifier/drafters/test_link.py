"""One drafter's stream: deadlines, pauses, epochs, and answers that nobody may read."""

import asyncio
import itertools
from typing import Any

import pytest

from servicekit.channels.channel import open_channel
from servicekit.config import ConfigError
from tandem.v1 import drafter_pb2 as pb
from tests.scripted_dns import ScriptedDns
from tests.verifier.drafters.conftest import OpenLink
from tests.verifier.drafters.recorded_link import RecordedLink
from tests.verifier.drafters.scripted_drafter import ScriptedDrafter, no_match
from verifier.drafters import link as link_module
from verifier.drafters.addresses import AdmittedDrafters
from verifier.drafters.messages import (
    DrafterAnswered,
    DrafterBack,
    DrafterDown,
    DrafterFault,
    DrafterLate,
    DrafterUp,
)

pytestmark = pytest.mark.stand_in

DELTA = pb.SequenceDelta(sequence_id="a", token_ids=[1, 2, 3])


def kinds(recorded: RecordedLink) -> list[type]:
    """The kinds of messages, in order, each run of equal ones once."""
    return [kind for kind, _ in itertools.groupby(type(m) for m in recorded.messages)]


class TestExchange:
    async def test_a_drafter_that_comes_later_is_found(self, open_link: OpenLink) -> None:
        absent = ScriptedDrafter()
        await absent.start()
        await absent.stop()
        recorded = open_link(absent.address)
        await absent.start(absent.address)
        epoch = await recorded.up()
        recorded.send(epoch, DELTA)
        await recorded.wait(DrafterAnswered)
        await absent.stop()

    async def test_a_stream_that_broke_is_replaced_and_nothing_of_it_is_sent_on_the_new_one(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        recorded = open_link(scripted.address)
        old = await recorded.up()
        scripted.may_answer.clear()
        for _ in range(3):
            recorded.send(old, DELTA)
        await scripted.until(lambda: len(scripted.batches) == 1)
        await scripted.stop()
        await recorded.wait(DrafterDown)
        recorded.send(old, DELTA)
        scripted.may_answer.set()
        num_seen = len(scripted.batches)
        await scripted.start(scripted.address)
        new = await recorded.up(2)
        assert new > old
        recorded.send(old, DELTA)
        last = recorded.send(new, DELTA)
        await recorded.wait(DrafterAnswered)
        assert recorded.answered == [last]
        assert [batch.batch_id for batch in scripted.batches[num_seen:]] == [last]

    async def test_a_closed_link_reports_nothing_and_leaves_no_stream(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        recorded = open_link(scripted.address)
        epoch = await recorded.up()
        scripted.may_answer.clear()
        recorded.send(epoch, DELTA)
        await scripted.until(lambda: len(scripted.batches) == 1)
        recorded.link.close()
        recorded.send(epoch, DELTA)
        recorded.link.close()
        scripted.may_answer.set()
        await asyncio.sleep(0.1)
        assert kinds(recorded) == [DrafterUp]
        assert len(scripted.batches) == 1

    async def test_an_address_is_connected_once_a_name_resolves_to_it(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        host, port = "drafter.example", scripted.address.rpartition(":")[2]
        dns = ScriptedDns(**{host: ["10.0.0.1"]})
        admitted = AdmittedDrafters([f"{host}:{port}"], resolve_interval_s=0.001, resolve=dns)
        resolving = asyncio.ensure_future(admitted.run())
        try:
            recorded = open_link(scripted.address, admitted=admitted)
            closed = open_link(scripted.address, admitted=admitted)
            down = await recorded.wait(DrafterDown)
            await closed.wait(DrafterDown)
            closed.link.close()
            assert down.fault is None, "nobody's fault: names change"
            await dns.applied(host)
            assert scripted.num_streams == 0
            dns.answers[host] = ["10.0.0.1", "127.0.0.1"]
            await recorded.up()
            assert scripted.num_streams == 1
            # What is connected outlives its name.
            dns.answers[host] = ["10.0.0.1"]
            await dns.applied(host)
            recorded.send(1, DELTA)
            await recorded.wait(DrafterAnswered)
            assert kinds(recorded) == [DrafterDown, DrafterUp, DrafterAnswered]
        finally:
            resolving.cancel()

    async def test_an_address_without_its_credentials_is_reported_as_our_fault(
        self, open_link: OpenLink
    ) -> None:
        recorded = open_link("drafter.example:50051")
        down = await recorded.wait(DrafterDown)
        assert down.fault is DrafterFault.INTERNAL_ERROR
        assert "drafter.example" in down.reason

    async def test_files_that_cannot_be_used_for_a_while_cost_no_more_than_that(
        self, open_link: OpenLink, scripted: ScriptedDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A certificate may just be replaced when a link is opened."""
        num_tries = 0

        def open_at_last(*args: Any, **fields: Any) -> Any:
            nonlocal num_tries
            num_tries += 1
            if num_tries < 4:
                raise ConfigError("--peer-tls-cert", "key and certificate do not match")
            return open_channel(*args, **fields)

        monkeypatch.setattr("verifier.drafters.link.open_channel", open_at_last)
        monkeypatch.setattr(link_module, "_REOPEN_PAUSE_S", 0.01)
        recorded = open_link(scripted.address)
        await recorded.wait(DrafterUp)
        assert [type(each) for each in recorded.messages] == [DrafterDown, DrafterUp]


class TestLies:
    async def test_an_answer_that_nothing_asked_for_ends_the_stream(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        recorded = open_link(scripted.address)
        epoch = await recorded.up()
        scripted.answer = lambda request: no_match(request) * 2
        recorded.send(epoch, DELTA)
        down = await recorded.wait(DrafterDown)
        assert "nothing asked for" in down.reason
        assert down.fault is DrafterFault.PROTOCOL_ERROR
        assert len(recorded.answered) == 1
        epoch = await recorded.up(2)
        recorded.link.fail(epoch, "why")
        assert (await recorded.wait(DrafterDown, 2)).fault is None, "it did nothing wrong again"

    async def test_an_answer_that_is_too_long_ends_the_stream_and_is_not_reported(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        recorded = open_link(scripted.address)
        epoch = await recorded.up()
        scripted.answer = lambda request: [b"x" * 101]
        recorded.send(epoch, DELTA, max_answer_bytes=101)
        await recorded.wait(DrafterAnswered)
        recorded.send(epoch, DELTA, max_answer_bytes=100)
        assert "101 bytes is too long" in (await recorded.wait(DrafterDown)).reason
        assert len(recorded.of(DrafterAnswered)) == 1

    async def test_an_answer_that_the_transport_refuses_ends_the_stream(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        recorded = open_link(scripted.address)
        epoch = await recorded.up()
        scripted.answer = lambda request: [b"x" * (6 << 20)]
        recorded.send(epoch, DELTA)
        assert "RESOURCE_EXHAUSTED" in (await recorded.wait(DrafterDown)).reason
        assert not recorded.of(DrafterAnswered)

    async def test_a_drafter_that_does_not_greet_is_down(
        self, scripted: ScriptedDrafter, open_link: OpenLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link_module, "_GREET_TIMEOUT_S", 0.2)
        scripted.answers_greeting = False
        recorded = open_link(scripted.address)
        assert "no answer within" in (await recorded.wait(DrafterDown)).reason
        scripted.answers_greeting = True
        await recorded.up()


class TestDeadlines:
    async def test_one_late_answer_is_used_and_changes_nothing(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        recorded = open_link(scripted.address, deadline_s=1.0)
        epoch = await recorded.up()
        scripted.may_answer.clear()
        late = recorded.send(epoch, DELTA)
        assert not (await recorded.wait(DrafterLate)).is_aside
        scripted.may_answer.set()
        await recorded.wait(DrafterAnswered)
        on_time = recorded.send(epoch, DELTA)
        await recorded.wait(DrafterAnswered, 2)
        assert recorded.answered == [late, on_time]
        assert kinds(recorded) == [DrafterUp, DrafterLate, DrafterAnswered]
        assert scripted.num_streams == 1

    async def test_three_in_a_row_put_it_aside_and_it_comes_back_after_a_pause(
        self, scripted: ScriptedDrafter, open_link: OpenLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link_module, "_FIRST_PAUSE_S", 0.3)
        recorded = open_link(scripted.address, deadline_s=0.1)
        epoch = await recorded.up()
        scripted.may_answer.clear()
        sent = [recorded.send(epoch, DELTA) for _ in range(4)]
        await recorded.wait(DrafterLate, 3)
        assert [late.is_aside for late in recorded.of(DrafterLate)] == [False, False, True]
        scripted.may_answer.set()
        await recorded.wait(DrafterAnswered, 4)
        caught_up_at_s = asyncio.get_running_loop().time()
        assert recorded.answered == sent, "late answers are used"
        await recorded.wait(DrafterBack)
        assert asyncio.get_running_loop().time() - caught_up_at_s >= 0.25
        assert kinds(recorded) == [DrafterUp, DrafterLate, DrafterAnswered, DrafterBack]
        assert scripted.num_streams == 1, "its histories are not replayed"

    async def test_one_that_does_not_answer_for_forty_deadlines_is_gone(
        self, scripted: ScriptedDrafter, open_link: OpenLink
    ) -> None:
        recorded = open_link(scripted.address, deadline_s=0.02)
        epoch = await recorded.up()
        scripted.may_answer.clear()
        recorded.send(epoch, DELTA)
        assert (await recorded.wait(DrafterDown)).reason == "no answer within 0.8 s"
        assert len(recorded.of(DrafterLate)) == 3, "it is put aside once"
        scripted.may_answer.set()
        new = await recorded.up(2)
        last = recorded.send(new, DELTA)
        await recorded.wait(DrafterAnswered)
        assert recorded.answered == [last], "nothing of the old stream"
