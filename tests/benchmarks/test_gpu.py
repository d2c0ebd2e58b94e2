"""benchmarks.gpu on a CPU: every row measures something. No figure says anything about a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.bench import ON_CPU, Bench
from benchmarks.gpu.texts import random_texts, replays
from benchmarks.shapes import FAMILIES, LLAMA_3_8B, QWEN3_0_6B, TINY, write_checkpoint
from verifier.engine.messages import Decided

CPU = torch.device("cpu")


async def test_every_row_measures_something_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    argv = ["--device", "cpu", "--quick", "--no-tests", "--json", str(file)]
    assert await command.main(argv) == 0
    run = json.loads(file.read_text())
    assert run["failed"] == []
    assert list(dict.fromkeys(measure["row"] for measure in run["measures"])) == list(command.ROWS)
    for measure in run["measures"]:
        value = measure["value"]
        assert 0 < value["low"] <= value["median"] <= value["high"]
        assert measure["goal"] is None
    assert "| decode: step of tiny at 64 tokens / its floor | 1 | float32 |" in (
        capsys.readouterr().out
    )


async def test_a_row_that_fails_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Bench) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(command, "ROWS", {"decode": fails, "kernel": command.ROWS["kernel"]})
    argv = ["--device", "cpu", "--quick", "--no-tests", "--rows", "decode", "kernel"]
    assert await command.main(argv) == 1
    printed = capsys.readouterr()
    assert "| kernel: " in printed.out
    assert "an illegal memory access" in printed.err
    assert "failed: decode" in printed.err


def test_checkpoints_are_written_once_and_load(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY, tmp_path, device=CPU, dtype=torch.bfloat16)
    changed = (folder / "config.json").stat().st_mtime_ns
    assert write_checkpoint(TINY, tmp_path, device=CPU, dtype=torch.bfloat16) == folder
    assert (folder / "config.json").stat().st_mtime_ns == changed
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, told = loaded
    assert not told["missing_keys"]
    assert model.dtype is torch.bfloat16
    assert model(torch.arange(10)[None]).logits.isfinite().all()


def test_shapes_have_the_known_numbers_of_weights() -> None:
    # 8.03e9 less 128256 embeddings of 4096; 0.596e9, whose embeddings are the output layer, too.
    assert LLAMA_3_8B.step_weights_bytes(1) == 8_030_261_248 - 128256 * 4096
    assert QWEN3_0_6B.step_weights_bytes(1) == 596_049_920
    by_name = {shape.name: shape.step_weights_bytes(1) for shape in FAMILIES}
    # Four of eight experts are as wide as an MLP. Beside them a router, with biases, and sinks;
    # biases of attention, and of the chosen experts.
    of_experts = 8 * (1024 + 1) + 8 + (8 + 2 * 2 + 8) * 128 + 4 * (2 * 768 + 1024)
    assert by_name["GPT-OSS"] == by_name["Llama"] + 8 * of_experts
    # A gate, a projection and a projection of the embedding of each layer's input, global heads
    # twice as large, layers without K/V, and norms; no embeddings of inputs.
    assert 1.05 < by_name["Gemma 4"] / by_name["Llama"] < 1.1


def test_engines_say_the_recorded_texts(tmp_path: Path) -> None:
    bench = Bench(device=CPU, size=ON_CPU, folder=tmp_path)
    texts = [*replays(32)[:2], *random_texts(32)[:2]]
    said: list[list[int]] = [[] for _ in texts]

    def observe(decided: Decided) -> None:
        said[int(decided.sequence_id)] += decided.token_ids

    with bench.engine(TINY) as engine:
        engine.run([task for task, _ in texts], streams=2, speculate=True, observe=observe)
    assert said == [list(text[: task.max_new_tokens]) for task, text in texts]
