"""What steps ask of grammars, and when; what raises or panics ends its own sequence only."""

from typing import cast

import pytest
from llguidance import LLMatcher

from tandem.values import DraftWait, StructuredOutput
from tests.scripted_model import continue_by, hashed
from tests.verifier.batch.test_host_step import GatedModel
from tests.verifier.running_engine import PATIENCE_S, StartEngine, start_engine_with
from tests.verifier.structured.watched_grammar import WatchedGrammar
from verifier.engine.messages import Rejected
from verifier.engine.observation import Fault
from verifier.errors import InternalError, InvalidRequestError
from verifier.sampling import Sampling
from verifier.structured.grammar_state import GrammarState
from verifier.tensor_parallel.leader import ParallelModel
from verifier.tensor_parallel.watch import Watch

PROMPT = [1, 2, 0, 2, 1, 0]
GREEDY = Sampling(structured_output=StructuredOutput())


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("sampling", "num_masks"),
    [
        (GREEDY, 0),
        # One for the token and its logprob.
        (Sampling(structured_output=StructuredOutput(), logprobs=0), 4),
        (Sampling(structured_output=StructuredOutput(), temperature=1.0, seed=3), 4),
        (Sampling(structured_output=StructuredOutput(), logit_bias={3: 1.0}), 4),
    ],
    ids=["greedy", "logprobs", "seed", "bias"],
)
def test_a_host_computes_no_mask_where_the_likeliest_token_is_allowed(
    start_engine: StartEngine, sampling: Sampling, num_masks: int
) -> None:
    running = start_engine()
    session, grammar = running.attach(), WatchedGrammar(running.model.vocab_size)
    session.wait_end(session.open(PROMPT, sampling=sampling, grammar=grammar, max_new_tokens=4))
    assert grammar.asked_by == ["engine"] * num_masks
    asks_first = sampling in (GREEDY, Sampling(structured_output=StructuredOutput(), logprobs=0))
    assert grammar.num_checked == (4 if asks_first else 0)


@pytest.mark.stand_in
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_computes_a_mask_while_a_device_computes_the_step(num_ranks: int) -> None:
    running = start_engine_with()
    model = GatedModel(running.model)
    with running.held():
        model.computes_at_launch = True
        running.engine._model = model if num_ranks == 1 else ParallelModel(model, [], Watch())
    session, grammar = running.attach(), WatchedGrammar(running.model.vocab_size)
    grammar.may_end.clear()
    sequence_id = session.open(PROMPT, sampling=GREEDY, grammar=grammar, max_new_tokens=1)
    assert grammar.is_asked.wait(PATIENCE_S)
    assert (grammar.asked_by, model.calls) == (["engine"], ["launch"])
    grammar.may_end.set()
    model.may_end.release()
    session.wait_end(sequence_id)
    running.stop()


@pytest.mark.stand_in
@pytest.mark.parametrize("is_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("error", [InvalidRequestError("too complex"), ValueError("a fault")])
def test_a_grammar_that_fails_ends_its_own_sequence(
    start_engine: StartEngine, error: Exception, is_device: bool
) -> None:
    running = start_engine()
    session = running.attach()
    vocab_size = running.model.vocab_size
    with running.held():
        running.model.computes_at_launch = is_device
        free = session.open(PROMPT, max_new_tokens=9)
        wrong = session.open(
            PROMPT, sampling=GREEDY, grammar=WatchedGrammar(vocab_size, error), max_new_tokens=9
        )
        other = session.open(
            PROMPT, sampling=GREEDY, grammar=WatchedGrammar(vocab_size), max_new_tokens=9
        )
    rejected = session.wait_end(wrong)
    assert isinstance(rejected, Rejected)
    is_own = not isinstance(error, InvalidRequestError)
    assert isinstance(rejected.error, InternalError if is_own else InvalidRequestError)
    for each in (free, other):
        session.wait_end(each)
        assert session.output(each) == continue_by(hashed, PROMPT, 9)
    assert running.observer.faults == [Fault.VERIFY] * is_own


class Panic(BaseException):
    """As the library's: no Exception."""


class PanickingMatcher:
    """Follows whatever comes; its method `name` panics."""

    def __init__(self, name: str, forced: list[int]) -> None:
        """`forced`: the tokens of the text that must come, again and again."""

        def panic(*_: object) -> None:
            raise Panic

        self._forced = forced
        setattr(self, name, panic)

    def is_error(self) -> bool:
        return False

    def consume_tokens(self, token_ids: list[int]) -> bool:
        return True

    def validate_tokens(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> bool:
        return True

    def compute_ff_bytes(self) -> bytes:
        return b"text" if self._forced else b""

    def compute_ff_tokens(self) -> list[int]:
        return self._forced

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        raise AssertionError("not in these tests")


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("name", "forced", "drafts", "is_device"),
    [
        ("consume_tokens", [], [], False),
        ("compute_ff_bytes", [], [], False),
        ("compute_ff_tokens", [2], [], False),
        ("validate_tokens", [], [], False),
        ("unsafe_compute_mask_ptr", [], [], True),
        ("validate_tokens", [2, 2, 2], [2, 2], False),
        ("try_consume_tokens", [2, 2, 2], [2, 2], False),
        ("rollback", [2, 2, 2], [2, 2], False),
    ],
)
def test_a_panic_of_the_library_ends_its_own_sequence(
    start_engine: StartEngine, name: str, forced: list[int], drafts: list[int], is_device: bool
) -> None:
    """When drafts are chosen, when masks are computed, and when tokens are sampled."""
    running = start_engine()
    matchers = (cast(LLMatcher, PanickingMatcher(name, forced)) for _ in range(2))
    grammar = GrammarState(
        *matchers,
        may_begin=lambda *_: False,
        vocab_size=running.model.vocab_size,
        end_token_ids=(),
        field="field",
    )
    session = running.attach()
    with running.held():
        running.model.computes_at_launch = is_device
        other = session.open(PROMPT, max_new_tokens=9)
        panicking = session.open(
            PROMPT,
            sampling=GREEDY,
            grammar=grammar,
            max_new_tokens=9,
            num_speculative_tokens=len(drafts),
            draft_wait=DraftWait.ALWAYS,
        )
    if drafts:
        session.wait_decided(panicking, 1)
        session.hint(panicking, len(PROMPT) + 1, drafts)
    end = session.wait_end(panicking)
    assert isinstance(end, Rejected)
    assert isinstance(end.error, InternalError)
    session.wait_end(other)
    assert session.output(other) == continue_by(hashed, PROMPT, 9)
    assert running.observer.faults == [Fault.SCHEDULE if drafts else Fault.VERIFY]
