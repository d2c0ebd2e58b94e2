"""The draft buffer against a model that keeps the last useful hint and compares every token."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.volume import examples
from verifier.drafts.draft_buffer import DraftBuffer, HintOutcome

USED, REALIGNED, STALE, LATE = (
    HintOutcome.USED,
    HintOutcome.REALIGNED,
    HintOutcome.STALE,
    HintOutcome.LATE,
)


@pytest.mark.parametrize(
    ("base_length", "token_ids", "outcome"),
    [
        pytest.param(2, [1, 2], LATE, id="all of it is decided"),
        pytest.param(2, [1, 9, 9], STALE, id="contradicted"),
        pytest.param(5, [3], STALE, id="ahead of the sequence"),
        pytest.param(0, [9], STALE, id="contradicted in the prompt"),
    ],
)
def test_reports_the_outcome_of_a_useless_hint(
    base_length: int, token_ids: list[int], outcome: HintOutcome
) -> None:
    buffer = DraftBuffer()
    assert buffer.offer(base_length, token_ids, 1, [0, 0, 1, 2]) is outcome
    assert not buffer


@pytest.mark.parametrize(
    ("grown_by", "draft"),
    [
        pytest.param([5, 3], [7, 8, 9, 10], id="another token in its place"),
        pytest.param([9], [10], id="tokens left out"),
        pytest.param([5, 6, 7, 8, 9, 9], [], id="at the end"),
        pytest.param([9, 6], [], id="before the last token"),
        pytest.param([5, 6, 7, 8, 9, 10, 11], [], id="beyond the end"),
    ],
)
@pytest.mark.parametrize("comes_late", [False, True])
def test_a_hint_is_resumed_behind_its_contradiction(
    grown_by: list[int], draft: list[int], comes_late: bool
) -> None:
    buffer, known, hint = DraftBuffer(), [1, 2], [5, 6, 7, 8, 9, 10]
    if not comes_late:
        buffer.offer(2, hint, 3, known, resumes=True)
    known += grown_by
    if comes_late:
        buffer.offer(2, hint, 3, known, resumes=True)
    else:
        buffer.advance(known, resumes=True)
    assert buffer.ahead(len(known), 9) == draft
    if draft:
        assert buffer.match_length(len(known)) == 0
        assert buffer.is_resumed
        # Its outcome was told.
        assert buffer.use(len(known)) is None
        # As a hint that came whole: it agrees on, and is contradicted.
        assert buffer.advance([*known, draft[0]]) is None
        assert buffer.ahead(len(known) + 1, 9) == draft[1:]


def test_tokens_are_left_out_only_if_the_last_one_comes_soon() -> None:
    for num_between, draft in ((15, [4]), (16, [7] * 16 + [3, 4])):
        buffer = DraftBuffer()
        buffer.offer(1, [9, *[7] * num_between, 3, 4], 1, [0])
        buffer.advance([0, 3], resumes=True)
        assert buffer.ahead(2, 64) == draft


def test_any_hint_takes_the_place_of_a_resumed_one_and_none_is_resumed_in_place_of_another() -> (
    None
):
    buffer, known = DraftBuffer(), [1, 2]
    buffer.offer(2, [5, 6, 7], 3, known)
    known = [1, 2, 9]
    assert buffer.advance(known, resumes=True) is STALE
    # Requested before, and right.
    assert buffer.offer(1, [2, 9, 4], 1, known, resumes=True) is None
    assert buffer.ahead(3, 9) == [4]
    assert buffer.use(3) is REALIGNED
    assert buffer.offer(2, [8, 7, 6], 1, known, resumes=True) is STALE
    assert buffer.ahead(3, 9) == [4]
    # Without a wish for it, a contradicted hint is no more.
    buffer.advance([*known, 5])
    assert not buffer


@dataclass
class _Hint:
    base_length: int
    token_ids: list[int]
    is_used: bool = False


TOKENS = st.integers(0, 1)  # so few that random hints are often right


class DraftBufferMachine(RuleBasedStateMachine):
    """Hints of every kind against a sequence that grows at random."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = DraftBuffer()
        self.known: list[int] = []
        self.hint: _Hint | None = None
        self.num_hints = 0
        self.outcomes: Counter[HintOutcome] = Counter()

    @initialize(prompt=st.lists(TOKENS, min_size=1, max_size=6))
    def begin(self, prompt: list[int]) -> None:
        self.known = prompt

    @rule(behind=st.integers(-2, 8), tokens=st.lists(TOKENS, max_size=12))
    def offer_anything(self, behind: int, tokens: list[int]) -> None:
        self.offer(max(0, len(self.known) - behind), tokens)

    @rule(behind=st.integers(0, 8), ahead=st.lists(TOKENS, max_size=6))
    def offer_what_agrees(self, behind: int, ahead: list[int]) -> None:
        base_length = max(0, len(self.known) - behind)
        self.offer(base_length, self.known[base_length:] + ahead)

    def offer(self, base_length: int, tokens: list[int]) -> None:
        expected = self.expect_offer(base_length, tokens)
        answered = self.buffer.answered_length
        outcome = self.buffer.offer(base_length, list(tokens), len(tokens), self.known)
        assert outcome is expected
        self.count(outcome)
        if base_length <= len(self.known):
            assert self.buffer.answered_length == max(answered, base_length)
        else:
            assert self.buffer.answered_length == answered

    def expect_offer(self, base_length: int, tokens: list[int]) -> HintOutcome | None:
        if not tokens:
            return None
        self.num_hints += 1
        hint = _Hint(base_length, tokens)
        if base_length > len(self.known) or self.contradicts(hint):
            return STALE
        if not self.ahead(hint):
            return LATE
        if self.hint is not None and base_length < self.hint.base_length:
            return LATE
        replaced, self.hint = self.hint, hint
        return LATE if replaced is not None and not replaced.is_used else None

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=4))
    def grow(self, tokens: list[int]) -> None:
        self.known = self.known + tokens
        self.advance()

    @rule(num_tokens=st.integers(1, 12))
    def grow_as_hinted(self, num_tokens: int) -> None:
        if self.hint is not None:
            self.known = self.known + self.ahead(self.hint)[:num_tokens]
            self.advance()

    def advance(self) -> None:
        expected = None
        if self.hint is not None and (self.contradicts(self.hint) or not self.ahead(self.hint)):
            if not self.hint.is_used:
                expected = STALE if self.contradicts(self.hint) else LATE
            self.hint = None
        outcome = self.buffer.advance(self.known)
        assert outcome is expected
        self.count(outcome)

    @rule(num_tokens=st.integers(0, 9))
    def draft(self, num_tokens: int) -> None:
        expected = self.ahead(self.hint)[:num_tokens] if self.hint is not None else []
        assert self.buffer.ahead(len(self.known), num_tokens) == expected
        outcome = self.buffer.use(len(self.known)) if expected else None
        if expected and self.hint is not None and not self.hint.is_used:
            assert outcome is (USED if self.hint.base_length == len(self.known) else REALIGNED)
            self.hint.is_used = True
        else:
            assert outcome is None
        self.count(outcome)

    def count(self, outcome: HintOutcome | None) -> None:
        if outcome is not None:
            self.outcomes[outcome] += 1

    @invariant()
    def is_filled_exactly_when_a_hint_extends_beyond_the_text(self) -> None:
        assert bool(self.buffer) == (self.hint is not None)

    @invariant()
    def every_hint_has_one_outcome(self) -> None:
        untold = self.hint is not None and not self.hint.is_used
        assert self.outcomes.total() + untold == self.num_hints

    def contradicts(self, hint: _Hint) -> bool:
        decided = self.known[hint.base_length :]
        return any(a != b for a, b in zip(hint.token_ids, decided, strict=False))

    def ahead(self, hint: _Hint) -> list[int]:
        """The hint's tokens after the known ones."""
        return hint.token_ids[len(self.known) - hint.base_length :]


DraftBufferMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestAgainstTheNaiveModel = DraftBufferMachine.TestCase
