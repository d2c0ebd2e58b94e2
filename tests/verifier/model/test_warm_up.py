"""Kernels are compiled before the verifier serves, and for images whatever the model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verifier import warm_up
from verifier.checkpoint.weight_types import WeightType
from verifier.cpu import packing
from verifier.cpu.weights import DecoderWeights

REPOSITORY = Path(__file__).parents[3]


def test_a_loaded_verifier_compiles_no_kernel_for_its_engine_or_while_it_serves() -> None:
    """Compiling would block it for seconds, and its event loop while the engine is built."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.verifier.late_compilations"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "versions, then" not in finished.stdout


def test_an_image_has_kernels_for_all_types_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: set[tuple[WeightType, WeightType]] = set()
    # By the type, and whether the file's own pages are packed.
    packed: set[tuple[int, bool]] = set()

    class RecordingDecoder:
        def __init__(self, weights: DecoderWeights, **_: Any) -> None:
            computed.add((weights.linear_type, weights.other_type))

        def close(self) -> None:
            pass

    def pack(rows: np.ndarray, blocks: np.ndarray) -> None:
        packed.add((rows.itemsize, rows.flags.writeable))

    monkeypatch.setattr(warm_up, "CpuDecoder", RecordingDecoder)
    monkeypatch.setattr(warm_up, "compute_chunk", lambda model, num_tokens: None)
    monkeypatch.setattr(packing, "_pack", pack)
    warm_up.warm_up_all()
    others = (WeightType.FLOAT32, WeightType.BFLOAT16, WeightType.FLOAT16)
    quantised = ((WeightType.FP8, other) for other in others)
    assert computed == {*zip(others, others, strict=True), *quantised}
    assert packed == {(4, True), (4, False), (2, True), (2, False), (1, True)}
