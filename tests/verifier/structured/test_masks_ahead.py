"""Masks that are computed while the forward pass runs: the same ones, each grammar in one thread at
a time, and what raises ends its own sequence only.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from structlog.testing import capture_logs

from tests.scripted_model import continue_by, hashed
from tests.verifier.running_engine import PATIENCE_S, StartEngine, start_engine_with
from tests.verifier.test_host_step import GatedModel
from verifier.engine.messages import Rejected
from verifier.engine.observation import Fault
from verifier.errors import InternalError, InvalidRequestError
from verifier.sampling import Sampling
from verifier.structured.grammar_state import GrammarState
from verifier.structured.grammars import Grammar, GrammarKind, Grammars
from verifier.structured.masks_ahead import MasksAhead

TOKENIZER = Path(__file__).parents[3] / "examples" / "demo_model" / "model" / "tokenizer.json"
PROMPT = [1, 2, 0, 2, 1, 0]
GREEDY = Sampling(is_constrained=True)


class Watched:
    """In place of a `GrammarState`: allows all tokens, and notes the threads that ask."""

    def __init__(self, vocab_size: int = 32, error: BaseException | None = None) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.asked_by: list[str] = []
        self.num_computed = 0
        self.is_asked = threading.Event()
        self._error = error
        self._masks = np.full((1, (vocab_size + 31) // 32), -1, dtype=np.int32)
        self._is_computed = False
        self._is_in_use = threading.Lock()

    def take_in(self, token_ids: Sequence[int], prompt_length: int) -> None:
        assert not self._is_in_use.locked(), "two threads"
        self._is_computed = False

    def forced(self, limit: int) -> list[int]:
        return []

    def has_masks(self, draft_token_ids: Sequence[int]) -> bool:
        return self._is_computed

    def allowed(self, draft_token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        assert self._is_in_use.acquire(blocking=False), "two threads"
        try:
            self.asked_by.append(threading.current_thread().name)
            self.is_asked.set()
            assert self.may_end.wait(PATIENCE_S)
            if self._error is not None:
                raise self._error
            self.num_computed += not self._is_computed
            self._is_computed = True
            return self._masks
        finally:
            self._is_in_use.release()

    def as_state(self) -> GrammarState:
        return cast(GrammarState, self)


@pytest.fixture
def ahead() -> Iterator[MasksAhead]:
    ahead = MasksAhead()
    yield ahead
    ahead.close()
    assert ahead._thread is None or not ahead._thread.is_alive()


def begin(ahead: MasksAhead, *watched: Watched) -> None:
    ahead.begin([(each.as_state(), []) for each in watched])


def test_masks_are_those_that_are_computed_without_it(ahead: MasksAhead) -> None:
    grammars = Grammars(TOKENIZER, vocab_size=2048, end_token_ids=[0])

    def states() -> list[GrammarState]:
        return [
            grammars.compile(Grammar(GrammarKind.REGEX, text)).result(timeout=60)
            for text in ("[a-z]+", "(the total|the sum) is [0-9]{3}(, [a-z]{4}){3}", '"[^"]{9}"')
        ]

    alone, asked = states(), states()
    draw = random.Random(5)
    outputs: list[list[int]] = [[] for _ in alone]
    for _ in range(30):
        for state, other, output in zip(alone, asked, outputs, strict=True):
            state.take_in(output, 0)
            other.take_in(output, 0)
        ahead.begin([(state, []) for state in asked])
        expected = [state.allowed([]) for state in alone]
        ahead.finish()
        for state, masks, output in zip(asked, expected, outputs, strict=True):
            assert state.has_masks([])
            assert np.array_equal(state.allowed([]), masks)
            bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
            # But for the end.
            output += draw.sample(np.flatnonzero(bits).tolist(), 1) if not bits[0] else []
    grammars.close()


def test_the_thread_computes_them_while_the_caller_does_something_else(ahead: MasksAhead) -> None:
    watched = [Watched() for _ in range(3)]
    begin(ahead, *watched)
    assert all(each.is_asked.wait(PATIENCE_S) for each in watched)
    ahead.finish()
    assert [each.asked_by for each in watched] == [["masks"]] * 3


def test_what_the_thread_has_not_begun_the_caller_computes(ahead: MasksAhead) -> None:
    held, *others = [Watched() for _ in range(4)]
    held.may_end.clear()
    begin(ahead, held, *others)
    assert held.is_asked.wait(PATIENCE_S)

    # Once the last one is computed the caller waits for the one that the thread has begun.
    def let_go_at_the_end() -> None:
        others[-1].is_asked.wait(PATIENCE_S)
        held.may_end.set()

    let_go = threading.Thread(target=let_go_at_the_end)
    let_go.start()
    ahead.finish()
    let_go.join()
    own = threading.current_thread().name
    assert [each.asked_by for each in (held, *others)] == [["masks"], [own], [own], [own]]
    assert all(each.num_computed == 1 for each in (held, *others))


def test_the_caller_waits_for_the_mask_that_the_thread_has_begun(ahead: MasksAhead) -> None:
    held, other = Watched(), Watched()
    held.may_end.clear()
    begin(ahead, held, other)
    assert held.is_asked.wait(PATIENCE_S)
    finishing = threading.Thread(target=ahead.finish)
    finishing.start()
    finishing.join(0.05)
    assert finishing.is_alive()
    held.may_end.set()
    finishing.join(PATIENCE_S)
    assert held.num_computed == other.num_computed == 1


@pytest.mark.parametrize("error", [InvalidRequestError("too complex"), BaseException("a panic")])
def test_what_raises_leaves_the_others_their_masks(ahead: MasksAhead, error: BaseException) -> None:
    wrong, other = Watched(error=error), Watched()
    for _ in range(3):
        begin(ahead, wrong, other)
        ahead.finish()
        assert other.has_masks([])
        assert not wrong.has_masks([])
        other.take_in([], 0)


def test_the_thread_is_woken_for_two_sequences_whose_masks_are_not_there(ahead: MasksAhead) -> None:
    has_masks, asked = Watched(), Watched()
    has_masks.allowed([])
    begin(ahead)
    ahead.finish()
    begin(ahead, has_masks, asked, has_masks)
    ahead.finish()
    assert ahead._thread is None
    own = threading.current_thread().name
    assert [each.asked_by for each in (has_masks, asked)] == [[own], [own]]
    pair = [Watched(), Watched()]
    begin(ahead, *pair)
    assert all(each.is_asked.wait(PATIENCE_S) for each in pair)
    ahead.finish()
    assert [each.asked_by for each in pair] == [["masks"]] * 2


def test_no_grammar_is_in_two_threads_and_none_is_left_out(ahead: MasksAhead) -> None:
    """Whichever of them is faster."""
    draw = random.Random(7)
    for _ in range(2000):
        watched = [Watched() for _ in range(draw.randrange(5))]
        begin(ahead, *watched)
        for _ in range(draw.choice((0, 0, 10, 300))):
            pass
        ahead.finish()
        assert [each.num_computed for each in watched] == [1] * len(watched)


def test_a_close_may_come_first_and_twice() -> None:
    ahead = MasksAhead()
    ahead.close()
    ahead.close()
    watched = [Watched(), Watched()]
    begin(ahead, *watched)
    ahead.finish()
    assert [each.num_computed for each in watched] == [1, 1]
    assert ahead._thread is not None
    ahead._thread.join(PATIENCE_S)
    assert not ahead._thread.is_alive()


@pytest.fixture
def refused_starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads of masks that did not start, as at a limit of processes."""
    names: list[str] = []
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "masks":
            names.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    return names


def test_where_no_thread_starts_the_caller_computes_and_tries_no_more(
    refused_starts: list[str],
) -> None:
    ahead = MasksAhead()
    own = threading.current_thread().name
    with capture_logs() as log:
        for _ in range(3):
            watched = [Watched() for _ in range(3)]
            begin(ahead, *watched)
            ahead.finish()
            assert [each.asked_by for each in watched] == [[own]] * 3
    assert [each["event"] for each in log] == ["masks_without_a_thread"]
    assert len(refused_starts) == 1
    ahead.close()
    ahead.close()


@pytest.mark.stand_in
def test_an_engine_that_gets_no_thread_for_masks_goes_on(
    start_engine: StartEngine, refused_starts: list[str]
) -> None:
    running = start_engine()
    session = running.attach()
    grammars = [Watched(running.model.vocab_size) for _ in range(2)]
    with running.held():
        opened = [
            session.open(PROMPT, sampling=GREEDY, grammar=each, max_new_tokens=3)
            for each in grammars
        ]
    for each in opened:
        session.wait_end(each)
        assert session.output(each) == continue_by(hashed, PROMPT, 3)
    assert len(refused_starts) == 1
    assert {name for each in grammars for name in each.asked_by} == {"engine"}


@pytest.mark.stand_in
def test_an_engine_computes_masks_during_the_forward_pass() -> None:
    running = start_engine_with()
    model = GatedModel(running.model)
    with running.held():
        running.engine._model = model
    session = running.attach()
    grammars = [Watched(running.model.vocab_size) for _ in range(2)]
    with running.held():
        first, second = (
            session.open(PROMPT, sampling=GREEDY, grammar=each, max_new_tokens=2)
            for each in grammars
        )
    # The pass may not end yet.
    assert all(each.is_asked.wait(PATIENCE_S) for each in grammars)
    assert [each.asked_by for each in grammars] == [["masks"]] * 2
    # A close finds the step under way, and is handled after it.
    session.close(first)
    model.may_end.release(9)
    session.wait_end(first)
    session.wait_end(second)
    assert session.output(second) == continue_by(hashed, PROMPT, 2)
    running.stop()
    thread = running.engine._masks._thread
    assert thread is not None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.stand_in
def test_an_engine_computes_a_mask_itself_while_a_device_computes_the_step() -> None:
    running = start_engine_with()
    model = GatedModel(running.model)
    with running.held():
        running.engine._model = model
        running.engine._computes_at_launch = True
    session, grammar = running.attach(), Watched(running.model.vocab_size)
    grammar.may_end.clear()
    sequence_id = session.open(PROMPT, sampling=GREEDY, grammar=grammar, max_new_tokens=1)
    assert grammar.is_asked.wait(PATIENCE_S)
    assert (grammar.asked_by, model.calls) == (["engine"], ["launch"])
    grammar.may_end.set()
    model.may_end.release()
    session.wait_end(sequence_id)
    running.stop()


@pytest.mark.stand_in
@pytest.mark.parametrize("error", [InvalidRequestError("too complex"), ValueError("a fault")])
def test_a_grammar_that_fails_ends_its_own_sequence(
    start_engine: StartEngine, error: Exception
) -> None:
    running = start_engine()
    session = running.attach()
    vocab_size = running.model.vocab_size
    with running.held():
        free = session.open(PROMPT, max_new_tokens=9)
        wrong = session.open(
            PROMPT, sampling=GREEDY, grammar=Watched(vocab_size, error), max_new_tokens=9
        )
        other = session.open(PROMPT, sampling=GREEDY, grammar=Watched(vocab_size), max_new_tokens=9)
    rejected = session.wait_end(wrong)
    assert isinstance(rejected, Rejected)
    is_own = not isinstance(error, InvalidRequestError)
    assert isinstance(rejected.error, InternalError if is_own else InvalidRequestError)
    for each in (free, other):
        session.wait_end(each)
        assert session.output(each) == continue_by(hashed, PROMPT, 9)
    assert running.observer.faults == [Fault.VERIFY] * is_own
