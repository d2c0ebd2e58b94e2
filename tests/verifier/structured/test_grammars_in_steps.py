"""What steps ask of grammars, and when; what raises ends its own sequence only."""

import pytest

from tests.scripted_model import continue_by, hashed
from tests.verifier.running_engine import PATIENCE_S, StartEngine, start_engine_with
from tests.verifier.structured.watched_grammar import WatchedGrammar
from tests.verifier.test_host_step import GatedModel
from verifier.engine.messages import Rejected
from verifier.engine.observation import Fault
from verifier.errors import InternalError, InvalidRequestError
from verifier.sampling import Sampling

PROMPT = [1, 2, 0, 2, 1, 0]
GREEDY = Sampling(is_constrained=True)


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("sampling", "num_masks"),
    [
        (GREEDY, 0),
        # One for the token and its logprob.
        (Sampling(is_constrained=True, logprobs=0), 4),
        (Sampling(is_constrained=True, temperature=1.0, seed=3), 4),
        (Sampling(is_constrained=True, logit_bias=((3, 1.0),)), 4),
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
    asks_first = sampling in (GREEDY, Sampling(is_constrained=True, logprobs=0))
    assert grammar.num_checked == (4 if asks_first else 0)


@pytest.mark.stand_in
def test_an_engine_computes_a_mask_while_a_device_computes_the_step() -> None:
    running = start_engine_with()
    model = GatedModel(running.model)
    with running.held():
        running.engine._model = model
        running.engine._computes_at_launch = True
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
        running.engine._computes_at_launch = is_device
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
