"""The accuracy check of FP8 weights passes on the bundled model, and fails on broken weights."""

import pytest
import torch

from benchmarks import fp8_accuracy
from verifier.gpu.fp8 import FP8, quantised
from verifier.model import fp8_weights

FEW = ["--prompts", "1", "--max-new-tokens", "24", "--min-agreement", "0.9", "--dtype", "float32"]


def test_the_bundled_model_keeps_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_accuracy.main(FEW) == 0
    table = capsys.readouterr().out
    assert "24 greedy tokens" in table
    rows = {line.split(" | ")[0]: line for line in table.splitlines()}
    weights, both = rows["| float32, fp8 weights"], rows["| float32, fp8 weights and activations"]
    assert weights.split(" | ")[1:] != both.split(" | ")[1:]


def test_weights_with_swapped_channels_fail_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def confused(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = quantised(weight)
        return values.view(torch.uint8).roll(1, dims=0).view(FP8), scale

    monkeypatch.setattr(fp8_weights, "quantised", confused)
    assert fp8_accuracy.main(FEW) == 1
    assert "of the tokens agree" in capsys.readouterr().err
