"""A drafter is sent every token once, in order, and lost tokens again."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.generation.generation import Generation
from gateway.messages.drafter import Delta, DeltaBatch, Proposal, ProposalStatus, Release
from gateway.messages.request import Keep, NgramParams
from gateway.messages.verifier import Hint
from gateway.peers import wire
from gateway.peers.draft_feed import MAX_DELTA_TOKENS, DrafterProtocolError, DraftFeed
from tandem.v1 import drafter_pb2
from tests.gateway.factories import append_step, make_generation
from tests.volume import examples

POOLED = NgramParams(min_ngram=2, max_ngram=5, pool_id="0:/shared")

OK = ProposalStatus.OK
OUT_OF_SYNC = ProposalStatus.OUT_OF_SYNC


def feed_of(*generations: Generation, hint_tokens: int = 24) -> DraftFeed:
    feed = DraftFeed(hint_tokens=hint_tokens)
    for generation in generations:
        feed.add(generation)
    return feed


def answer(
    delta: Delta, status: ProposalStatus = OK, *, known: int = 0, draft: tuple[int, ...] = ()
) -> Proposal:
    length = delta.base_length + len(delta.token_ids)
    return Proposal(status, Hint(delta.sequence_id, length, list(draft), 0), known, "why")


def exchange(feed: DraftFeed, **fields: object) -> tuple[DeltaBatch, list[Hint]]:
    """One batch, answered alike for all its deltas."""
    batch = feed.next_batch(0.0)
    assert batch is not None
    proposals = [answer(delta, **fields) for delta in batch.deltas]  # type: ignore[arg-type]
    return batch, list(feed.on_proposals(batch.batch_id, proposals).hints)


def test_the_prompt_is_sent_at_once_and_requests_no_draft() -> None:
    feed = feed_of(make_generation([1, 2, 3]))
    assert not feed.awaits_drafts
    batch, hints = exchange(feed)
    (delta,) = batch.deltas
    assert (delta.base_length, delta.token_ids, delta.max_draft_tokens) == (0, [1, 2, 3], 0)
    assert delta.max_length == 2048
    assert delta.new_history is not None
    assert delta.new_history.prompt_length == 3
    assert hints == []
    assert feed.next_batch(0.0) is None


def test_a_long_prompt_is_sent_in_deltas_of_at_most_8192_tokens() -> None:
    prompt = list(range(20_000))
    feed = feed_of(make_generation(prompt, max_model_len=32_000))
    deltas = [exchange(feed)[0].deltas[0] for _ in range(3)]
    assert [delta.base_length for delta in deltas] == [0, 8192, 16384]
    assert max(len(delta.token_ids) for delta in deltas) == MAX_DELTA_TOKENS
    assert [token for delta in deltas for token in delta.token_ids] == prompt
    assert [delta.new_history is None for delta in deltas] == [False, True, True]
    assert feed.next_batch(0.0) is None


def test_new_tokens_request_the_verifiers_draft_tokens_up_to_hint_tokens() -> None:
    generation = make_generation()
    feed = feed_of(generation, hint_tokens=24)
    exchange(feed)
    for wanted, asked in ((28, 24), (5, 5)):
        append_step(generation, [4, 5])
        feed.advance("sequence", wanted)
        assert feed.awaits_drafts
        batch, hints = exchange(feed, draft=(9, 9))
        assert batch.deltas[0].max_draft_tokens == asked
        assert hints == [Hint("sequence", len(generation.token_ids), [9, 9], 0)]
        assert not feed.awaits_drafts


def test_a_sequence_that_can_use_no_draft_costs_no_message_until_it_can() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [4])
    feed.advance("sequence", 0)
    assert not feed.awaits_drafts
    assert feed.next_batch(0.0) is None
    append_step(generation, [5])
    feed.advance("sequence", 24)
    batch, _ = exchange(feed)
    assert batch.deltas[0].token_ids == [4, 5]
    assert batch.deltas[0].max_draft_tokens == 24


def test_text_that_a_pool_keeps_is_sent_to_its_end_before_the_release() -> None:
    generation = make_generation(ngram=POOLED)
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [4])
    feed.advance("sequence", 0)
    feed.remove("sequence", keep=Keep.OUTPUT)
    last, _ = exchange(feed)
    assert [delta.token_ids for delta in last.deltas] == [[4]]
    assert last.releases == []
    release, _ = exchange(feed)
    assert (release.deltas, release.releases) == ([], [Release("sequence", Keep.OUTPUT)])
    assert feed.is_idle


def test_a_pool_gets_no_token_after_a_stop_string() -> None:
    generation = make_generation(ngram=POOLED)
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [4, 5, 6])
    feed.advance("sequence", 24)
    exchange(feed)
    del generation.token_ids[-2:]  # as a stop string does
    feed.remove("sequence", keep=Keep.ALL)
    release, _ = exchange(feed)
    length = len(generation.token_ids)
    assert (release.deltas, release.releases) == ([], [Release("sequence", Keep.ALL, length)])
    message = wire.deltas_to_proto(release).releases[0]
    assert (message.keep, message.feed_id, message.length) == (
        drafter_pb2.KEEP_ALL,
        "sequence",
        length,
    )
    assert feed.is_idle


def test_a_new_history_says_how_it_feeds_its_pool() -> None:
    ngram = dataclasses.replace(POOLED, pool_keep=Keep.ALL, pool_feed_tokens=64)
    batch, _ = exchange(feed_of(make_generation(ngram=ngram)))
    params = wire.deltas_to_proto(batch).sequences[0].params
    assert (params.pool_keep, params.pool_feed_tokens) == (drafter_pb2.KEEP_ALL, 64)


def test_a_restart_does_not_replay_sequences_that_are_over() -> None:
    generation = make_generation(ngram=POOLED)
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [4])
    feed.remove("sequence", keep=Keep.OUTPUT)
    feed.restart()
    assert feed.is_idle


def test_an_empty_draft_becomes_a_hint() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [4])
    feed.advance("sequence", 24)
    _, hints = exchange(feed, status=ProposalStatus.NO_MATCH)
    assert hints == [Hint("sequence", 4, [], 0)]


def test_the_hint_of_a_drafter_that_is_indexing_says_so() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [4])
    feed.advance("sequence", 24)
    batch = feed.next_batch(0.0)
    assert batch is not None
    response = drafter_pb2.ProposeResponse(
        proposals=[
            drafter_pb2.Proposal(
                sequence_id="sequence", base_length=4, status=drafter_pb2.STATUS_INDEXING
            )
        ]
    )
    answer = feed.on_proposals(batch.batch_id, wire.proposals_from_proto(response))
    assert answer.hints == [Hint("sequence", 4, [], 0, is_indexing=True)]
    assert not answer.given_up


def test_steps_that_were_not_sent_yet_merge_into_one_delta() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    for token in (4, 5, 6):
        append_step(generation, [token])
        feed.advance("sequence", 24)
    batch = feed.next_batch(0.0)
    assert batch is not None
    assert [delta.token_ids for delta in batch.deltas] == [[1, 2, 3, 4, 5, 6]]


def test_urgent_drafts_are_requested_before_prompts_in_separate_messages() -> None:
    quick = make_generation(sequence_id="quick")
    feed = feed_of(quick)
    exchange(feed)
    feed.add(make_generation(list(range(9000)), sequence_id="long"))
    append_step(quick, [4])
    feed.advance("quick", 24)
    order = []
    while (batch := feed.next_batch(0.0)) is not None:
        order.append([delta.sequence_id for delta in batch.deltas])
    assert order == [["quick"], ["long"], ["long"]]


def test_a_slow_drafter_gets_fewer_batches_and_not_more_memory() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    batches = []
    for token in range(100):
        append_step(generation, [token])
        feed.advance("sequence", 24)
        batch = feed.next_batch(0.0)
        if batch is not None:
            batches.append(batch)
    assert len(batches) == 8
    feed.on_proposals(batches[0].batch_id, [answer(batches[0].deltas[0])])
    merged = feed.next_batch(0.0)
    assert merged is not None
    assert len(merged.deltas[0].token_ids) == 92


def test_lost_tokens_are_sent_again_from_the_known_length() -> None:
    generation = make_generation([1, 2, 3, 4, 5])
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [6])
    feed.advance("sequence", 24)
    _, hints = exchange(feed, status=OUT_OF_SYNC, known=2)
    assert hints == [Hint("sequence", 6, [], 0)], "no step may wait for the lost answer"
    batch, hints = exchange(feed, draft=(7,))
    assert (batch.deltas[0].base_length, batch.deltas[0].token_ids) == (2, [3, 4, 5, 6])
    assert batch.deltas[0].new_history is None
    assert hints == [Hint("sequence", 6, [7], 0)]


def test_a_history_that_was_lost_whole_is_created_again() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    exchange(feed)
    append_step(generation, [4])
    feed.advance("sequence", 24)
    exchange(feed, status=OUT_OF_SYNC, known=0)
    batch, _ = exchange(feed)
    assert batch.deltas[0].token_ids == [1, 2, 3, 4]
    assert batch.deltas[0].new_history is not None


def test_outdated_answers_do_not_rewind_again() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    exchange(feed)
    batches = []
    for token in (4, 5, 6):
        append_step(generation, [token])
        feed.advance("sequence", 24)
        batch = feed.next_batch(0.0)
        assert batch is not None
        batches.append(batch)
    feed.on_proposals(batches[0].batch_id, [answer(batches[0].deltas[0], OUT_OF_SYNC, known=1)])
    replay = feed.next_batch(0.0)
    assert replay is not None
    assert replay.deltas[0].base_length == 1
    for batch in batches[1:]:  # their deltas left a gap, of course
        feed.on_proposals(batch.batch_id, [answer(batch.deltas[0], OUT_OF_SYNC, known=1)])
    assert feed.next_batch(0.0) is None


def test_a_sequence_that_the_drafter_keeps_losing_is_given_up() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    feed.advance("sequence", 24)
    for _ in range(9):
        batch = feed.next_batch(0.0)
        assert batch is not None
        result = feed.on_proposals(batch.batch_id, [answer(batch.deltas[0], OUT_OF_SYNC)])
    last = feed.next_batch(0.0)
    assert last is not None
    assert (last.deltas, last.releases) == ([], [Release("sequence")])
    assert result.given_up == [("sequence", "the drafter lost the sequence 9 times")]
    assert result.hints == [Hint("sequence", 3, [], 0)]


def test_an_invalid_sequence_is_given_up_and_the_others_are_not() -> None:
    feed = feed_of(make_generation(sequence_id="bad"), make_generation(sequence_id="good"))
    batch = feed.next_batch(0.0)
    assert batch is not None
    bad, good = batch.deltas
    result = feed.on_proposals(batch.batch_id, [answer(bad, ProposalStatus.INVALID), answer(good)])
    assert result.given_up == [("bad", "why")]
    assert not feed.is_idle


def test_a_draft_that_is_too_long_is_cut() -> None:
    generation = make_generation()
    feed = feed_of(generation, hint_tokens=3)
    feed.advance("sequence", 24)
    _, hints = exchange(feed, draft=(1, 2, 3, 4, 5))
    assert hints[0].token_ids == [1, 2, 3]


def test_a_finished_sequence_is_released_once_and_its_late_answers_are_dropped() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    feed.advance("sequence", 24)
    batch = feed.next_batch(0.0)
    assert batch is not None
    feed.remove("sequence")
    result = feed.on_proposals(batch.batch_id, [answer(batch.deltas[0], draft=(5,))])
    assert result.hints == []
    release = feed.next_batch(0.0)
    assert release is not None
    assert (release.deltas, release.releases) == ([], [Release("sequence")])
    feed.on_proposals(release.batch_id, [])
    assert feed.is_idle


def test_a_sequence_that_was_never_sent_is_not_released() -> None:
    feed = feed_of(make_generation())
    feed.remove("sequence")
    assert feed.next_batch(0.0) is None
    assert feed.is_idle


def test_a_new_drafter_is_sent_everything_again() -> None:
    generation, ended = make_generation(), make_generation(sequence_id="ended")
    feed = feed_of(generation, ended)
    exchange(feed)
    append_step(generation, [4])
    feed.advance("sequence", 24)
    feed.next_batch(0.0)
    feed.remove("ended")
    feed.restart()
    assert feed.oldest_sent_s is None
    batch, hints = exchange(feed, draft=(9,))
    assert [delta.token_ids for delta in batch.deltas] == [[1, 2, 3, 4]]
    assert batch.releases == [], "a new drafter holds nothing"
    assert hints == [Hint("sequence", 4, [9], 0)]


@pytest.mark.parametrize("kind", ["batch", "count"])
def test_an_answer_that_does_not_fit_its_batch_is_refused(kind: str) -> None:
    feed = feed_of(make_generation())
    batch = feed.next_batch(0.0)
    assert batch is not None
    proposals = [answer(batch.deltas[0])]
    if kind == "count":
        proposals *= 2
    with pytest.raises(DrafterProtocolError):
        feed.on_proposals(batch.batch_id + (kind == "batch"), proposals)


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_id": "other"},
        {"base_length": 5},
        {"base_length": 3},
        None,
    ],
)
def test_an_invalid_proposal_is_ignored_alone(fields: dict[str, object] | None) -> None:
    bad, good = make_generation(sequence_id="bad"), make_generation(sequence_id="good")
    feed = feed_of(bad, good)
    exchange(feed)
    for generation in (bad, good):
        append_step(generation, [4])
        feed.advance(generation.sequence_id, 24)
    batch = feed.next_batch(0.0)
    assert batch is not None
    first, second = (answer(delta, draft=(9,)) for delta in batch.deltas)
    if fields is None:
        first = first._replace(status=ProposalStatus.UNSPECIFIED)
    else:
        first = first._replace(hint=first.hint._replace(**fields))  # type: ignore[arg-type]
    result = feed.on_proposals(batch.batch_id, [first, second])
    assert result.hints == [Hint("bad", 4, [], 0), Hint("good", 4, [9], 0)]
    assert len(result.invalid) == 1
    assert not result.given_up


def test_a_replay_is_paced_and_does_not_delay_other_sequences() -> None:
    quick = make_generation(sequence_id="quick", max_new_tokens=5000)
    long = [
        make_generation([1] * 100_000, sequence_id=f"long {i}", max_model_len=1 << 20)
        for i in range(4)
    ]
    feed = feed_of(quick, *long)
    exchange(feed)
    feed.restart()
    in_flight = []
    order: list[str] = []
    num_replayed = 0
    for step in range(2000):
        append_step(quick, [4])
        feed.advance("quick", 24)
        for generation in long if step < 3 else ():
            append_step(generation, [5])
            feed.advance(generation.sequence_id, 24)
        while (batch := feed.next_batch(0.0)) is not None:
            in_flight.append(batch)
            num_replayed += sum(
                len(delta.token_ids) for delta in batch.deltas if delta.sequence_id != "quick"
            )
            order.append("quick" if batch.deltas[0].sequence_id == "quick" else "long")
        replayed = [batch for batch in in_flight if batch.deltas[0].sequence_id != "quick"]
        assert len(replayed) <= 2
        if step % 4 == 0:  # the drafter is slower than the steps
            batch = in_flight.pop(0)
            feed.on_proposals(batch.batch_id, [answer(delta) for delta in batch.deltas])
    assert order[0] == "quick"
    # Every token was replayed once: replays cause no further replays.
    assert num_replayed == sum(len(generation.token_ids) for generation in long)


def test_only_live_batches_measure_the_round_trip_and_the_relay() -> None:
    generation = make_generation()
    feed = feed_of(generation)
    prompt = feed.next_batch(1.0)
    assert prompt is not None
    told = feed.on_proposals(prompt.batch_id, [answer(prompt.deltas[0])])
    assert (told.sent_s, told.step_s) == (None, None)
    append_step(generation, [4])
    feed.advance("sequence", 24)
    feed.begin_step(2.0)
    live = feed.next_batch(3.0)
    assert live is not None
    told = feed.on_proposals(live.batch_id, [answer(live.deltas[0])])
    assert (told.sent_s, told.step_s) == (3.0, 2.0)
    feed.remove("sequence")
    release = feed.next_batch(4.0)
    assert release is not None
    assert feed.on_proposals(release.batch_id, []).sent_s is None


class ModelDrafter:
    """A drafter's histories; the oracle of the state machine below."""

    def __init__(self) -> None:
        self.histories: dict[str, list[int]] = {}

    def take(self, delta: Delta) -> Proposal:
        known = self.histories.get(delta.sequence_id)
        if delta.base_length == 0:
            assert delta.new_history is not None
            known = self.histories[delta.sequence_id] = []
        if known is None or delta.base_length != len(known):
            return answer(delta, OUT_OF_SYNC, known=0)
        known += delta.token_ids
        return answer(delta)


@settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
class FeedMachine(RuleBasedStateMachine):
    """Sequences grow, end and are lost, answers come late: no history is ever wrong, and
    once all is answered it is everything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.feed = DraftFeed(hint_tokens=4)
        self.drafter = ModelDrafter()
        self.live: dict[str, Generation] = {}
        self.in_flight: list[tuple[int, list[Proposal]]] = []
        self.num_made = 0
        self.num_lost = 0

    @rule(num_tokens=st.integers(1, 5))
    def begin(self, num_tokens: int) -> None:
        self.num_made += 1
        name = f"sequence {self.num_made}"
        self.live[name] = make_generation(list(range(num_tokens)), sequence_id=name)
        self.feed.add(self.live[name])

    @precondition(lambda self: self.live)
    @rule(chosen=st.randoms(use_true_random=False), wanted=st.sampled_from([0, 24]))
    def step(self, chosen: object, wanted: int) -> None:
        name = chosen.choice(sorted(self.live))  # type: ignore[attr-defined]
        append_step(self.live[name], [len(self.live[name].token_ids)])
        self.feed.advance(name, wanted)

    @precondition(lambda self: self.live)
    @rule(chosen=st.randoms(use_true_random=False))
    def end(self, chosen: object) -> None:
        name = chosen.choice(sorted(self.live))  # type: ignore[attr-defined]
        del self.live[name]
        self.feed.remove(name)

    @precondition(lambda self: self.drafter.histories and self.num_lost < 8)
    @rule(chosen=st.randoms(use_true_random=False))
    def lose(self, chosen: object) -> None:
        self.num_lost += 1
        name = chosen.choice(sorted(self.drafter.histories))  # type: ignore[attr-defined]
        del self.drafter.histories[name]

    @rule()
    def send(self) -> None:
        batch = self.feed.next_batch(0.0)
        if batch is None:
            return
        for release in batch.releases:
            self.drafter.histories.pop(release.sequence_id, None)
        names = [delta.sequence_id for delta in batch.deltas]
        assert len(set(names)) == len(names)
        self.in_flight.append((batch.batch_id, [self.drafter.take(d) for d in batch.deltas]))

    @precondition(lambda self: self.in_flight)
    @rule()
    def receive(self) -> None:
        batch_id, proposals = self.in_flight.pop(0)
        result = self.feed.on_proposals(batch_id, proposals)
        assert not result.given_up
        assert all(hint.sequence_id in self.live for hint in result.hints)

    @invariant()
    def nothing_that_is_known_is_wrong(self) -> None:
        for name, known in self.drafter.histories.items():
            if name in self.live:
                assert known == self.live[name].token_ids[: len(known)]

    def teardown(self) -> None:
        # A lost sequence is noticed at its next step.
        for name, generation in self.live.items():
            append_step(generation, [0])
            self.feed.advance(name, 24)
        for _ in range(100):
            self.send()
            if self.in_flight:
                self.receive()
        assert {name: self.drafter.histories.get(name) for name in self.live} == {
            name: generation.token_ids for name, generation in self.live.items()
        }
        for name in list(self.live):
            self.end_one(name)
        for _ in range(20):
            self.send()
            if self.in_flight:
                self.receive()
        assert self.feed.is_idle

    def end_one(self, name: str) -> None:
        del self.live[name]
        self.feed.remove(name)


TestFeedMachine = FeedMachine.TestCase
