"""GPT-OSS by the decoder for GPUs, with experts in MXFP4; on a CPU, in plain torch."""

from pathlib import Path

import pytest
import torch

from tests.verifier.cpu.test_gpt_oss import (
    EXPERTS,
    HIDDEN,
    INNER,
    NUM_EXPERTS,
    expected_logits,
    write_mxfp4,
)
from tests.verifier.gpu.capped_attention import CappedBackend
from tests.verifier.gpu.running_decoder import CPU, RunningGpuDecoder, load
from tests.verifier.gpu.test_decoder import SCATTERED, assert_near
from tests.verifier.paged_model import some_tokens
from verifier.checkpoint.refusals import CheckpointError
from verifier.config import VerifierConfig
from verifier.gpu.groups import GroupedWeight
from verifier.gpu.weights import Experts
from verifier.model import gpu_model
from verifier.model.gpu_model import find_on_gpu, load_on_gpu

TEXT = some_tokens(40, 97)


def test_experts_keep_their_codes_and_have_the_values(tmp_path: Path) -> None:
    values = write_mxfp4(tmp_path)
    weights = load(tmp_path)
    mlp = weights.layers[1].mlp
    assert isinstance(mlp, Experts)
    assert weights.keeps_codes
    gate_up, down = mlp.weights.gate_up, mlp.weights.down
    assert isinstance(gate_up, GroupedWeight)
    assert isinstance(down, GroupedWeight)
    assert down.shape == (NUM_EXPERTS, HIDDEN, INNER)
    # 64 inputs fill half of a block of codes.
    assert gate_up.codes.nbytes == NUM_EXPERTS * 2 * INNER * 64
    assert gate_up.groups.nbytes == NUM_EXPERTS * 2 * INNER * HIDDEN // 32
    stored = values[EXPERTS + "gate_up_proj"]
    for expert in range(NUM_EXPERTS):
        both = torch.cat((stored[expert, :, ::2].T, stored[expert, :, 1::2].T))
        assert torch.equal(gate_up.of_expert(expert).widened(torch.float32), both)
        own = values[EXPERTS + "down_proj"][expert].T
        assert torch.equal(down.of_expert(expert).widened(torch.bfloat16), own.bfloat16())


def test_logits_are_transformers_ones(tmp_path: Path) -> None:
    """With experts that are widened, since float32 keeps no codes; chunks, drafts and blocks."""
    values = write_mxfp4(tmp_path)
    weights = load(tmp_path, "float32")
    assert not weights.keeps_codes
    rows = RunningGpuDecoder(weights).run_in_chunks(TEXT, [13, 1, 6, 2], SCATTERED)
    assert_near(rows, torch.from_numpy(expected_logits(tmp_path, values, TEXT)))


def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The dtype that clients are told of a model that has passed the check."""
    monkeypatch.setattr(gpu_model, "make_backend", lambda choice, **_: CappedBackend())
    config = VerifierConfig(model=folder, device="cpu", num_kv_blocks=8)
    described = find_on_gpu(config, CPU)
    assert described is not None
    return load_on_gpu(config, described, CPU).dtype


def test_it_passes_the_check_and_says_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mxfp4(tmp_path)
    assert served(tmp_path, monkeypatch) == "bfloat16, mxfp4 weights"


def test_a_decoder_that_computes_other_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mxfp4(tmp_path)
    widened = GroupedWeight.widened
    monkeypatch.setattr(GroupedWeight, "widened", lambda self, dtype: 1.1 * widened(self, dtype))
    with pytest.raises(CheckpointError, match="not computed as transformers computes it"):
        served(tmp_path, monkeypatch)
