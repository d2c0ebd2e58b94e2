"""All drafters together: who is used, who is let go, what waits for its Close, what is counted."""

from collections.abc import Iterator

import pytest

from tandem.v1 import drafter_pb2 as pb
from tandem.values import Keep
from tests.verifier.drafters.fake_link import FakeLink, FakeLinks
from tests.verifier.drafters.feeding import drafted_by, fed_sequence
from tests.verifier.drafters.scripted_drafter import appended
from verifier.drafters import drafters as drafters_module
from verifier.drafters import held as held_module
from verifier.drafters.drafters import Answer, Drafters
from verifier.drafters.messages import (
    DrafterAnswered,
    DrafterFault,
    DrafterMessage,
    DrafterState,
)
from verifier.scheduling.sequence import Sequence

pytestmark = pytest.mark.usefixtures("releases_at_once")

VOCAB_SIZE = 100
IDLE_TIMEOUT_S = 10.0
A, B = "a:1", "b:1"


class World:
    """Drafters over fake links, a clock that stands still, and everything that they report."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.links = FakeLinks(self.take)
        self.faults: list[DrafterFault] = []
        self.states: list[tuple[str, DrafterState]] = []
        self.answers: list[Answer] = []
        self.drafters = Drafters(
            open_link=self.links.open,
            vocab_size=VOCAB_SIZE,
            unused_timeout_s=IDLE_TIMEOUT_S,
            count_fault=self.faults.append,
            clock=lambda: self.now_s,
        )
        self.drafters.state_changed = lambda each: self.states.append((each.address, each.state))

    def take(self, message: DrafterMessage) -> None:
        """As the engine handles it."""
        if isinstance(message, DrafterAnswered):
            self.answers.append(self.drafters.answered(message))
        else:
            self.drafters.notice(message)

    def sequence(
        self,
        name: str = "s",
        address: str = A,
        *,
        wanted: int = 4,
        session_id: int = 1,
        **policy: object,
    ) -> Sequence:
        """A sequence that is drafted for."""
        sequence = fed_sequence(name=name, session_id=session_id)
        sequence.num_wanted_draft_tokens = wanted
        sequence.drafted_by = drafted_by(address, **policy)  # type: ignore[arg-type]
        self.drafters.move(sequence, sequence.drafted_by)
        return sequence

    def up(self, address: str = A) -> FakeLink:
        link = self.links[address]
        link.up()
        self.drafters.flush()
        return link

    def settle(self, link: FakeLink) -> None:
        """Answers everything."""
        self.drafters.flush()
        while link.has_unread:
            link.exchange()
            self.drafters.flush()

    def pass_s(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.drafters.tick()
        self.drafters.check_integrity()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.drafters.check_integrity()
    world.drafters.stop()
    assert all(link.is_closed for link in world.links.opened)


def released(link: FakeLink) -> list[tuple[str, int, int]]:
    """What its drafter was told to forget and to keep: (sequence, keep, length)."""
    return [
        (release.sequence_id, release.keep, release.length)
        for request in link.sent
        for release in request.releases
    ]


class TestUse:
    def test_a_drafter_is_connected_when_the_first_sequence_names_it(self, world: World) -> None:
        assert world.links.opened == []
        first = world.sequence("s")
        world.sequence("t")
        world.sequence("u", B)
        assert [link.address for link in world.links.opened] == [A, B]
        assert first.drafter is not None
        assert first.drafter.is_answering, "a hint may still come"
        world.drafters.flush()
        assert world.links[A].sent == [], "it is not up"
        link = world.up()
        [request] = link.sent
        assert [delta.sequence_id for delta in request.sequences] == ["s", "t"]

    def test_a_moved_sequence_is_released_there_and_sent_whole_here(self, world: World) -> None:
        sequence = world.sequence("s", A, pool_id="p", keep=Keep.ALL)
        there = world.up(A)
        world.drafters.move(sequence, drafted_by(B))
        here = world.up(B)
        world.drafters.flush()
        assert released(there) == [("s", pb.KEEP_UNSPECIFIED, 0)], "it goes on: nothing to keep"
        assert list(here.sent[0].sequences[0].token_ids) == [1, 2, 3]
        # The old drafter's answer is of no use any more.
        there.exchange(lambda delta: appended(delta, token_ids=[9], status=pb.STATUS_OK))
        assert world.answers[-1].hints == []

    def test_beyond_so_many_drafters_no_further_one_is_connected(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafters_module, "_MAX_DRAFTERS", 2)
        sequences = [world.sequence(f"s{i}", f"drafter-{i}:1") for i in range(2)]
        for i in range(2):
            world.up(f"drafter-{i}:1")
        sequences.append(world.sequence("s2", "drafter-2:1"))
        assert [s.drafter is not None for s in sequences] == [True, True, False]
        assert len(world.links.opened) == 2

    def test_a_drafter_that_does_not_answer_makes_room_for_another(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafters_module, "_MAX_DRAFTERS", 2)
        good, made_up = world.sequence("good", A), world.sequence("made up", "x.a:1")
        world.up(A)
        other = world.sequence("other", B)
        assert world.links["x.a:1"].is_closed
        assert [s.drafter is not None for s in (good, made_up, other)] == [True, False, True]
        for sequence in (good, made_up, other):
            world.drafters.advance(sequence)
            world.drafters.end(sequence, by_itself=True)


class TestStates:
    def test_changes_are_reported_once(self, world: World) -> None:
        world.sequence()
        link = world.up()
        link.late(is_aside=False)
        link.late(is_aside=True)
        link.back()
        link.down("x" * 10_000)
        link.down("again")
        link.up()
        assert [state for _, state in world.states] == [
            DrafterState.CONNECTING,
            DrafterState.UP,
            DrafterState.SLOW,
            DrafterState.UP,
            DrafterState.DOWN,
            DrafterState.UP,
        ]
        assert world.faults == [DrafterFault.LATE_ANSWER] * 2
        assert world.drafters.count_states() == {DrafterState.UP: 1}

    @pytest.mark.parametrize(
        ("what", "answers"), [("late", False), ("down", False), ("back", True)]
    )
    def test_nothing_is_expected_and_nothing_asked_of_one_that_is_down_or_slow(
        self, world: World, what: str, answers: bool
    ) -> None:
        sequence = world.sequence()
        link = world.up()
        world.settle(link)
        if what == "down":
            link.down()
        else:
            link.late(is_aside=True)
        if what == "back":
            link.back()
        num_sent = len(link.sent)
        sequence.token_ids.append(4)
        world.drafters.advance(sequence)
        world.drafters.flush()
        assert sequence.drafter is not None
        assert sequence.drafter.is_answering == answers
        assert (len(link.sent) > num_sent) == answers

    def test_a_slow_drafters_histories_are_not_replayed_and_late_answers_are_used(
        self, world: World
    ) -> None:
        sequence = world.sequence()
        link = world.up()
        request = link.receive()
        link.late(is_aside=True)
        link.answer(request, lambda delta: appended(delta, token_ids=[7], status=pb.STATUS_OK))
        [(hinted, hint)] = world.answers[-1].hints
        assert (hinted, hint.token_ids) == (sequence, [7])
        sequence.token_ids.append(4)
        world.drafters.advance(sequence)
        link.back()
        world.drafters.flush()
        assert list(link.receive().sequences[0].token_ids) == [4]


class TestIdleness:
    def test_a_drafter_that_nobody_needs_is_let_go_and_connected_again(self, world: World) -> None:
        sequence = world.sequence()
        link = world.up()
        world.settle(link)
        world.pass_s(10 * IDLE_TIMEOUT_S)
        assert not link.is_closed, "a sequence needs it"
        world.drafters.close(sequence, Keep.NOTHING, 0)
        world.settle(link)
        world.pass_s(IDLE_TIMEOUT_S - 1)
        assert not link.is_closed
        world.pass_s(1.0)
        assert world.links[A].is_closed
        assert world.states[-1] == (A, DrafterState.IDLE)
        assert world.drafters.in_use == []
        assert world.drafters.due_s() is None
        world.sequence("t")
        assert [each.address for each in world.links.opened] == [A, A]

    def test_one_that_owes_an_answer_or_is_owed_a_release_is_not(self, world: World) -> None:
        sequence = world.sequence()
        link = world.up()
        world.drafters.close(sequence, Keep.NOTHING, 0)
        world.pass_s(1.0)
        world.pass_s(10 * IDLE_TIMEOUT_S)
        assert not link.is_closed
        world.settle(link)
        assert released(link) == [("s", pb.KEEP_UNSPECIFIED, 0)]
        world.pass_s(10 * IDLE_TIMEOUT_S)
        assert link.is_closed


def held(world: World) -> list[str]:
    """The sequences whose Close is awaited."""
    return [each.sequence.sequence_id for each in world.drafters._held]


class TestKeeping:
    def test_text_that_ended_by_itself_is_kept_as_the_open_says(self, world: World) -> None:
        kept = world.sequence("kept", pool_id="p", keep=Keep.OUTPUT)
        whole = world.sequence("whole", pool_id="p", keep=Keep.ALL)
        not_kept = world.sequence("not kept", pool_id="p", keep=Keep.NOTHING)
        no_pool = world.sequence("no pool", keep=Keep.ALL)
        cut_off = world.sequence("cut off", pool_id="p", keep=Keep.ALL)
        link = world.up()
        world.settle(link)
        for sequence in (kept, whole, not_kept, no_pool):
            world.drafters.end(sequence, by_itself=True)
        world.drafters.end(cut_off, by_itself=False)
        world.settle(link)
        assert sorted(released(link)) == [
            ("cut off", pb.KEEP_UNSPECIFIED, 0),
            ("kept", pb.KEEP_OUTPUT, 0),
            ("no pool", pb.KEEP_UNSPECIFIED, 0),
            ("not kept", pb.KEEP_UNSPECIFIED, 0),
            ("whole", pb.KEEP_ALL, 0),
        ]

    def ended(self, world: World, name: str = "s", session_id: int = 1) -> FakeLink:
        """A sequence that ended by itself, and whose Close says what is kept."""
        sequence = world.sequence(name, pool_id="p", keep=None, session_id=session_id)
        link = world.links[A] if world.links[A].epoch else world.up()
        world.settle(link)
        world.drafters.end(sequence, by_itself=True)
        world.settle(link)
        assert released(link) == []
        return link

    def test_else_its_close_says_it(self, world: World) -> None:
        link = self.ended(world)
        world.pass_s(29.0)
        world.drafters.close_ended(1, "s", Keep.OUTPUT, 2)
        world.drafters.close_ended(1, "s", Keep.ALL)
        world.settle(link)
        assert released(link) == [("s", pb.KEEP_OUTPUT, 2)], "once"

    def test_another_session_cannot_say_it(self, world: World) -> None:
        link = self.ended(world)
        world.drafters.close_ended(2, "s", Keep.ALL)
        world.drafters.detach(2)
        world.settle(link)
        assert released(link) == []

    @pytest.mark.parametrize("how", ["too late", "session lost", "too many"])
    def test_without_a_close_in_time_nothing_is_kept(
        self, world: World, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(held_module, "_MAX_HELD", 1)
        link = self.ended(world)
        if how == "too late":
            world.pass_s(30.1)
        elif how == "session lost":
            world.drafters.detach(1)
        else:
            other = world.sequence("t", pool_id="p", keep=None)
            world.drafters.end(other, by_itself=True)
        world.drafters.close_ended(1, "s", Keep.ALL)
        world.settle(link)
        assert released(link) == [("s", pb.KEEP_UNSPECIFIED, 0)]

    @pytest.mark.parametrize("how", ["end", "close", "decide"])
    def test_a_text_that_ends_before_its_drafter_is_connected_is_kept(
        self, world: World, how: str
    ) -> None:
        keep = None if how == "decide" else Keep.OUTPUT
        sequence = world.sequence("s", pool_id="p", keep=keep)
        if how == "close":
            world.drafters.close(sequence, Keep.OUTPUT, 0)
        else:
            world.drafters.end(sequence, by_itself=True)
        if how == "decide":
            world.drafters.close_ended(1, "s", Keep.OUTPUT)
        world.pass_s(29.0)
        link = world.up()
        world.settle(link)
        assert released(link) == [("s", pb.KEEP_OUTPUT, 0)]
        assert list(link.sent[0].sequences[0].token_ids) == [1, 2, 3]

    @pytest.mark.parametrize("unit", ["", "_TOKENS"])
    @pytest.mark.parametrize("keep", [Keep.OUTPUT, None])
    def test_no_more_than_so_much_waits_for_all_drafters_together(
        self, world: World, unit: str, keep: Keep, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # One sequence has three tokens.
        for module, limit in ((held_module, "_MAX_HELD"), (drafters_module, "_MAX_WAITING")):
            monkeypatch.setattr(module, limit + unit, 6 if unit else 2)
        for name, address in (("a", A), ("b", B), ("c", A), ("d", B)):
            sequence = world.sequence(name, address, pool_id="p", keep=keep)
            world.drafters.end(sequence, by_itself=True)
        for name in "abcd":
            world.drafters.close_ended(1, name, Keep.OUTPUT)
        links = [world.up(A), world.up(B)]
        for link in links:
            world.settle(link)
        names = [name for link in links for name, _, _ in released(link)]
        # A Close that does not come gives way.
        assert sorted(names) == (["a", "b"] if keep is Keep.OUTPUT else ["c", "d"])
        world.pass_s(0.0)


class TestFaults:
    def test_an_answer_that_is_none_ends_the_stream(self, world: World) -> None:
        world.sequence()
        link = world.up()
        for answer in (b"\xff\xff", b"", pb.ProposeResponse(batch_id=77).SerializeToString()):
            link.answer_bytes(answer)
            assert world.answers[-1] == Answer([], None)
        assert world.faults == [DrafterFault.PROTOCOL_ERROR] * 3
        assert [epoch for epoch, _ in link.failed] == [1, 1, 1]

    def test_a_draft_is_cut_before_its_first_id_outside_the_vocabulary(self, world: World) -> None:
        world.sequence()
        link = world.up()
        link.exchange(
            lambda delta: appended(
                delta, token_ids=[99, VOCAB_SIZE, 1], status=pb.STATUS_OK, source=7
            )
        )
        [(_, hint)] = world.answers[-1].hints
        assert hint.token_ids == [99]
        assert hint.source is None

    def test_our_own_mistake_costs_that_stream_and_no_other(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world.sequence("s", A)
        world.sequence("t", B)
        a, b = world.links[A], world.links[B]
        monkeypatch.setattr(a, "send", lambda *_: 1 / 0)
        a.up()
        b.up()
        world.drafters.flush()
        assert a.failed == [(1, "internal error")]
        assert len(b.sent) == 1
        assert world.faults == [DrafterFault.INTERNAL_ERROR]
