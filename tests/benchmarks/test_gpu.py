"""benchmarks.gpu on a CPU: every row measures something, and a failure keeps nothing from running.

No figure here says anything about a GPU.
"""

import importlib.util
import itertools
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bench, products, steps, strict, supervisor, worker
from benchmarks.gpu.bench import ON_CPU, Bench, counting_down
from benchmarks.gpu.engines import full_step_ms
from benchmarks.gpu.peers import of_one_length
from benchmarks.gpu.rows import ROWS, RowPlan
from benchmarks.gpu.shapes import LLAMA_3_8B, QWEN3_0_6B, TINY, write_checkpoint
from benchmarks.gpu.steps import step_layout
from benchmarks.gpu.supervisor import Supervisor
from benchmarks.gpu.texts import Text, all_texts, random_texts, replays
from benchmarks.in_process import StepTimes
from benchmarks.ratios import Interval
from benchmarks.serving.turns import Goal, Measure, Variant
from benchmarks.workloads import Task
from tests.benchmarks.processes import is_running
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.cpu.loading.refusals import CheckpointError

CPU = torch.device("cpu")
SCRIPTED = "tests.benchmarks.scripted_gpu_worker"


@pytest.mark.slow
async def test_every_row_measures_something_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert (
        await command.main(["--device", "cpu", "--quick", "--no-tests", "--json", str(file)]) == 0
    )
    run = json.loads(file.read_text())
    measured = {row: list(of_row) for row, of_row in itertools.groupby(run["measures"], by_row)}
    assert list(measured) == list(ROWS)
    for measures in measured.values():
        values = [measure["value"] for measure in measures if measure["value"] is not None]
        assert values
        assert all(0 < value["low"] <= value["median"] <= value["high"] for value in values)
    # Backends of a GPU say that they are.
    missing = {measure["note"] for measure in run["measures"] if measure["value"] is None}
    assert all("runs on a GPU only" in note for note in missing)
    # With drafts and without.
    assert len(measured["host"]) == len(measured["stack"]) == 2
    replayed = {row for row in ROWS if "recorded text" in measured[row][0]["note"]}
    assert replayed == {"speculation", "host", "random", "stack"}
    assert {measure["goal"] for measure in run["measures"]} == {None}
    assert "torch" in run["machine"]
    printed = capsys.readouterr().out
    assert printed.count("| decode: step of tiny at 64 tokens / its floor | 1 | float32 |") == 2


async def test_without_a_gpu_every_row_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert await command.main(["--no-tests", "--rows", "decode", "stack"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("not measured: torch sees no GPU here" in line for line in lines) == 2 * 2


def by_row(measure: dict[str, str]) -> str:
    return measure["row"]


async def supervise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: dict[str, str],
    *,
    limit_s: float = 60,
    is_over_early: Literal["", "row", "all"] = "",
) -> tuple[Supervisor, list[Measure]]:
    """Runs the script; `is_over_early`: whose time is over when a row that hangs has measured."""
    plans = {name: RowPlan(module="x", function="x", enough_s=0, most_s=limit_s) for name in script}
    monkeypatch.setattr(supervisor, "ROWS", plans)
    monkeypatch.setenv("SCRIPT", json.dumps(script))
    kept: list[Measure] = []

    def keep(measure: Measure) -> None:
        kept.append(measure)
        if measure.note == "early" and is_over_early == "row":
            plans[measure.row] = replace(plans[measure.row], most_s=0)
        elif measure.note == "early":
            supervised.end_s = time.monotonic()

    supervised = Supervisor(
        device="cpu",
        folder=tmp_path,
        is_quick=True,
        end_s=time.monotonic() + 60,
        keep=keep,
        module=SCRIPTED,
    )
    await supervised.run(list(script))
    return supervised, kept


async def test_rows_that_fail_say_why_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {
        "a": "measure",
        "b": "error",
        "c": "measure",
        "d": "fatal",
        "e": "die",
        "f": "measure",
    }
    supervised, kept = await supervise(tmp_path, monkeypatch, script)
    assert [measure.row for measure in kept] == list(script)
    assert supervised.failed == ["b", "d", "e"]
    assert supervised.machine == "a machine"
    notes = {measure.row: measure.note for measure in kept if measure.value is None}
    assert notes == {
        "b": "not measured: CUDA error: no",
        "d": "not measured: CUDA error: no",
        "e": "not measured: its process ended with status 7",
    }
    assert kept[0].value == Interval(median=1.5, low=1.0, high=2.0)
    assert kept[0].goal == Goal(value=2.0, is_most=True)


async def test_a_row_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = {"a": "hang", "b": "measure"}
    supervised, kept = await supervise(tmp_path, monkeypatch, script, is_over_early="row")
    assert supervised.failed == ["a"]
    # What it had measured is kept.
    assert kept[0].note == "early"
    assert kept[1].note.startswith("not measured: not done after ")
    assert kept[2].value is not None
    child = int(capfd.readouterr().err.split()[-1])
    assert not is_running(child)


async def test_loading_takes_none_of_a_rows_time_and_has_a_limit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {"a": "load", "b": "measure"}
    supervised, kept = await supervise(tmp_path, monkeypatch, script, limit_s=0.5)
    assert not supervised.failed
    assert all(measure.value is not None for measure in kept)
    monkeypatch.setattr(supervisor, "LOADING_S", 3.0)
    script = {"a": "load for ever", "b": "measure"}
    supervised, kept = await supervise(tmp_path, monkeypatch, script, limit_s=60)
    assert supervised.failed == ["a"]
    assert kept[0].note == "not measured: not loaded after 3 s"


async def test_no_row_begins_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = {"a": "hang", "b": "measure", "c": "measure"}
    _, kept = await supervise(tmp_path, monkeypatch, script, is_over_early="all")
    assert [measure.note for measure in kept[2:]] == [
        "not measured: the time for all rows is over"
    ] * 2


async def test_a_row_that_raises_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = RowPlan(module="texts", function="absent", enough_s=1, most_s=1)
    monkeypatch.setattr(worker, "ROWS", {"decode": plan})
    await worker.main(["--folder", str(tmp_path), "--device", "cpu", "--rows", "decode"])
    machine, row = (
        json.loads(line.removeprefix(worker.MARK)) for line in capsys.readouterr().out.splitlines()
    )
    assert "cores" in machine["machine"]
    assert row["error"].startswith("AttributeError: ")
    assert row["is_last"] is False


@pytest.mark.parametrize("where", ["the row", "what it left"])
async def test_after_an_error_on_a_gpu_nothing_runs_in_its_process(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    async def measure(bench: Bench) -> AsyncIterator[Measure]:
        yield bench.measure("decode", "x", 1, None)
        if where == "the row":
            fail()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    monkeypatch.setattr(worker, "_machine", lambda device: "a stand-in for a GPU")
    monkeypatch.setattr(RowPlan, "load", lambda plan: measure)
    argv = ["--folder", str(tmp_path), "--device", "cuda", "--rows", "decode", "verify"]
    await worker.main(argv)
    _, _, row = (
        json.loads(line.removeprefix(worker.MARK)) for line in capsys.readouterr().out.splitlines()
    )
    assert row == {
        "row": "decode",
        "error": "RuntimeError: an illegal memory access",
        "is_last": True,
    }


class Clock:
    """Time that passes only by what takes it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def variant(self, duration_s: float) -> Variant:
        async def turn() -> float:
            self.now_s += duration_s
            return duration_s

        return Variant(name="x", streams=1, turn=turn)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bench, "time", clock)
    return clock


def bench_of_seven_rounds(folder: Path) -> Bench:
    size = replace(ON_CPU, rounds=7)
    return Bench(device=CPU, size=size, folder=folder, say=lambda line: None)


async def test_a_row_that_loads_for_long_is_measured_as_long(tmp_path: Path, clock: Clock) -> None:
    measuring, told = bench_of_seven_rounds(tmp_path), list[bool]()
    measuring.deadline_s, measuring.tell_loading = clock.now_s + 10, told.append
    with measuring.loading():
        assert told == [True]
        clock.now_s += 60
    assert told == [True, False]
    variant = clock.variant(1)
    await measuring.compare(variant)
    assert len(variant.figures) == 7


async def test_a_row_without_time_has_an_interval_all_the_same(
    tmp_path: Path, clock: Clock
) -> None:
    variant = clock.variant(1)
    await bench_of_seven_rounds(tmp_path).compare(variant)
    assert len(variant.figures) == 3


async def test_a_slow_comparison_leaves_the_others_their_share(
    tmp_path: Path, clock: Clock
) -> None:
    measuring = bench_of_seven_rounds(tmp_path)
    measuring.deadline_s = clock.now_s + 30
    variants = [clock.variant(duration_s) for duration_s in (4, 1, 1)]
    for num_left, variant in counting_down(variants):
        await measuring.compare(variant, num_left=num_left)
    assert [len(variant.figures) for variant in variants] == [3, 7, 6]


async def test_a_backend_of_the_sweep_that_cannot_run_says_why_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*_: object, **__: object) -> object:
        raise error

    bench = Bench(device=CPU, size=ON_CPU, folder=tmp_path, say=lambda line: None)
    monkeypatch.setattr(steps, "choose_attention", choose)
    error: Exception = ImportError("no compiler")
    measures = [measure async for measure in steps.measure_sweep(bench)]
    assert len(measures) > 1
    assert {measure.value for measure in measures} == {None}
    assert {measure.note for measure in measures} == {"not measured: ImportError: no compiler"}
    # Nothing runs on the device after it.
    error = torch.AcceleratorError("an illegal memory access")
    with pytest.raises(torch.AcceleratorError):
        await anext(steps.measure_sweep(bench))


async def test_the_row_of_the_kernel_fails_with_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*_: object, **__: object) -> object:
        raise RuntimeError("CompilationError")

    bench = Bench(device=CPU, size=ON_CPU, folder=tmp_path, say=lambda line: None)
    monkeypatch.setattr(steps, "choose_attention", choose)
    with pytest.raises(RuntimeError, match="CompilationError"):
        await anext(steps.measure_kernel(bench))


async def test_strict_bits_that_depend_on_the_step_fail_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: VerifierConfig) -> LoadedModel:
        raise CheckpointError("the bits of logits depend on chunks on this GPU")

    monkeypatch.setattr(bench, "load_model", load)
    measuring = Bench(device=CPU, size=ON_CPU, folder=tmp_path, say=lambda line: None)
    with pytest.raises(CheckpointError):
        await anext(strict.measure(measuring))


async def test_a_device_without_strict_numerics_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, "unsupported_reason", lambda: "no AVX2")
    bench = Bench(device=CPU, size=ON_CPU, folder=tmp_path, say=lambda line: None)
    [measure] = [measure async for measure in strict.measure(bench)]
    assert (measure.value, measure.note) == (None, "not offered: no AVX2")


def test_checkpoints_are_written_once_and_load(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY, tmp_path, device=CPU, dtype=torch.bfloat16)
    changed = (folder / "config.json").stat().st_mtime_ns
    assert write_checkpoint(TINY, tmp_path, device=CPU, dtype=torch.bfloat16) == folder
    assert (folder / "config.json").stat().st_mtime_ns == changed
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, told = loaded
    assert not told["missing_keys"]
    assert model.dtype is torch.bfloat16
    logits = model(torch.arange(10)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert TINY.step_weights_bytes(2) == sum(each.nbytes for each in model.parameters())


def test_the_hosts_time_is_that_of_steps_with_all_streams() -> None:
    def step(num_sampled: int, commit_s: float) -> StepTimes:
        times = {"schedule": 0.001, "forward": 0.002, "verify": 0.003, "commit": commit_s}
        return StepTimes(num_sampled=num_sampled, phase_durations_s=times, draft_s=0.004)

    steps = [step(2, 0.1), step(64, 0.01), step(58, 0.03), step(57, 0.1), step(3, 0.1)]
    expected = {"schedule": 1, "forward": 2, "verify": 3, "commit": 20, "draft": 4}
    assert full_step_ms(steps, 64) == pytest.approx(expected)
    with pytest.raises(RuntimeError, match="no step sampled 90% of 65 sequences"):
        full_step_ms(steps[3:], 65)


def test_shapes_have_the_known_numbers_of_weights() -> None:
    # 8.03e9 less 128256 embeddings of 4096; 0.596e9, whose embeddings are the output layer, too.
    assert LLAMA_3_8B.step_weights_bytes(1) == 8_030_261_248 - 128256 * 4096
    assert QWEN3_0_6B.step_weights_bytes(1) == 596_049_920


def test_replayed_texts_are_told_from_each_other_by_their_first_tokens() -> None:
    texts = all_texts(64)
    beginnings = {tuple(task.prompt_token_ids[:64]) for task, _ in texts}
    assert len(beginnings) == len(texts) >= 128 + 64
    assert all(len(task.prompt_token_ids) >= 64 for task, _ in texts)
    assert all(0 < task.max_new_tokens <= min(64, len(text)) for task, text in texts)
    # Code edits copy, random texts do not.
    assert num_copied_pairs(replays(64)[0]) > 20
    assert num_copied_pairs(random_texts(64)[0]) < 3


def num_copied_pairs(text: Text) -> int:
    """Different pairs of tokens that a text has in common with its prompt."""
    task, output = text
    return len(set(itertools.pairwise(output)) & set(itertools.pairwise(task.prompt_token_ids)))


def test_prompts_of_one_length_for_a_compiled_graph() -> None:
    tasks = [Task(prompt_token_ids=range(length), max_new_tokens=length) for length in (5, 3, 4)]
    cut = of_one_length(tasks, 7)
    assert [(list(task.prompt_token_ids), task.max_new_tokens) for task in cut] == [
        ([0, 1, 2], 7)
    ] * 3


def test_a_steps_sequences_have_blocks_of_their_own() -> None:
    layout = step_layout([(40, 1), (33, 9)], 16, 6)
    assert layout.block_tables == [[0, 1, 2], [3, 4, 5]]
    assert layout.seq_lens.tolist() == [40, 33]
    assert layout.positions.tolist() == [39, *range(24, 33)]
    assert layout.num_rows == 10
    # A model that knows the tables of other lengths reads these anew.
    others = [step_layout(each, 16, 99) for each in ([(160, 1)], [(40, 1)] * 4, [(80, 1)] * 2)]
    assert len({table for other in others for table in other.table_ids}) == 7
    # With too few, they share.
    assert step_layout([(40, 1), (33, 1)], 16, 4).block_tables == [[0, 1, 2], [3, 0, 1]]


def test_drawing_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command._parse(["--png", os.devnull])
    assert "needs matplotlib" in capsys.readouterr().err


async def test_products_are_measured_against_those_of_libraries(tmp_path: Path) -> None:
    """Strict ones only where there is a GPU."""
    bench = Bench(device=CPU, size=ON_CPU, folder=tmp_path, say=lambda line: None)
    measures = [each async for each in products.measure(bench)]
    assert [measure.what for measure in measures] == [
        f"a layer of tiny, {num_rows} rows: fp8 / float32" for num_rows in products.NUM_ROWS
    ]
    assert all(measure.value is not None and measure.value.median > 0 for measure in measures)
    assert all("rows/s (fp8; float32)" in measure.note for measure in measures)
