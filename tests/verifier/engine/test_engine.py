"""The engine thread with a scripted model: decisions, events, waits and freed blocks.

After each test the harness closes everything, and checks that nothing is left over, that the
engine's invariants hold, and that every sequence's events keep the contract.
"""

import random
import threading

import pytest

from tandem.values import DraftWait, FinishReason
from tests.scripted_model import continue_by, follow, hashed
from tests.verifier.drafters.feeding import drafted_by
from tests.verifier.running_engine import (
    PATIENCE_S,
    EngineSession,
    StartEngine,
    start_engine_with,
)
from verifier.engine.messages import Decided, Opened, Rejected
from verifier.errors import IdleError, InvalidRequestError, ModelOutputError, OverloadedError
from verifier.sampling import Sampling

pytestmark = pytest.mark.stand_in

ALWAYS, ADAPTIVE, NEVER = DraftWait.ALWAYS, DraftWait.ADAPTIVE, DraftWait.NEVER
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]


class TestPlainDecoding:
    def test_decides_a_token_per_step_until_the_length_limit(
        self, start_engine: StartEngine
    ) -> None:
        session = start_engine().attach()
        prompt = [1, 2, 3]
        sequence_id = session.open(prompt, max_new_tokens=5)
        end = session.wait_end(sequence_id)
        assert isinstance(end, Decided)
        assert end.finish_reason is FinishReason.LENGTH
        assert isinstance(session.of(sequence_id)[0], Opened)
        assert session.output(sequence_id) == continue_by(hashed, prompt, 5)
        assert [d.base_length for d in session.decided(sequence_id)] == [3, 4, 5, 6, 7]

    def test_a_chunk_that_does_not_end_its_prompt_is_not_sampled(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine(max_num_batched_tokens=8)
        session = running.attach()
        sequence_id = session.open([2] * 20, max_new_tokens=2, sampling=Sampling(logprobs=1))
        session.wait_end(sequence_id)
        running.sync()
        assert session.output(sequence_id) == continue_by(hashed, [2] * 20, 2)
        reported = [
            (step.layout.num_rows, len(step.verdict.logprobs)) for step in running.observer.steps
        ]
        assert reported == [(0, 0), (0, 0), (1, 1), (1, 1)]

    def test_continues_output_that_is_given_with_the_prompt(
        self, start_engine: StartEngine
    ) -> None:
        session = start_engine(rule=follow(TEXT)).attach()
        sequence_id = session.open(TEXT[:9], prompt_length=4, max_new_tokens=8)
        session.wait_end(sequence_id)
        assert session.output(sequence_id) == TEXT[9:12], "5 of the 8 were there already"

    def test_ends_at_the_models_limit(self, start_engine: StartEngine) -> None:
        session = start_engine(max_model_len=12).attach()
        sequence_id = session.open([1] * 10, max_new_tokens=100)
        assert session.wait_end(sequence_id).finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]
        assert len(session.output(sequence_id)) == 2


class TestDrafts:
    def test_the_first_wrong_draft_is_replaced_and_ends_the_step(
        self, start_engine: StartEngine
    ) -> None:
        session = start_engine(rule=follow(TEXT)).attach()
        sequence_id = session.open(TEXT[:4], max_new_tokens=20, draft_wait=ALWAYS)
        session.wait_decided(sequence_id, 1)
        session.hint(sequence_id, 5, [*TEXT[5:7], 15, *TEXT[8:10]])
        decided = session.wait_decided(sequence_id, 2)
        assert decided.token_ids == TEXT[5:8]
        assert (decided.num_draft_tokens, decided.num_accepted_tokens) == (5, 2)

    def test_requests_hints_for_the_next_steps(self, start_engine: StartEngine) -> None:
        session = start_engine(rule=follow(TEXT)).attach()
        wanted = {}
        for limit in (0, 2, 7):
            sequence_id = session.open(TEXT[:4], max_new_tokens=20, num_speculative_tokens=limit)
            session.wait_end(sequence_id)
            wanted[limit] = [d.num_wanted_draft_tokens for d in session.decided(sequence_id)]
        assert wanted[0] == [0] * 20
        assert wanted[2] == [8] * 11 + [7, 6, 5, 4, 3, 2, 1, 0, 0]
        assert wanted[7] == [18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]

    @pytest.mark.parametrize(("is_indexing", "num_useless"), [(False, 7), (True, 0)])
    def test_empty_hints_of_an_indexing_drafter_are_not_counted(
        self, is_indexing: bool, num_useless: int, start_engine: StartEngine
    ) -> None:
        running = start_engine(rule=follow(TEXT))
        session = running.attach()
        sequence_id = session.open(TEXT[:4], max_new_tokens=12, draft_wait=ALWAYS)
        for length in range(5, 12):
            session.wait_decided(sequence_id, length - 4)
            session.hint(sequence_id, length, [], is_indexing=is_indexing)
        session.wait_decided(sequence_id, 8)
        sequence = running.engine._table.find(session.session_id, sequence_id)
        assert sequence is not None
        assert sequence.hint_record.num_useless_hints == num_useless


class TestStopTokens:
    @pytest.mark.parametrize(
        ("stop", "token_ids", "num_accepted", "num_drafts"),
        [
            pytest.param(9, TEXT[5:6], 0, 0, id="the first draft"),
            pytest.param(6, TEXT[5:8], 2, 2, id="amid the right drafts"),
            pytest.param(3, TEXT[5:10], 4, 4, id="the last right draft"),
            pytest.param(8, TEXT[5:12], 6, 7, id="the recovered token"),
        ],
    )
    def test_a_stop_token_among_the_drafts_ends_them_and_the_output(
        self,
        start_engine: StartEngine,
        stop: int,
        token_ids: list[int],
        num_accepted: int,
        num_drafts: int,
    ) -> None:
        running = start_engine(rule=follow(TEXT))
        session = running.attach()
        sequence_id = session.open(
            TEXT[:4], max_new_tokens=20, draft_wait=ALWAYS, stop_token_ids=frozenset({stop, 14})
        )
        session.wait_decided(sequence_id, 1)
        session.hint(sequence_id, 5, [*TEXT[5:11], 0])
        decided = session.wait_decided(sequence_id, 2)
        assert decided.token_ids == token_ids
        assert (decided.num_draft_tokens, decided.num_accepted_tokens) == (num_drafts, num_accepted)
        assert decided.finish_reason is FinishReason.STOP
        assert decided.num_wanted_draft_tokens == 0

    def test_a_stop_token_in_the_prompt_or_in_wrong_drafts_stops_nothing(
        self, start_engine: StartEngine
    ) -> None:
        session = start_engine(rule=follow(TEXT)).attach()
        stops = frozenset({3, 15})
        sequence_id = session.open(
            TEXT[:4], max_new_tokens=3, draft_wait=ALWAYS, stop_token_ids=stops
        )
        session.wait_decided(sequence_id, 1)
        session.hint(sequence_id, 5, [15, 15])
        assert session.wait_decided(sequence_id, 2).token_ids == TEXT[5:6]
        assert session.wait_end(sequence_id).finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]

    def test_a_stop_token_at_the_length_limit_is_a_stop(self, start_engine: StartEngine) -> None:
        session = start_engine(rule=follow(TEXT)).attach()
        sequence_id = session.open(TEXT[:4], max_new_tokens=2, stop_token_ids=frozenset({9}))
        assert session.wait_end(sequence_id).finish_reason is FinishReason.STOP  # type: ignore[union-attr]


class TestEnds:
    def test_close_cancels_a_running_sequence_with_no_tokens(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine()
        session = running.attach()
        sequence_id = session.open([1, 2], max_new_tokens=100, draft_wait=ALWAYS)
        session.wait_decided(sequence_id, 1)
        session.close(sequence_id)
        end = session.wait_end(sequence_id)
        assert isinstance(end, Decided)
        assert (end.finish_reason, end.token_ids) == (FinishReason.CANCELLED, [])
        assert end.base_length == 3
        running.sync()
        assert running.engine.load.num_kv_blocks_used == 0

    def test_closing_again_or_an_unknown_or_anothers_sequence_does_nothing(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine()
        session, other = running.attach(), running.attach()
        sequence_id = session.open([1], max_new_tokens=100, draft_wait=ALWAYS)
        session.wait_decided(sequence_id, 1)
        other.close(sequence_id)
        running.sync()
        session.read_all()
        assert len(session.of(sequence_id)) == 2, "another session closed it"
        session.close(sequence_id)
        session.close(sequence_id)
        session.close("nobody")
        running.sync()
        session.read_all()
        assert len(session.of(sequence_id)) == 3

    def test_detach_frees_running_and_waiting_without_events(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine(max_num_seqs=2)
        session, other = running.attach(), running.attach()
        for _ in range(4):
            session.open([1] * 9, max_new_tokens=100, draft_wait=ALWAYS)
        theirs = other.open([2], max_new_tokens=5)
        session.read()
        session.detach()
        other.wait_end(theirs)
        running.sync()
        assert running.engine.load.num_kv_blocks_used == 0
        session.read_all()
        num_events = len(session.events)
        session.open([1])
        running.sync()
        session.read_all()
        assert len(session.events) == num_events, "an event after the detach"

    def test_nan_logits_fail_one_sequence_alone(self, start_engine: StartEngine) -> None:
        running = start_engine(rule=lambda known: None if 7 in known else hashed(known))
        session = running.attach()
        with running.held():
            healthy = session.open([1, 2], max_new_tokens=20)
            broken = session.open([1, 7], max_new_tokens=20)
            also_healthy = session.open([2, 2], max_new_tokens=20)
        end = session.wait_end(broken)
        assert isinstance(end, Rejected)
        assert isinstance(end.error, ModelOutputError)
        for sequence_id, prompt in ((healthy, [1, 2]), (also_healthy, [2, 2])):
            session.wait_end(sequence_id)
            assert session.output(sequence_id) == continue_by(hashed, prompt, 20)

    def test_a_failing_model_ends_the_thread_with_its_error(self) -> None:
        def fail(known: list[int]) -> int:
            raise RuntimeError("out of memory")

        running = start_engine_with(rule=fail)
        running.attach().open([1])
        with pytest.raises(RuntimeError, match="out of memory"):
            running.engine.stopped.result(PATIENCE_S)


class TestAlwaysWaiting:
    def test_waits_for_the_hint_of_the_current_length_though_tokens_are_buffered(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine(rule=follow(TEXT))
        session = running.attach()
        sequence_id = session.open(
            TEXT[:4], max_new_tokens=20, draft_wait=ALWAYS, num_speculative_tokens=2
        )
        session.wait_decided(sequence_id, 1)
        session.hint(sequence_id, 5, TEXT[5:15])
        session.wait_decided(sequence_id, 2)
        other = session.open(TEXT[:4], max_new_tokens=15)
        session.wait_end(other)
        assert len(session.decided(sequence_id)) == 2, "it did not wait"
        session.hint(sequence_id, 7, TEXT[7:10])  # for an earlier length
        session.hint(sequence_id, 9, TEXT[9:10])  # for a later length
        running.sync()
        session.read_all()
        assert len(session.decided(sequence_id)) == 2
        session.hint(sequence_id, 8, TEXT[8:9])
        decided = session.wait_decided(sequence_id, 3)
        assert (decided.base_length, decided.num_draft_tokens) == (8, 1)

    def test_an_empty_hint_ends_the_wait(self, start_engine: StartEngine) -> None:
        session = start_engine().attach()
        sequence_id = session.open([1], max_new_tokens=20, draft_wait=ALWAYS)
        for count in range(1, 19):
            session.wait_decided(sequence_id, count)
            session.hint(sequence_id, count + 1, [])
        assert session.wait_decided(sequence_id, 19).num_draft_tokens == 0

    def test_times_out_while_others_decode(self, start_engine: StartEngine) -> None:
        session = start_engine(draft_timeout_s=0.05, max_model_len=10_000, num_blocks=4000).attach()
        with_hints = session.open([1], max_new_tokens=5000)
        without = session.open([1], max_new_tokens=20, draft_wait=ALWAYS)
        end = session.wait_end(without)
        assert isinstance(end, Rejected)
        assert isinstance(end.error, IdleError)
        assert "0.05 s" in end.error.message
        session.close(with_hints)
        assert isinstance(session.wait_end(with_hints), Decided)

    def test_may_wait_for_longer_than_a_clock_can_count(self, start_engine: StartEngine) -> None:
        running = start_engine(draft_timeout_s=1e12)
        session = running.attach()
        sequence_id = session.open([1], max_new_tokens=3, draft_wait=ALWAYS)
        for count in (1, 2):
            decided = session.wait_decided(sequence_id, count)
            running.sync()
            session.hint(sequence_id, decided.base_length + len(decided.token_ids), [])
        assert isinstance(session.wait_end(sequence_id), Decided)

    def test_an_update_that_drafts_will_come_makes_it_wait(self, start_engine: StartEngine) -> None:
        reached, goes_on = threading.Event(), threading.Event()

        def gated(known: list[int]) -> int:
            if len(known) == 7:
                reached.set()
                goes_on.wait(PATIENCE_S)
            return TEXT[len(known)]

        running = start_engine(rule=gated)
        session = running.attach()
        sequence_id = session.open(TEXT[:4], max_new_tokens=20, draft_wait=ALWAYS, drafting=False)
        assert reached.wait(PATIENCE_S)
        # Both are handled together: the draft must not be lost.
        session.update(sequence_id, drafting=True)
        session.hint(sequence_id, 8, TEXT[8:10])
        goes_on.set()
        decided = session.wait_decided(sequence_id, 5)
        assert (decided.base_length, decided.num_draft_tokens) == (8, 2)
        running.sync()
        session.read_all()
        assert len(session.decided(sequence_id)) == 5, "it does not wait for the next"


class TestAdmission:
    def test_the_waiting_queue_is_bounded(self, start_engine: StartEngine) -> None:
        running = start_engine(max_num_seqs=1, max_num_waiting=2)
        session = running.attach()
        opened = [session.open([1], max_new_tokens=20, draft_wait=ALWAYS) for _ in range(4)]
        end = session.wait_end(opened[3])
        assert isinstance(end, Rejected)
        assert isinstance(end.error, OverloadedError)
        assert end.error.retry_after_ms
        session.close(opened[0])
        session.wait_end(opened[0])
        again = session.open([1], max_new_tokens=1)
        session.close(opened[1])
        session.close(opened[2])
        assert isinstance(session.wait_end(again), Decided)

    def test_a_full_queue_has_room_for_tenants_with_less_than_their_share(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine(max_num_seqs=1, max_num_waiting=4)
        session = running.attach()

        def open_one(salt: str) -> str:
            return session.open([1], max_new_tokens=20, draft_wait=ALWAYS, cache_salt=salt)

        with running.held():
            # The first one runs. Of the queue of 4, b has half beside a, and c a third.
            opened = [open_one(salt) for salt in "aaaaaabbbcc"]
        for index in (5, 8, 10):
            end = session.wait_end(opened[index])
            assert isinstance(end, Rejected)
            assert isinstance(end.error, OverloadedError)
        assert running.engine.load.num_waiting == 7

    def test_the_waiting_queue_is_bounded_in_tokens(self, start_engine: StartEngine) -> None:
        running = start_engine(max_num_seqs=1, max_waiting_tokens=100)
        session = running.attach()
        with running.held():
            runs = session.open([1] * 150, max_new_tokens=20)
            alone = session.open([1] * 150, max_new_tokens=2)
            refused = session.open([1], max_new_tokens=2)
        end = session.wait_end(refused)
        assert isinstance(end, Rejected)
        assert isinstance(end.error, OverloadedError)
        assert end.error.retry_after_ms
        for sequence_id in (runs, alone):
            assert isinstance(session.wait_end(sequence_id), Decided)
        with running.held():
            taken = [session.open([1] * 50, max_new_tokens=2) for _ in range(3)]
        ends = [session.wait_end(sequence_id) for sequence_id in taken]
        assert all(isinstance(end, Decided) for end in ends)

    def test_predictions_count_where_the_waiting_queue_is_bounded(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine(max_num_seqs=1, max_waiting_tokens=100)
        session = running.attach()
        predicting = drafted_by("", predicted=(1,) * 60)
        with running.held():
            opened = [session.open([1], max_new_tokens=2, drafted_by=predicting) for _ in range(3)]
        ends = [session.wait_end(sequence_id) for sequence_id in opened]
        assert [type(end) for end in ends] == [Decided, Decided, Rejected]

    def test_a_sequence_that_goes_on_finds_room_where_new_ones_do_not(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine(max_num_seqs=1, max_num_waiting=1)
        session = running.attach()
        with running.held():
            taken = [session.open([1], max_new_tokens=3) for _ in range(2)]
            new = session.open([1], max_new_tokens=3)
            taken.append(session.open([1, 2], prompt_length=1, max_new_tokens=3))
            one_more = session.open([1, 2], prompt_length=1, max_new_tokens=3)
        for sequence_id in (new, one_more):
            assert isinstance(session.wait_end(sequence_id), Rejected)
        for sequence_id in taken:
            assert isinstance(session.wait_end(sequence_id), Decided)

    def test_an_id_that_is_open_is_refused_and_the_open_one_goes_on(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine()
        session, other = running.attach(), running.attach()
        session.open([1], sequence_id="x", max_new_tokens=5, draft_wait=ALWAYS)
        session.wait_decided("x", 1)
        session.open([2], sequence_id="x")
        other.open([2], sequence_id="x", max_new_tokens=3)
        assert isinstance(other.wait_end("x"), Decided), "ids are each session's own"
        running.sync()
        session.read_all()
        rejected = [event for event in session.of("x") if isinstance(event, Rejected)]
        assert [type(event.error) for event in rejected] == [InvalidRequestError]
        assert rejected[0].error.field == "sequence_id"
        session.hint("x", 2, [])
        assert session.wait_decided("x", 2).base_length == 2
        session.events = [event for event in session.events if event not in rejected]

    def test_an_id_is_free_again_after_its_end(self, start_engine: StartEngine) -> None:
        session = start_engine().attach()
        session.open([1], sequence_id="x", max_new_tokens=1)
        session.wait_end("x")
        session.events.clear()
        session.open([2], sequence_id="x", max_new_tokens=1)
        assert isinstance(session.wait_end("x"), Decided)


class TestReporting:
    def test_all_events_of_a_step_come_in_one_batch_per_session(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine()
        session, other = running.attach(), running.attach()
        with running.held():
            first, second = (session.open([1], max_new_tokens=4) for _ in range(2))
            third = other.open([1], max_new_tokens=4)
        # Before the step, and after it.
        for _ in range(2):
            session.read()
            other.read()
        assert [type(event) for event in session.events] == [Opened, Opened, Decided, Decided]
        assert [event.sequence_id for event in session.events] == [first, second] * 2
        assert {event.sequence_id for event in other.events} == {third}
        assert session.steps == other.steps
        before, step = session.steps
        assert before is None
        assert step is not None
        assert (step.step_id, step.num_sequences, step.num_scheduled_tokens) == (1, 3, 3)
        assert (step.num_running, step.num_waiting, step.num_kv_blocks_used) == (3, 0, 3)

    def test_a_step_with_a_prompt_says_nothing_of_how_long_others_take(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine()
        session = running.attach()
        session.wait_end(session.open([1] * 20, max_new_tokens=1))
        assert running.engine.load.num_steps == 1
        assert running.engine.load.step_duration_s == 0.0
        session.wait_end(session.open([1] * 20, max_new_tokens=2))
        assert running.engine.load.step_duration_s > 0.0

    def test_the_hop_is_measured_from_decision_to_hint(self, start_engine: StartEngine) -> None:
        running = start_engine()
        session = running.attach()
        sequence_id = session.open([1], max_new_tokens=20, draft_wait=ALWAYS)
        session.wait_decided(sequence_id, 1)
        session.hint(sequence_id, 1, [])  # for a length that was never published
        session.hint(sequence_id, 2, [])
        session.wait_decided(sequence_id, 2)
        session.hint(sequence_id, 2, [0])  # a second hint for the same length
        running.sync()
        [hop_s] = running.observer.hops_s
        assert 0 < hop_s < PATIENCE_S

    def test_when_idle_resolves_when_the_last_sequence_has_ended(
        self, start_engine: StartEngine
    ) -> None:
        running = start_engine()
        assert running.engine.when_idle().result(PATIENCE_S) is None
        session = running.attach()
        sequence_id = session.open([1], max_new_tokens=20, draft_wait=ALWAYS)
        session.wait_decided(sequence_id, 1)
        idle = running.engine.when_idle()
        running.sync()
        assert not idle.done()
        session.close(sequence_id)
        assert idle.result(PATIENCE_S) is None
        session.read_all()
        assert session.wait_end(sequence_id), "idle before the last event"

    def test_a_failing_call_fails_its_caller_alone(self, start_engine: StartEngine) -> None:
        running = start_engine()
        with pytest.raises(ZeroDivisionError):
            running.engine.call(lambda: 1 // 0).result(PATIENCE_S)
        session = running.attach()
        assert isinstance(session.wait_end(session.open([1])), Decided)


def test_commands_without_end_do_not_keep_the_engine_from_its_steps(
    start_engine: StartEngine,
) -> None:
    running = start_engine()
    has_ended = threading.Event()

    def call_again() -> None:
        if not has_ended.wait(0.0001):
            running.engine.call(call_again)

    session = running.attach()
    sequence_id = session.open([1])
    for _ in range(3):
        running.engine.call(call_again)
    session.read(timeout_s=20)
    has_ended.set()
    assert isinstance(session.wait_end(sequence_id), Decided)


def test_random_commands_break_no_invariant(start_engine: StartEngine) -> None:
    """Random opens, hints, updates, closes and detached sessions in a small pool."""
    running = start_engine(num_blocks=20, max_num_seqs=4, max_num_waiting=6,
                           max_num_batched_tokens=12, draft_timeout_s=0.02)  # fmt: skip
    draw = random.Random(8)
    sessions = [running.attach() for _ in range(3)]
    prompts: dict[str, list[int]] = {}
    owners: dict[str, EngineSession] = {}
    for i in range(600):
        session = draw.choice(sessions)
        action = draw.randrange(10)
        known = [s for s, owner in owners.items() if owner is session]
        if action <= 2 or not known:
            prompt = [draw.randrange(3) for _ in range(draw.randint(1, 30))]
            sequence_id = session.open(
                prompt, max_new_tokens=draw.randint(1, 40), draft_wait=draw.choice(list(DraftWait))
            )
            prompts[sequence_id], owners[sequence_id] = prompt, session
        elif action <= 6:
            sequence_id = draw.choice(known)
            session.read_all()
            length = len(prompts[sequence_id]) + len(session.output(sequence_id))
            base_length = max(0, length - draw.randrange(-1, 4))
            session.hint(sequence_id, base_length, [draw.randrange(3) for _ in range(9)])
        elif action == 7:
            session.close(draw.choice(known))
        elif action == 8:
            session.update(draw.choice(known), drafting=draw.random() < 0.5)
        elif draw.random() < 0.1:
            session.detach()
            sessions[sessions.index(session)] = running.attach()
        if i % 20 == 0:
            running.sync()
    for session in running.sessions:
        session.read_all()
        for sequence_id in {event.sequence_id for event in session.events}:
            output = session.output(sequence_id)
            assert output == continue_by(hashed, prompts[sequence_id], len(output))
    assert running.observer.num_drafts_scheduled > 0
