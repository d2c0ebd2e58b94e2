"""A drafter is sent every token once, in order, and lost tokens again."""

import pytest

from tandem.values import Keep
from tests.verifier.drafters.feeding import (
    answer,
    check_invariants,
    drafted_by,
    exchange,
    fed_sequence,
    feed_of,
    hint_of,
    next_batch,
    step,
)
from verifier.drafters.backlog_budget import BURST_TOKENS, TOKENS_PER_S
from verifier.drafters.batches import (
    DrafterProtocolError,
    ProposalStatus,
    Release,
)

pytestmark = pytest.mark.usefixtures("releases_at_once")

OUT_OF_SYNC = ProposalStatus.OUT_OF_SYNC
POOL = {"pool_id": "0:/shared"}


class TestTokens:
    def test_the_prompt_is_sent_at_once_and_requests_no_draft(self) -> None:
        sequence = fed_sequence([1, 2, 3])
        feed = feed_of(sequence)
        batch, hints = exchange(feed)
        (delta,) = batch.deltas
        assert (delta.base_length, delta.token_ids, delta.max_draft_tokens) == (0, [1, 2, 3], 0)
        assert (delta.prompt_length, delta.max_length) == (3, 10_003)
        assert delta.encoded_params == drafted_by().encoded_params
        assert hints == []
        assert feed.next_batch(0.0) is None

    def test_new_tokens_request_what_the_engine_wants_up_to_hint_tokens(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence, hint_tokens=24)
        exchange(feed)
        for wanted, asked in ((28, 24), (5, 5)):
            step(feed, sequence, 4, 5, wanted=wanted)
            batch, hints = exchange(feed, draft=(9, 9))
            assert batch.deltas[0].max_draft_tokens == asked
            assert hints == [hint_of(sequence, 9, 9)]
        feed = feed_of(sequence)
        sequence.num_wanted_draft_tokens = 124
        assert next_batch(feed).deltas[0].max_draft_tokens == 124, "no limit of the request's own"

    def test_a_sequence_that_can_use_no_draft_costs_no_message_until_it_can(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence)
        exchange(feed)
        step(feed, sequence, 4, wanted=0)
        assert feed.next_batch(0.0) is None
        step(feed, sequence, 5)
        batch, _ = exchange(feed)
        assert batch.deltas[0].token_ids == [4, 5]
        assert batch.deltas[0].max_draft_tokens == 24

    def test_an_id_that_was_released_may_be_used_again_before_the_release_is_sent(self) -> None:
        feed = feed_of(fed_sequence([1, 2]))
        exchange(feed)
        feed.histories.remove("sequence")
        again = fed_sequence([7, 8, 9])
        assert feed.histories.add(again, drafted_by())
        batch, _ = exchange(feed)
        # Its first delta creates it anew: a release after that would forget the new one.
        assert batch.releases == []
        assert batch.deltas[0].token_ids == [7, 8, 9]
        assert batch.deltas[0].encoded_params is not None
        assert feed.next_batch(0.0) is None

    def test_answers_to_an_ended_sequence_are_not_given_to_its_namesake(self) -> None:
        feed = feed_of(fed_sequence([1, 2]))
        old = next_batch(feed)
        feed.histories.remove("sequence")
        again = fed_sequence([7, 8])
        again.num_wanted_draft_tokens = 4
        feed.histories.add(again, drafted_by())
        new = next_batch(feed)
        assert feed.on_proposals(old.batch_id, [answer(old.deltas[0], draft=(5,))]).hints == []
        result = feed.on_proposals(new.batch_id, [answer(new.deltas[0], draft=(6,))])
        assert result.hints == [hint_of(again, 6)]


class TestHints:
    def test_the_hint_of_a_drafter_that_is_indexing_says_so(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence)
        exchange(feed)
        step(feed, sequence, 4)
        _, hints = exchange(feed, status=ProposalStatus.INDEXING)
        assert hints == [hint_of(sequence, is_indexing=True)]

    def test_a_draft_that_is_too_long_is_cut(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence, hint_tokens=3)
        step(feed, sequence, 4)
        assert exchange(feed, draft=(1, 2, 3, 4, 5))[1] == [hint_of(sequence, 1, 2, 3)]

    @pytest.mark.parametrize("kind", ["batch", "unasked"])
    def test_an_answer_that_does_not_fit_its_batch_is_refused(self, kind: str) -> None:
        feed = feed_of(fed_sequence())
        batch = next_batch(feed)
        proposals = [answer(batch.deltas[0])]
        if kind == "unasked":
            feed.on_proposals(batch.batch_id, proposals)
        with pytest.raises(DrafterProtocolError):
            feed.on_proposals(batch.batch_id + (kind == "batch"), proposals)

    @pytest.mark.parametrize(
        "lie",
        [
            {"sequence_id": "other"},
            {"base_length": 5},
            {"base_length": 3},
            {"base_length": 2**32 - 1},
            {"status": ProposalStatus.UNSPECIFIED},
        ],
        ids=str,
    )
    def test_an_invalid_proposal_is_ignored_alone(self, lie: dict[str, object]) -> None:
        bad, good = fed_sequence(name="bad"), fed_sequence(name="good")
        feed = feed_of(bad, good)
        exchange(feed)
        for sequence in (bad, good):
            step(feed, sequence, 4)
        batch = next_batch(feed)
        first, second = (answer(delta, draft=(9,)) for delta in batch.deltas)
        result = feed.on_proposals(batch.batch_id, [first._replace(**lie), second])  # type: ignore[arg-type]
        assert result.hints == [hint_of(bad), hint_of(good, 9)]
        assert len(result.mistakes) == 1
        assert not result.given_up

    def test_only_live_batches_say_when_they_were_made(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence)
        prompt = next_batch(feed, 1.0)
        assert feed.on_proposals(prompt.batch_id, [answer(prompt.deltas[0])]).sent_s is None
        step(feed, sequence, 4)
        live = next_batch(feed, 3.0)
        assert feed.on_proposals(live.batch_id, [answer(live.deltas[0])]).sent_s == 3.0
        feed.histories.remove("sequence")
        release = next_batch(feed, 4.0)
        assert feed.on_proposals(release.batch_id, []).sent_s is None


class TestLoss:
    def test_a_drafter_that_claims_to_know_more_than_it_was_sent_is_not_believed(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence)
        exchange(feed)
        step(feed, sequence, 4)
        exchange(feed, status=OUT_OF_SYNC, known=1_000_000)
        step(feed, sequence, 5)
        check_invariants(feed)
        assert next_batch(feed).deltas[0].token_ids == [5]

    def test_outdated_answers_do_not_rewind_again(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence)
        exchange(feed)
        batches = []
        for token_id in (4, 5, 6):
            step(feed, sequence, token_id)
            batches.append(next_batch(feed))
        lost = [answer(batches[0].deltas[0], OUT_OF_SYNC, known=1)]
        feed.on_proposals(batches[0].batch_id, lost)
        assert next_batch(feed).deltas[0].base_length == 1
        for batch in batches[1:]:  # their deltas left a gap, of course
            feed.on_proposals(batch.batch_id, [answer(batch.deltas[0], OUT_OF_SYNC, known=1)])
        assert feed.next_batch(0.0) is None

    def test_a_sequence_that_the_drafter_keeps_losing_is_given_up(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence)
        sequence.num_wanted_draft_tokens = 24
        for _ in range(9):
            batch = next_batch(feed)
            result = feed.on_proposals(batch.batch_id, [answer(batch.deltas[0], OUT_OF_SYNC)])
        last = next_batch(feed)
        assert (last.deltas, last.releases) == ([], [Release("sequence", Keep.NOTHING, 0)])
        assert result.given_up == [(sequence, "the drafter lost the sequence 9 times")]
        assert result.hints == [hint_of(sequence)]

    def test_an_invalid_sequence_is_given_up_and_the_others_are_not(self) -> None:
        bad, good = fed_sequence(name="bad"), fed_sequence(name="good")
        feed = feed_of(bad, good)
        batch = next_batch(feed)
        first, second = batch.deltas
        proposals = [answer(first, ProposalStatus.INVALID), answer(second)]
        assert feed.on_proposals(batch.batch_id, proposals).given_up == [(bad, "why")]
        assert feed.histories.sequences == [good]


class TestEnds:
    def test_an_id_may_be_used_again_while_no_drafter_has_the_ended_text(self) -> None:
        feed = feed_of(fed_sequence(), **POOL)
        feed.histories.remove("sequence", keep=Keep.ALL)
        assert feed.histories.add(fed_sequence([7, 8]), drafted_by())
        assert feed.histories.num_waiting == 0
        assert exchange(feed)[0].deltas[0].token_ids == [7, 8]


class TestPace:
    def test_urgent_drafts_are_requested_before_prompts_in_separate_messages(self) -> None:
        quick = fed_sequence(name="quick")
        feed = feed_of(quick)
        exchange(feed)
        feed.histories.add(fed_sequence(list(range(9000)), name="long"), drafted_by())
        step(feed, quick, 4)
        order = []
        while (batch := feed.next_batch(0.0)) is not None:
            order.append([delta.sequence_id for delta in batch.deltas])
        assert order == [["quick"], ["long"], ["long"]]

    def test_a_slow_drafter_gets_fewer_batches_and_not_more_memory(self) -> None:
        sequence = fed_sequence()
        feed = feed_of(sequence)
        batches = []
        for token_id in range(100):
            step(feed, sequence, token_id)
            if (batch := feed.next_batch(0.0)) is not None:
                batches.append(batch)
        assert len(batches) == 8
        feed.on_proposals(batches[0].batch_id, [answer(batches[0].deltas[0])])
        assert len(next_batch(feed).deltas[0].token_ids) == 92

    def test_a_replay_is_paced_and_does_not_delay_other_sequences(self) -> None:
        quick = fed_sequence(name="quick")
        long = [fed_sequence([1] * 100_000, name=f"long {i}") for i in range(4)]
        feed = feed_of(quick, *long)
        exchange(feed)
        feed.restart()
        in_flight = []
        order: list[str] = []
        num_replayed = 0
        for index in range(2000):
            step(feed, quick, 4)
            for sequence in long if index < 3 else ():
                step(feed, sequence, 5)
            while (batch := feed.next_batch(float(index))) is not None:
                in_flight.append(batch)
                num_replayed += sum(
                    len(delta.token_ids) for delta in batch.deltas if delta.sequence_id != "quick"
                )
                order.append("quick" if batch.deltas[0].sequence_id == "quick" else "long")
            replayed = [batch for batch in in_flight if batch.deltas[0].sequence_id != "quick"]
            assert len(replayed) <= 2
            if index % 4 == 0:  # the drafter is slower than the steps
                batch = in_flight.pop(0)
                feed.on_proposals(batch.batch_id, [answer(delta) for delta in batch.deltas])
        assert order[0] == "quick"
        # Every token was replayed once: replays cause no further replays.
        assert num_replayed == sum(len(sequence.token_ids) for sequence in long)

    def test_prompts_and_replays_have_a_budget_of_tokens_per_second(self) -> None:
        feed = feed_of(*(fed_sequence([1] * 50_000, name=str(i)) for i in range(4)))

        def sent_by(now_s: float) -> int:
            num_tokens = 0
            while (batch := feed.next_batch(now_s)) is not None:
                num_tokens += sum(len(delta.token_ids) for delta in batch.deltas)
                feed.on_proposals(batch.batch_id, [answer(delta) for delta in batch.deltas])
            return num_tokens

        assert sent_by(100.0) == BURST_TOKENS
        due_s = feed.due_s(100.0)
        assert due_s is not None
        assert due_s > 0
        assert sent_by(100.0 + due_s / 2) == 0
        assert sent_by(100.0 + 1.01 * due_s) >= 0.9 * due_s * TOKENS_PER_S
        assert sent_by(100.02) == pytest.approx(0.02 * TOKENS_PER_S, rel=0.2)
        assert sent_by(1e6) == BURST_TOKENS, "what was not used is not saved up"

    def test_a_spent_budget_holds_back_no_live_draft_and_no_release(self) -> None:
        quick, ended = fed_sequence(name="quick"), fed_sequence(name="ended")
        feed = feed_of(quick, ended)
        exchange(feed)
        feed.histories.add(fed_sequence([1] * 200_000, name="long"), drafted_by())
        while (batch := feed.next_batch(0.0)) is not None:
            feed.on_proposals(batch.batch_id, [answer(delta) for delta in batch.deltas])
        assert feed.due_s(0.0), "the budget is spent"
        for token_id in range(50):
            step(feed, quick, token_id)
            batch, hints = exchange(feed)
            assert [delta.sequence_id for delta in batch.deltas] == ["quick"]
            assert hints == [hint_of(quick)]
        feed.histories.remove("ended")
        batch, _ = exchange(feed)
        assert (batch.deltas, len(batch.releases)) == ([], 1)


class TestPredictions:
    def test_it_stands_behind_the_prompts_end_and_before_the_text(self) -> None:
        sequence = fed_sequence([1, 2, 3])
        feed = feed_of(sequence, predicted=(7, 8, 9))
        [delta] = exchange(feed)[0].deltas
        assert delta.token_ids == [1, 2, 3, 7, 8, 9, 1, 2, 3]
        assert (delta.base_length, delta.prompt_length, delta.max_length) == (0, 9, 10_009)

    def test_of_a_long_prompt_the_last_tokens_stand_before_it(self) -> None:
        prompt = list(range(100))
        [delta] = next_batch(feed_of(fed_sequence(prompt), predicted=(500,))).deltas
        assert delta.token_ids == [*range(68, 100), 500, *prompt]

    def test_a_resumed_sequence_has_the_same_before_its_text(self) -> None:
        sequence = fed_sequence([1, 2, 3, 4], prompt_length=2)
        [delta] = next_batch(feed_of(sequence, predicted=(7,))).deltas
        assert delta.token_ids == [1, 2, 7, 1, 2, 3, 4]

    def test_hints_are_of_the_sequences_own_lengths(self) -> None:
        sequence = fed_sequence([1, 2, 3])
        feed = feed_of(sequence, predicted=(7, 8, 9))
        exchange(feed)
        step(feed, sequence, 7)
        batch, hints = exchange(feed, draft=(8, 9))
        assert (batch.deltas[0].base_length, batch.deltas[0].token_ids) == (9, [7])
        assert hints == [hint_of(sequence, 8, 9)]
        step(feed, sequence, 8)
        [(_, hint)] = exchange(feed, status=OUT_OF_SYNC, known=4)[1]
        assert (hint.base_length, hint.token_ids) == (len(sequence.token_ids), [])
        [delta] = next_batch(feed).deltas
        assert (delta.base_length, delta.token_ids) == (4, [8, 9, *sequence.token_ids])

    def test_what_is_kept_ends_where_the_text_does(self) -> None:
        sequence = fed_sequence([1, 2, 3, 4, 5], prompt_length=2)
        feed = feed_of(sequence, predicted=(7, 8), **POOL)
        exchange(feed)
        feed.histories.remove(sequence.sequence_id, keep=Keep.OUTPUT, length=4)
        assert next_batch(feed).releases == [Release(sequence.sequence_id, Keep.OUTPUT, 8)]
