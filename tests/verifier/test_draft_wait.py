"""When a step waits for hints: the rule's arithmetic, how p1 is learned, and a simulation."""

import random
from dataclasses import dataclass, field

import pytest

from verifier.drafts.draft_buffer import DraftBuffer
from verifier.drafts.draft_wait import (
    HOPS_KEPT,
    DraftWaitEstimates,
    HintRecord,
)


def estimates(step_s: float = 0.004, hop_s: float = 0.001) -> DraftWaitEstimates:
    made = DraftWaitEstimates()
    made.step_s.observe(step_s)
    made.hop_s.observe(hop_s)
    return made


@pytest.mark.parametrize(
    ("probabilities", "num_sequences", "elapsed_s", "longest_s"),
    [
        pytest.param([1.0], 1, 0.0, 0.004, id="one that repeats waits, at most what it gains"),
        pytest.param([0.0], 1, 0.0, 0.0, id="one that never repeats does not"),
        pytest.param([0.24], 1, 0.0, 0.0, id="gain just below the hop"),
        pytest.param([0.26], 1, 0.0, 0.00104, id="gain just above the hop"),
        pytest.param([0.24], 1, 0.0005, 0.00096, id="part of the hop has passed"),
        pytest.param([0.1], 1, 0.010, 0.0004, id="overdue: no longer than the gain"),
        pytest.param([0.0], 1, 0.010, 0.0, id="overdue and never right"),
        pytest.param([1.0], 5, 0.0, 0.0, id="one gains too little for five"),
        pytest.param([1.0, 0.5], 5, 0.0, 0.0012, id="two gain enough for five"),
        pytest.param([], 5, 0.0, 0.0, id="every sequence has a draft"),
    ],
)
def test_waits_while_the_gain_exceeds_the_delay(
    probabilities: list[float], num_sequences: int, elapsed_s: float, longest_s: float
) -> None:
    waited_s = estimates().longest_wait_s(
        first_token_probabilities=probabilities, num_sequences=num_sequences, elapsed_s=elapsed_s
    )
    assert waited_s == pytest.approx(longest_s)


@pytest.mark.parametrize("known", ["step_s", "hop_s"])
def test_never_waits_before_both_durations_are_known(known: str) -> None:
    unknown = DraftWaitEstimates()
    getattr(unknown, known).observe(1.0)
    assert (
        unknown.longest_wait_s(first_token_probabilities=[1.0], num_sequences=1, elapsed_s=0.0) == 0
    )


class TestHops:
    def test_one_under_a_step_counts_only_if_it_is_the_first_or_shorter(self) -> None:
        observed = DraftWaitEstimates()
        means = []
        for hop_s, was_under_step in (
            (0.010, True),  # the first
            (0.020, True),  # the step delayed it
            (0.010, True),  # as long as the mean
            (0.005, True),
            (0.020, False),
        ):
            observed.observe_hop(hop_s, was_under_step=was_under_step)
            means.append(observed.hop_s.value)
        assert means == [
            0.010,
            0.010,
            0.010,
            pytest.approx(0.0095),
            pytest.approx(0.9 * 0.0095 + 0.1 * 0.020),
        ]

    def test_quantiles_are_of_the_last_hops_that_no_step_delayed(self) -> None:
        observed = DraftWaitEstimates()
        assert observed.hop_quantile_s(0.5) == 0.0
        observed.observe_hop(9.0, was_under_step=True)
        assert observed.hop_quantile_s(0.5) == 0.0
        hops_s = list(range(1, 101))
        random.Random(1).shuffle(hops_s)
        for hop_s in hops_s:
            observed.observe_hop(float(hop_s), was_under_step=False)
        quantiles = [observed.hop_quantile_s(q) for q in (0.0, 0.5, 0.99, 1.0)]
        assert quantiles == [1.0, 51.0, 100.0, 100.0]
        for _ in range(HOPS_KEPT):
            observed.observe_hop(7.0, was_under_step=False)
        assert observed.hop_quantile_s(0.0) == observed.hop_quantile_s(1.0) == 7.0


class TestHintRecord:
    def test_decays_by_0_8(self) -> None:
        record = HintRecord()
        known = [0]
        expected = 0.0
        for right in (True, True, False, True):
            record.record_hint(len(known), [5], known)
            known.append(5 if right else 6)
            record.settle(known)
            expected = 0.8 * expected + 0.2 * right
            assert record.first_token_probability == pytest.approx(expected)

    @pytest.mark.parametrize(("token_id", "expected"), [(7, 0.2), (8, 0.0)])
    def test_learns_from_a_late_hint_at_once(self, token_id: int, expected: float) -> None:
        record = HintRecord()
        record.record_hint(2, [token_id], [0, 1, 7, 9])
        assert record.first_token_probability == pytest.approx(expected)

    def test_useless_hints_of_others_count_from_the_first_request_on(self) -> None:
        record = HintRecord(num_useless_before=5)
        assert record.num_useless_hints == 0, "no request yet"
        record.record_request()
        assert record.num_useless_hints == 5
        record.record_hint(1, [], [0])
        record.record_request()
        assert record.num_useless_hints == 6
        record.record_hint(1, [1, 9], [0, 1])
        record.record_request()
        record.record_hint(2, [], [0, 1])
        assert record.num_useless_hints == 1, "a useful one ends it"
        assert (record.num_hints, record.num_useful_hints) == (3, 1)

    @pytest.mark.parametrize(("length", "num_useless"), [(3, 0), (4, 1), (9, 1)])
    def test_a_right_hint_is_useless_once_the_sequence_has_passed_its_end(
        self, length: int, num_useless: int
    ) -> None:
        record = HintRecord()
        record.record_hint(1, [1, 2, 3], list(range(length)))
        assert record.num_useless_hints == num_useless
        assert record.first_token_probability == pytest.approx(0.2), "its first token was right"


@dataclass
class Outcome:
    """The result of a simulated sequence."""

    duration_s: float = 0.0
    wait_s: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0
    num_proposals: int = 0


@dataclass
class Simulation:
    """One sequence in simulated time: the engine's own buffer and rule, an n-gram drafter one hop
    away, and a given text as the target's output.

    A step costs 1.2 + 0.03 K ms. A hint for a length arrives one hop after that length is known.
    """

    text: list[int]
    prompt_length: int
    hop_s: float
    waits: bool = True
    drafts: bool = True
    under_way: list[tuple[float, int, list[int]]] = field(default_factory=list)
    now_s: float = 0.0

    def run(self) -> Outcome:
        outcome = Outcome()
        self.wait_estimates = DraftWaitEstimates()
        self.record = HintRecord()
        self.buffer = DraftBuffer()
        proposer = Proposer()
        known = self.text[: self.prompt_length]
        published_at_s = self.now_s
        while len(known) < len(self.text):
            if self.drafts:
                self.receive_hints(known)
                outcome.wait_s += self.wait(known, published_at_s)
            drafts = self.buffer.ahead(len(known), min(7, len(self.text) - len(known) - 1))
            step_s = 0.0012 + 0.00003 * len(drafts)
            self.now_s += step_s
            right = self.text[len(known) : len(known) + len(drafts)]
            num_accepted = next(
                (i for i, (a, b) in enumerate(zip(drafts, right, strict=True)) if a != b),
                len(drafts),
            )
            known = self.text[: len(known) + num_accepted + 1]
            self.record.settle(known)
            self.buffer.advance(known)
            self.wait_estimates.step_s.observe(step_s)
            published_at_s = self.now_s
            proposal = proposer.propose(known)
            outcome.num_proposals += bool(proposal)
            self.under_way.append((self.now_s + self.hop_s, len(known), proposal))
            outcome.num_steps += 1
            outcome.num_drafts += bool(drafts)
        outcome.duration_s = self.now_s
        return outcome

    def wait(self, known: list[int], published_at_s: float) -> float:
        """As `Engine._await_hints`, in simulated time."""
        started_at_s = self.now_s
        while not self.buffer and self.buffer.answered_length < len(known) and self.waits:
            longest_s = self.wait_estimates.longest_wait_s(
                first_token_probabilities=[self.record.first_token_probability],
                num_sequences=1,
                elapsed_s=self.now_s - published_at_s,
            )
            left_s = longest_s - (self.now_s - started_at_s)
            if left_s <= 1e-12:
                break
            arrival_s = min((at_s for at_s, _, _ in self.under_way), default=float("inf"))
            self.now_s = min(self.now_s + left_s, max(arrival_s, self.now_s))
            self.receive_hints(known)
        return self.now_s - started_at_s

    def receive_hints(self, known: list[int]) -> None:
        while self.under_way and self.under_way[0][0] <= self.now_s:
            _, base_length, token_ids = self.under_way.pop(0)
            self.record.record_hint(base_length, token_ids, known)
            self.buffer.offer(base_length, token_ids, 0, known)
            self.wait_estimates.hop_s.observe(self.hop_s)


class Proposer:
    """Up to 24 tokens after the last occurrence of the longest suffix of 5 to 2 tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.followers: dict[tuple[int, ...], int] = {}  # n-gram -> position after it

    def propose(self, known: list[int]) -> list[int]:
        for end in range(self.num_tokens, len(known)):
            self.followers.update({tuple(known[end - n : end]): end for n in range(2, 6)})
        self.num_tokens = len(known)
        for n in range(5, 1, -1):
            follower = self.followers.get(tuple(known[-n:]))
            if follower is not None:
                return known[follower : follower + 24]
        return []


def random_text() -> list[int]:
    """400 random tokens of 40 kinds: pairs repeat by chance, and drafts after them are wrong."""
    draw = random.Random(1)
    return [draw.randrange(40) for _ in range(400)]


def phrases() -> list[int]:
    """Six phrases of eleven tokens in random order: a draft across a phrase's end is wrong, the
    next one right again.
    """
    draw = random.Random(2)
    known_phrases = [[draw.randrange(1000) for _ in range(11)] for _ in range(6)]
    return [token_id for _ in range(100) for token_id in draw.choice(known_phrases)]


@pytest.mark.parametrize("hop_ms", [0.4, 1, 2, 5])
def test_text_that_does_not_repeat_is_delayed_by_two_percent_at_most(hop_ms: float) -> None:
    text = random_text()
    plain = Simulation(text, 50, hop_ms / 1000, drafts=False).run()
    drafted = Simulation(text, 50, hop_ms / 1000).run()
    assert drafted.num_proposals > 30, "chance matches must have tempted it"
    assert drafted.wait_s <= 0.02 * plain.duration_s
    assert drafted.duration_s <= 1.02 * plain.duration_s


def test_steps_wait_for_repeating_text_if_the_hop_is_short() -> None:
    with_wait = Simulation(phrases(), 400, 0.0004).run()
    without_wait = Simulation(phrases(), 400, 0.0004, waits=False).run()
    plain = Simulation(phrases(), 400, 0.0004, drafts=False).run()
    assert with_wait.wait_s > 0
    assert with_wait.duration_s < 0.93 * without_wait.duration_s
    assert plain.duration_s / with_wait.duration_s > 2.5


def test_no_step_waits_for_a_hop_longer_than_the_gain() -> None:
    far = Simulation(phrases(), 400, 0.005).run()
    assert far.wait_s == 0
    assert far.num_drafts > 0, "hints still come in, and are realigned"
