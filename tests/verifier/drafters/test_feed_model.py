"""A feed against a model of its drafter: no history is ever wrong, and no bound is ever broken."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.v1 import drafter_pb2
from tandem.values import Keep
from tests.verifier.drafters.feeding import (
    answer,
    check_invariants,
    drafted_by,
    fed_sequence,
    next_batch,
    num_unanswered,
)
from tests.volume import examples
from verifier.drafters.batches import (
    Delta,
    Proposal,
    ProposalStatus,
    Release,
)
from verifier.drafters.feed import DraftFeed
from verifier.scheduling.sequence import Sequence


class ModelDrafter:
    """A drafter's histories and its pool; the oracle of the state machine below."""

    def __init__(self) -> None:
        self.histories: dict[str, list[int]] = {}
        # By the sequences that fed it, in order.
        self.pool: list[tuple[str, Keep, list[int]]] = []

    def release(self, release: Release) -> None:
        known = self.histories.pop(release.sequence_id, None)
        if known is not None and release.keep is not Keep.NOTHING:
            text = known[: release.length or None]
            self.pool.append((release.sequence_id, release.keep, text))

    def take(self, delta: Delta) -> Proposal:
        known = self.histories.get(delta.sequence_id)
        if delta.base_length == 0:
            assert delta.encoded_params is not None
            known = self.histories[delta.sequence_id] = []
        if known is None or delta.base_length != len(known):
            return answer(delta, ProposalStatus.OUT_OF_SYNC, known=0)
        known += delta.token_ids
        draft = tuple(range(min(2, delta.max_draft_tokens)))
        return answer(delta, draft=draft)


@settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
class FeedMachine(RuleBasedStateMachine):
    """Sequences grow, end in every way and are lost, the drafter restarts and answers late."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = DraftFeed()
        self.drafter = ModelDrafter()
        self.live: dict[str, Sequence] = {}
        # What stands before each sequence's own tokens.
        self.before: dict[str, list[int]] = {}
        self.held: dict[str, Sequence] = {}
        # What each ended sequence's pool may hold of it, at most.
        self.kept: dict[str, tuple[Keep, list[int]]] = {}
        # Those whose pool must hold it in the end, and when it is given up.
        self.owed: dict[str, float] = {}
        self.pooled: set[str] = set()
        # Its id, the answer that comes, and whose drafts were asked for.
        self.in_flight: list[tuple[int, list[Proposal], set[str]]] = []
        self.num_made = 0
        self.num_lost = 0
        self.lost: set[str] = set()
        self.now_s = 0.0

    def choose(self, names: dict[str, Sequence], draw: random.Random) -> str:
        return draw.choice(sorted(names))

    @rule(
        num_tokens=st.sampled_from([1, 2, 5, 900, 1500, 20_000]),
        hint_tokens=st.sampled_from([0, 3]),
        has_pool=st.booleans(),
        num_predicted=st.sampled_from([0, 0, 1, 40, 9000]),
    )
    def begin(self, num_tokens: int, hint_tokens: int, has_pool: bool, num_predicted: int) -> None:
        self.num_made += 1
        name = f"sequence {self.num_made}"
        self.live[name] = fed_sequence(list(range(num_tokens)), name=name)
        predicted = tuple(range(100, 100 + num_predicted))
        lead = range(num_tokens)[-32:] if predicted else ()
        self.before[name] = [*lead, *predicted]
        if has_pool:
            self.pooled.add(name)
        policy = drafted_by(
            hint_tokens=hint_tokens, pool_id="0:/p" if has_pool else "", predicted=predicted
        )
        assert self.feed.histories.add(self.live[name], policy)

    @precondition(lambda self: self.live)
    @rule(draw=st.randoms(use_true_random=False))
    def begin_with_the_id_of_another(self, draw: random.Random) -> None:
        name = self.choose(self.live, draw)
        assert not self.feed.histories.add(fed_sequence([9, 9, 9], name=name), drafted_by())

    @precondition(lambda self: self.live)
    @rule(draw=st.randoms(use_true_random=False), wanted=st.sampled_from([0, 24]))
    def step(self, draw: random.Random, wanted: int) -> None:
        sequence = self.live[self.choose(self.live, draw)]
        sequence.token_ids.append(len(sequence.token_ids))
        sequence.num_wanted_draft_tokens = wanted
        self.feed.histories.advance(sequence)

    @precondition(lambda self: self.live)
    @rule(
        draw=st.randoms(use_true_random=False),
        keep=st.sampled_from(Keep),
        length=st.sampled_from([0, 1, 4, 1 << 31]),
    )
    def end(self, draw: random.Random, keep: Keep, length: int) -> None:
        name = self.choose(self.live, draw)
        self.end_one(name, self.live.pop(name), keep, length)

    @precondition(lambda self: self.live)
    @rule(draw=st.randoms(use_true_random=False))
    def hold(self, draw: random.Random) -> None:
        name = self.choose(self.live, draw)
        self.held[name] = self.live.pop(name)
        self.feed.histories.hold(name)

    @precondition(lambda self: self.held)
    @rule(
        draw=st.randoms(use_true_random=False),
        keep=st.sampled_from(Keep),
        length=st.sampled_from([0, 1, 4, 1 << 31]),
    )
    def decide(self, draw: random.Random, keep: Keep, length: int) -> None:
        name = self.choose(self.held, draw)
        self.end_one(name, self.held.pop(name), keep, length)

    def end_one(self, name: str, sequence: Sequence, keep: Keep, length: int) -> None:
        until_s = self.now_s + 1.0
        # The answer that tells of the loss may come after the text's last token, or never.
        is_gone = name in self.lost - self.drafter.histories.keys()
        self.feed.histories.remove(name, keep=keep, length=length, until_s=until_s)
        self.kept[name] = (keep, self.before[name] + sequence.token_ids[: length or None])
        if keep in (Keep.OUTPUT, Keep.ALL) and name in self.pooled and not is_gone:
            self.owed[name] = until_s

    @precondition(lambda self: self.drafter.histories and self.num_lost < 8)
    @rule(draw=st.randoms(use_true_random=False))
    def lose(self, draw: random.Random) -> None:
        self.num_lost += 1
        name = draw.choice(sorted(self.drafter.histories))
        del self.drafter.histories[name]
        self.lost.add(name)
        # Its last token may have been sent already, and then nobody notices.
        self.owed.pop(name, None)

    @rule(pause_s=st.sampled_from([0.1, 0.6]))
    def expire(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.feed.histories.expire(self.now_s)
        self.owed = {name: at_s for name, at_s in self.owed.items() if at_s > self.now_s}

    @rule()
    def restart(self) -> None:
        self.drafter.histories.clear()
        self.in_flight.clear()
        # All of such a text was sent, and it was not released yet.
        for name in self.feed.histories.releases:
            self.owed.pop(name, None)
        self.feed.restart()

    @rule(pause_s=st.sampled_from([0.0, 0.001, 0.1]))
    def send(self, pause_s: float) -> None:
        self.now_s += pause_s
        batch = self.feed.next_batch(self.now_s)
        if batch is None:
            return
        for release in batch.releases:
            self.drafter.release(release)
        names = [delta.sequence_id for delta in batch.deltas]
        assert len(set(names)) == len(names)
        assert not set(names) & self.held.keys(), "nothing is sent before the decision"
        asked = {delta.sequence_id for delta in batch.deltas if delta.max_draft_tokens}
        proposals = [self.drafter.take(delta) for delta in batch.deltas]
        self.in_flight.append((batch.batch_id, proposals, asked))

    @precondition(lambda self: self.in_flight)
    @rule()
    def receive(self) -> None:
        batch_id, proposals, asked = self.in_flight.pop(0)
        result = self.feed.on_proposals(batch_id, proposals)
        assert not result.given_up
        assert not result.mistakes
        for sequence, hint in result.hints:
            assert self.live[hint.sequence_id] is sequence
            assert hint.base_length <= len(sequence.token_ids)
        assert result.hints or result.sent_s is None or not (self.live.keys() & asked)

    @invariant()
    def the_books_are_in_order(self) -> None:
        check_invariants(self.feed)
        assert num_unanswered(self.feed) == len(self.in_flight)
        assert {s.sequence_id for s in self.feed.histories.sequences} == set(self.live)

    @invariant()
    def nothing_that_is_known_is_wrong(self) -> None:
        for name, known in self.drafter.histories.items():
            if name in self.live:
                assert known == (self.before[name] + self.live[name].token_ids)[: len(known)]

    @invariant()
    def a_pool_holds_what_was_kept_and_nothing_else(self) -> None:
        names = [name for name, _, _ in self.drafter.pool]
        assert len(set(names)) == len(names), "a text feeds its pool once"
        for name, keep, text in self.drafter.pool:
            assert (keep, text) == self.kept[name]

    def teardown(self) -> None:
        # A lost sequence is noticed at its next step.
        for sequence in self.live.values():
            sequence.token_ids.append(0)
            sequence.num_wanted_draft_tokens = 24
            self.feed.histories.advance(sequence)
        self.settle()
        assert {name: self.drafter.histories.get(name) for name in self.live} == {
            name: self.before[name] + sequence.token_ids for name, sequence in self.live.items()
        }
        for name in [*self.live, *self.held]:
            self.feed.histories.remove(name)
        self.settle()
        assert self.feed.is_idle
        assert self.owed.keys() <= {name for name, _, _ in self.drafter.pool}
        assert self.drafter.histories == {}, "everything is released"

    def settle(self) -> None:
        """Sends and answers until there is nothing to send."""
        for _ in range(1000):
            self.send(1.0)
            if self.in_flight:
                self.receive()
            elif self.feed.due_s(self.now_s) is None:
                return
        raise AssertionError("there is always something to send")


TestFeedMachine = FeedMachine.TestCase


@given(
    names=st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda t: len(t.encode()) <= 64),
        min_size=1,
        max_size=40,
        unique=True,
    ),
    num_wanted=st.integers(0, 300),
    draw=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(300), deadline=None)
def test_no_honest_answer_is_longer_than_its_bound(
    names: list[str], num_wanted: int, draw: random.Random
) -> None:
    feed = DraftFeed()
    for name in names:
        sequence = fed_sequence([1] * draw.choice([1, 200]), name=name)
        sequence.num_wanted_draft_tokens = num_wanted
        feed.histories.add(sequence, drafted_by())
    batch = next_batch(feed)
    proposals = [_honest_proposal(delta, draw) for delta in batch.deltas]
    response = drafter_pb2.ProposeResponse(batch_id=batch.batch_id, proposals=proposals)
    assert len(response.SerializeToString()) <= batch.max_answer_bytes


def _honest_proposal(
    delta: Delta, draw: random.Random, kind: str | None = None
) -> drafter_pb2.Proposal:
    """Any answer that a drafter may give to a delta."""
    length = delta.base_length + len(delta.token_ids)
    kind = kind or draw.choice(["draft", "lost", "refused"])
    if kind == "lost":
        return drafter_pb2.Proposal(
            sequence_id=delta.sequence_id,
            status=drafter_pb2.STATUS_OUT_OF_SYNC,
            base_length=draw.choice([0, length]),
            known_length=2**31 - 1,
        )
    if kind == "refused":
        return drafter_pb2.Proposal(
            sequence_id=delta.sequence_id,
            status=drafter_pb2.STATUS_INVALID,
            message="token_ids: the sequence would hold 33554433 bytes, and 33554432 are allowed",
        )
    return drafter_pb2.Proposal(
        sequence_id=delta.sequence_id,
        base_length=draw.choice([length, 2**31 - 1]),
        token_ids=[2**32 - 1] * delta.max_draft_tokens,
        matched_ngram_length=64,
        source=drafter_pb2.SOURCE_POOL,
        status=drafter_pb2.STATUS_OK,
    )
