"""The engine and drafters that the test plays: what is asked, used and awaited."""

import operator

import pytest

from tandem.v1 import drafter_pb2 as pb
from tandem.values import DraftWait, Keep
from tests.scripted_model import continue_by, hashed
from tests.verifier.drafters.direct_engine import A, B, Foreteller, Gate, start_direct
from tests.verifier.drafters.scripted_drafter import appended
from tests.verifier.running_engine import StartEngine
from verifier.drafters.drafters import FedDrafter
from verifier.drafts.draft_buffer import HintOutcome
from verifier.drafts.draft_wait import WaitOutcome
from verifier.engine.messages import Decided
from verifier.sampling import Sampling

pytestmark = pytest.mark.stand_in

ADAPTIVE, ALWAYS, NEVER = DraftWait.ADAPTIVE, DraftWait.ALWAYS, DraftWait.NEVER


class TestHints:
    @pytest.mark.parametrize("wait", DraftWait)
    @pytest.mark.parametrize("num_tokens", [0, 1, 3, 100])
    def test_the_output_is_that_of_plain_decoding(
        self, start_engine: StartEngine, wait: DraftWait, num_tokens: int
    ) -> None:
        direct = start_direct(start_engine)
        link = direct.connect()
        link.play(Foreteller(num_tokens))
        sequence_id = direct.open([1, 2, 3], max_new_tokens=40, draft_wait=wait)
        direct.session.wait_end(sequence_id)
        assert direct.session.output(sequence_id) == continue_by(hashed, [1, 2, 3], 40)
        assert (
            bool(direct.running.observer.num_drafts_scheduled) == bool(num_tokens)
            or wait is not ALWAYS
        )

    def test_each_step_uses_the_draft_for_its_length(self, start_engine: StartEngine) -> None:
        direct = start_direct(start_engine)
        link = direct.connect()
        tell = Foreteller(3)
        sequence_id = direct.open(
            [1, 2], max_new_tokens=1 + 4 * 4, draft_wait=ALWAYS, num_speculative_tokens=3
        )
        for length in (3, 7, 11, 15):
            link.hint_for(length, tell)
        direct.session.wait_end(sequence_id)
        decided = direct.session.decided(sequence_id)
        assert [(d.num_draft_tokens, d.num_accepted_tokens) for d in decided] == [
            (0, 0),
            (3, 3),
            (3, 3),
            (3, 3),
            (3, 3),
        ]
        assert direct.running.num_hints == {HintOutcome.USED: 4}

    @pytest.mark.parametrize("num_useless_before", [0, 8])
    def test_one_that_comes_from_a_dead_drafter_asks_at_once(
        self, start_engine: StartEngine, num_useless_before: int
    ) -> None:
        """Also where new sequences expect useless hints, and send their prompts later."""
        direct = start_direct(start_engine, draft_timeout_s=5.0)
        first, second = direct.connect(A), direct.connect(B)
        prior = direct.running.engine._table._useless_hints
        direct.running.engine.call(lambda: setattr(prior, "_mean", num_useless_before))
        second.play(Foreteller(3))
        sequence_id = direct.open([1, 2, 3], A, draft_wait=ALWAYS, max_new_tokens=20)
        direct.session.wait_decided(sequence_id, 1)
        first.receive()
        with direct.running.held():
            first.down()
            direct.session.update(sequence_id, drafter_address=B)
        ended = direct.session.wait_end(sequence_id)
        assert isinstance(ended, Decided), ended
        assert direct.session.output(sequence_id) == continue_by(hashed, [1, 2, 3], 20)
        assert any(each.num_accepted_tokens for each in direct.session.decided(sequence_id))

    def test_a_session_cannot_draft_for_a_sequence_that_has_a_drafter(
        self, start_engine: StartEngine
    ) -> None:
        direct = start_direct(start_engine)
        link = direct.connect()
        session = direct.session
        sequence_id = direct.open([1, 2], max_new_tokens=3, draft_wait=ALWAYS)
        session.wait_decided(sequence_id, 1)
        session.hint(sequence_id, 3, continue_by(hashed, [1, 2], 3)[1:])
        direct.running.sync()
        session.read_all()
        assert len(session.decided(sequence_id)) == 1
        link.hint_for(3)
        session.wait_end(sequence_id)
        assert all(d.num_draft_tokens == 0 for d in session.decided(sequence_id))


class TestAlways:
    """A sequence that steps only with hints goes on without them where none can be expected."""

    def test_it_waits_while_the_drafter_is_being_connected(self, start_engine: StartEngine) -> None:
        direct = start_direct(start_engine)
        sequence_id = direct.open([1, 2], max_new_tokens=4, draft_wait=ALWAYS)
        direct.session.wait_decided(sequence_id, 1)
        direct.running.sync()
        direct.session.read_all()
        assert len(direct.session.decided(sequence_id)) == 1
        link = direct.links[A]
        link.up()
        link.hint_for(3, Foreteller(7))
        direct.session.wait_end(sequence_id)
        assert direct.session.decided(sequence_id)[1].num_accepted_tokens == 2

    @pytest.mark.parametrize("how", ["down", "slow", "refused", "moved"])
    def test_it_goes_on_when_no_hint_can_be_expected(
        self, start_engine: StartEngine, how: str
    ) -> None:
        direct = start_direct(start_engine)
        link = direct.connect()
        sequence_id = direct.open([1, 2], max_new_tokens=10, draft_wait=ALWAYS)
        session = direct.session
        session.wait_decided(sequence_id, 1)
        request = link.receive()
        direct.running.sync()
        session.read_all()
        assert len(session.decided(sequence_id)) == 1, "it waits"
        if how == "down":
            link.down()
        elif how == "slow":
            link.late(is_aside=True)
        elif how == "moved":
            session.update(sequence_id, drafting=False, drafter_address="")
        else:
            link.answer(request, lambda delta: appended(delta, status=pb.STATUS_INVALID))
        session.wait_end(sequence_id)
        assert session.output(sequence_id) == continue_by(hashed, [1, 2], 10)


class TestWaits:
    def test_a_step_waits_for_a_hint_that_pays(self, start_engine: StartEngine) -> None:
        direct = start_direct(start_engine)
        link = direct.connect()
        direct.believe(step_s=30.0, hop_s=0.001)
        with direct.running.held():
            sequence_id = direct.open([1, 2], max_new_tokens=13, draft_wait=ADAPTIVE)
            direct.trust(sequence_id)
        tell = Foreteller(3)
        for length in (3, 7, 11):
            link.hint_for(length, tell)
        direct.session.wait_end(sequence_id)
        assert [d.num_accepted_tokens for d in direct.session.decided(sequence_id)] == [0, 3, 3, 3]
        assert direct.running.observer.waits == [WaitOutcome.PAID] * 3

    def test_after_a_wait_in_vain_none_waits_until_the_drafter_has_answered(
        self, start_engine: StartEngine
    ) -> None:
        gate = Gate()
        direct = start_direct(start_engine, rule=gate)
        link = direct.connect()
        direct.believe(step_s=0.2, hop_s=0.001)
        with direct.running.held():
            sequence_id = direct.open([1, 2], max_new_tokens=30, draft_wait=ADAPTIVE)
            direct.trust(sequence_id)
            gate.close_at(9)
        gate.wait_at(9)
        observer = direct.running.observer
        assert observer.waits == [WaitOutcome.VAIN], "one step waited, six did not"
        # Its answers come: late ones, and one in time for the next step.
        tell = Foreteller(1)
        gate.close_at(12)
        while tell.histories.get(sequence_id, [])[:11] != [1, 2, *continue_by(hashed, [1, 2], 9)]:
            link.exchange(tell)
        gate.wait_at(12)
        assert WaitOutcome.PAID in observer.waits, "it is waited for again"
        gate.open()
        link.down()
        direct.session.wait_end(sequence_id)

    def test_a_drafter_that_hangs_does_not_keep_another_from_being_awaited(
        self, start_engine: StartEngine
    ) -> None:
        direct = start_direct(start_engine)
        direct.connect(A)
        b = direct.connect(B)
        direct.believe(step_s=0.4, hop_s=0.001)
        with direct.running.held():
            hanging = direct.open([1, 2], A, max_new_tokens=2, draft_wait=ADAPTIVE)
            direct.trust(hanging)
        direct.session.wait_end(hanging)
        with direct.running.held():
            hanging = direct.open([1, 2], A, max_new_tokens=60, draft_wait=ADAPTIVE)
            direct.trust(hanging)
        # The first wait for A is in vain.
        while WaitOutcome.VAIN not in direct.running.observer.waits:
            direct.session.read()
        direct.believe(step_s=30.0, hop_s=0.001)
        with direct.running.held():
            sequence_id = direct.open([1, 2], B, max_new_tokens=9, draft_wait=ADAPTIVE)
            direct.trust(sequence_id)
        tell = Foreteller(3)
        for length in (3, 7):
            b.hint_for(length, tell)
        direct.session.wait_end(sequence_id)
        assert [d.num_accepted_tokens for d in direct.session.decided(sequence_id)] == [0, 3, 3]
        direct.session.wait_end(hanging)
        assert direct.running.observer.waits.count(WaitOutcome.VAIN) == 1


class TestEndedTexts:
    @pytest.mark.parametrize("keep", [Keep.OUTPUT, None])
    @pytest.mark.parametrize("how", ["end", "close"])
    def test_a_text_that_waits_for_its_drafter_keeps_its_tokens_alone(
        self, start_engine: StartEngine, keep: Keep, how: str
    ) -> None:
        """Counts of tokens and a grammar's masks are some MiB; what waits is bounded in tokens."""
        gate = Gate()
        direct = start_direct(start_engine, rule=gate)
        gate.close_at(5)
        sequence_id = direct.open(
            [1, 2, 3], pool_id="p", keep=keep, sampling=Sampling(presence_penalty=1.0)
        )
        gate.wait_at(5)
        sequence = direct.running.engine._table.find(direct.session.session_id, sequence_id)
        assert sequence is not None
        adjusting = operator.attrgetter("adjustments", "grammar")
        assert adjusting(sequence) != (None, None)
        if how == "close":
            direct.session.close(sequence_id, keep=Keep.OUTPUT)
        gate.open()
        direct.session.wait_end(sequence_id)
        direct.running.sync()
        [drafter] = direct.running.engine._drafters.in_use
        assert isinstance(drafter, FedDrafter)
        assert drafter.feed.histories.by_id[sequence_id].sequence is sequence
        assert adjusting(sequence) == (None, None)
