"""A step is launched, then waited for, then its result is taken; the engine works in between."""

import threading
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest

from tests.scripted_model import ScriptedModel, continue_by, hashed
from tests.verifier.paged_model import make_small_model, some_tokens
from tests.verifier.running_engine import PATIENCE_S, StartEngine
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.batch.host_step import HostLogits, HostStep
from verifier.batch.target_model import StepHandle, StepResult
from verifier.engine.messages import Rejected
from verifier.engine.observation import Fault
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import History
from verifier.sampling.rejection_sampler import JudgedSequence

PROMPT = [1, 2, 0, 2, 1, 0]


class GatedModel:
    """A `TargetModel` that is told when a step's forward pass may end."""

    def __init__(self, model: ScriptedModel) -> None:
        self.vocab_size = model.vocab_size
        self.computes_at_launch = model.computes_at_launch
        self.calls: list[str] = []
        self.may_end = threading.Semaphore(0)
        self._model = model

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        self.calls.append("launch")
        return _GatedStep(self, self._model.launch(layout, sequences))


class _GatedStep:
    def __init__(self, model: GatedModel, handle: StepHandle) -> None:
        self._model = model
        self._handle = handle

    def wait(self) -> None:
        self._model.calls.append("wait")
        assert self._model.may_end.acquire(timeout=PATIENCE_S)
        self._handle.wait()

    def result(self) -> StepResult:
        self._model.calls.append("result")
        return self._handle.result()


@pytest.mark.stand_in
def test_a_steps_events_are_sent_while_the_next_one_is_under_way(
    start_engine: StartEngine,
) -> None:
    running = start_engine()
    model = GatedModel(running.model)
    with running.held():
        running.engine._model = model
    session = running.attach()
    # Where a session makes the hints, the events go at once.
    sequence_id = session.open(PROMPT, max_new_tokens=3, drafting=False)
    for count in (1, 2):
        model.may_end.release()
        # Sent by the next step, which is under way: it may not end yet.
        assert session.wait_decided(sequence_id, count).token_ids
        assert model.calls[3 * count :] in (["launch"], ["launch", "wait"])
    model.may_end.release()
    session.wait_end(sequence_id)
    assert model.calls == ["launch", "wait", "result"] * 3
    assert session.output(sequence_id) == continue_by(hashed, PROMPT, 3)


@pytest.mark.stand_in
def test_a_sequence_whose_sampling_cannot_be_prepared_fails_alone(
    start_engine: StartEngine,
) -> None:
    running = start_engine()
    session = running.attach()
    other = session.open(PROMPT, max_new_tokens=9)
    with running.held():
        broken = session.open(
            [2, *PROMPT],
            max_new_tokens=9,
            stop_token_ids=frozenset({1, "a"}),
            sampling=Sampling(min_new_tokens=2),
        )
    assert isinstance(session.wait_end(broken), Rejected)
    session.wait_end(other)
    assert session.output(other) == continue_by(hashed, PROMPT, 9)
    running.sync()
    assert running.observer.faults == [Fault.VERIFY]


def layout_of(*num_drafts: int) -> BatchLayout:
    """Sequences whose drafts are 5, 6, 7 ..."""
    return lay_out(
        [
            ScheduledTokens(
                token_ids=[4],
                draft_token_ids=list(range(5, 5 + count)),
                num_computed_tokens=3,
                block_table=[i],
            )
            for i, count in enumerate(num_drafts)
        ],
        block_size=16,
    )


def judged(*num_drafts: int, broken: int = -1) -> list[JudgedSequence]:
    return [
        JudgedSequence(
            sampling=Sampling(temperature=1.0, seed="a" if i == broken else 1),  # type: ignore[arg-type]
            history=History(draft_token_ids=list(range(5, 5 + count))),
            first_position=4,
        )
        for i, count in enumerate(num_drafts)
    ]


def certain(token_ids: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    logits = np.zeros((len(token_ids), 16), dtype=np.float32)
    logits[np.arange(len(token_ids)), token_ids] = 1e9
    return logits


def test_a_host_step_computes_when_it_is_waited_for() -> None:
    computed = []

    def compute() -> HostLogits:
        computed.append(True)
        return HostLogits(certain([5, 9, 3]), None, None)

    step = HostStep(compute, layout_of(1, 0), judged(1, 0))
    assert not computed
    step.wait()
    result = step.result()
    assert computed == [True]
    assert result.verdict.output_token_ids.tolist() == [[5, 9], [3, -1]]
    assert result.verdict.num_accepted_tokens.tolist() == [1, 0]
    assert result.kv_is_finite is None
    np.testing.assert_array_equal(result.logits_of(np.array([2, 0])), certain([3, 5]))


def test_a_row_of_a_draft_whose_kv_is_not_finite_is_not_used() -> None:
    kv_is_finite = np.array([True, False, True])
    step = HostStep(
        lambda: HostLogits(certain([5, 9, 3]), kv_is_finite, None), layout_of(1, 0), judged(1, 0)
    )
    step.wait()
    result = step.result()
    assert result.kv_is_finite is kv_is_finite
    # The accepted draft stands, and nothing follows it.
    assert result.verdict.num_accepted_tokens.tolist() == [1, 0]
    assert result.verdict.is_finite.tolist() == [False, True]


@pytest.mark.parametrize("computes_at_launch", [False, True])
def test_a_transformers_step_is_the_same_whenever_it_is_computed(computes_at_launch: bool) -> None:
    model = make_small_model("llama")
    tokens = some_tokens(20, model.vocab_size)
    layout = lay_out(
        [
            ScheduledTokens(
                token_ids=tokens,
                draft_token_ids=[],
                num_computed_tokens=0,
                block_table=[3, 1],
                scored_offsets=range(4, 8),
            )
        ],
        block_size=16,
        wants_hidden_states=True,
    )
    expected = model.paged.forward(layout)
    model.paged.computes_at_launch = computes_at_launch
    for layer in model.cache._slots:
        layer.zero_()
    step = model.paged.launch(layout, judged(0))
    assert any(bool(layer.any()) for layer in model.cache._slots) is computes_at_launch
    step.wait()
    result = step.result()
    rows = np.arange(layout.num_rows)
    np.testing.assert_array_equal(result.logits_of(rows), expected)
    assert result.hidden_states is not None
    assert result.hidden_states.shape == (4, 64)
