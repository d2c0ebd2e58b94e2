"""A run in process ends with the error that keeps its tasks from ending."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import in_process
from benchmarks.gpu.bench import ON_CPU, Bench
from benchmarks.gpu.shapes import TINY
from benchmarks.in_process import InProcessEngine, StepTimes
from benchmarks.serving.simulation import TimedEngine
from benchmarks.workloads import Task
from verifier.batch.target_model import StepHandle
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.engine.messages import Decided
from verifier.errors import OverloadedError

TASKS = [Task(prompt_token_ids=[1, 2, 3], max_new_tokens=4)] * 3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[VerifierConfig, LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("models")
    bench = Bench(device=torch.device("cpu"), size=ON_CPU, folder=folder, say=lambda line: None)
    return bench.loaded(TINY)


@pytest.fixture
def engine(built: tuple[VerifierConfig, LoadedModel]) -> Iterator[InProcessEngine]:
    with InProcessEngine(*built).started() as engine:
        yield engine


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "PATIENCE_S", 60.0)


def run(engine: InProcessEngine) -> int:
    return engine.run(TASKS, streams=2, speculate=False).num_tokens


def test_an_engine_that_fails_ends_the_run_with_its_error(
    built: tuple[VerifierConfig, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.AcceleratorError("an illegal memory access")

    def launch(*_: object) -> None:
        raise error

    monkeypatch.setattr(built[1].model, "launch", launch)
    engine = InProcessEngine(*built)
    # `started` would raise it, too.
    engine._engine.start()
    with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):
        run(engine)


def test_a_run_on_a_stopped_engine_is_refused(
    built: tuple[VerifierConfig, LoadedModel],
) -> None:
    with InProcessEngine(*built).started() as engine:
        run(engine)
    with pytest.raises(RuntimeError, match="the engine was stopped"):
        run(engine)


def test_a_rejected_task_ends_the_run(built: tuple[VerifierConfig, LoadedModel]) -> None:
    config, loaded = built
    config = config.model_copy(update={"max_num_waiting": 1})
    with InProcessEngine(config, loaded).started() as engine, pytest.raises(OverloadedError):
        engine.run(TASKS * 100, streams=300, speculate=False)


def test_an_observer_that_raises_ends_the_run_and_the_next_one_works(
    engine: InProcessEngine,
) -> None:
    def observe(decided: Decided) -> None:
        raise ValueError(decided.sequence_id)

    with pytest.raises(ValueError, match=r"^0$"):
        engine.run(TASKS, streams=1, speculate=False, observe=observe)
    assert run(engine) == 12


def test_an_engine_that_hangs_is_told(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "PATIENCE_S", 0.0)
    with pytest.raises(TimeoutError, match="no task has ended for 0 s"):
        run(engine)
    monkeypatch.undo()


def test_a_timed_engine_takes_each_steps_own_drafting_off(
    built: tuple[VerifierConfig, LoadedModel],
) -> None:
    """In the second run, too."""
    tasks = [Task(prompt_token_ids=[1, 2, 3] * 10, max_new_tokens=40)] * 4
    engine = TimedEngine(built[0])
    with engine.started():
        for _ in range(2):
            engine.steps.clear()
            seen: list[StepTimes] = []
            counts = engine.run(tasks, streams=2, speculate=True, observe_step=seen.append)
            drafted_s = counts.draft_s
            assert drafted_s > 0
            assert all(duration_s > 0 for _, duration_s in engine.steps)
            whole_s = sum(sum(step.phase_durations_s.values()) for step in seen)
            own_s = sum(step.draft_s for step in seen)
            timed_s = sum(duration_s for _, duration_s in engine.steps)
            assert timed_s == pytest.approx(whole_s)
            # What a task's end takes is in no step.
            assert 0 < own_s < drafted_s


@pytest.mark.parametrize("speculate", [False, True])
def test_a_runs_counts_are_those_of_its_own_steps(
    built: tuple[VerifierConfig, LoadedModel], monkeypatch: pytest.MonkeyPatch, speculate: bool
) -> None:
    num_launched = 0
    launch = built[1].model.launch

    def counted(*given: Any) -> StepHandle:
        nonlocal num_launched
        num_launched += 1
        return launch(*given)

    monkeypatch.setattr(built[1].model, "launch", counted)
    with InProcessEngine(*built).started() as engine:
        for _ in range(20):
            num_launched = 0
            counts = engine.run(TASKS, streams=2, speculate=speculate)
            assert counts.num_steps == num_launched


@pytest.mark.parametrize("speculate", [False, True])
def test_time_of_drafting_is_in_no_phase(engine: InProcessEngine, speculate: bool) -> None:
    """And learning and sending, which are in the phase forward, are the host's."""
    tasks = [Task(prompt_token_ids=[1, 2, 3] * 10, max_new_tokens=12)] * 3
    seen: list[StepTimes] = []
    begun_s = time.perf_counter()
    counts = engine.run(
        tasks,
        streams=2,
        speculate=speculate,
        # More than all that is neither a step nor drafting.
        observe=lambda decided: time.sleep(0.05),
        observe_step=seen.append,
    )
    elapsed_s = time.perf_counter() - begun_s
    assert len(seen) == counts.num_steps
    assert all(min(step.phase_durations_s.values()) > 0 for step in seen)
    assert counts.steps_s + counts.draft_s < elapsed_s
    assert 0 < counts.model_s < counts.phase_durations_s["forward"]
    assert 0 < counts.host_share < 1
