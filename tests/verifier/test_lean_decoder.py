"""The lean forward pass computes what transformers' modules compute, and only for known modules.

`test_strict_numerics.py` compares its bits.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from tests.verifier.paged_model import (
    NUM_BLOCKS,
    SMALL,
    SMALL_CONFIGS,
    PagedModel,
    make_small_model,
    some_tokens,
)
from verifier.build import load_model
from verifier.config import VerifierConfig
from verifier.cpu.loading.refusals import CheckpointError
from verifier.model.lean_decoder import is_lean


def make_model(config: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def logits_of(paged: PagedModel) -> torch.Tensor:
    """Logits of 300 tokens, in chunks and one by one, in scattered blocks."""
    token_ids = some_tokens(300, paged.vocab_size)
    return paged.run_in_chunks(token_ids, [120, 1, 3, 40], list(range(NUM_BLOCKS))[::-1])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers_modules(name: str) -> None:
    lean = make_small_model(name)
    assert is_lean(lean.model)
    rows = logits_of(lean)
    # The same model with shared weights; a module with a hook is not a known one.
    lean.model.get_input_embeddings().register_forward_hook(lambda *_: None)
    assert not is_lean(lean.model)
    expected = logits_of(PagedModel(lean.model))
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=16),
        LlamaConfig(**SMALL, hidden_act="gelu"),
    ],
    ids=["another architecture", "another activation"],
)
def test_an_unknown_module_leaves_the_model_to_transformers(config: Any) -> None:
    assert not is_lean(make_model(config))


def test_a_replaced_or_patched_module_leaves_the_model_to_transformers() -> None:
    class OtherLinear(torch.nn.Linear):
        pass

    model = make_model(LlamaConfig(**SMALL))
    assert is_lean(model)
    mlp: Any = model.get_submodule("model.layers.0.mlp")
    forward = mlp.forward
    mlp.forward = forward
    assert not is_lean(model)
    del mlp.forward
    assert is_lean(model)
    mlp.up_proj = OtherLinear(64, 112, bias=False)
    assert not is_lean(model)


def test_no_weight_is_stored_twice() -> None:
    attention: Any = make_small_model("qwen2").model.get_submodule("model.layers.0.self_attn")
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    assert len({part.bias.untyped_storage().data_ptr() for part in parts}) == 1


def test_the_parity_probe_checks_the_lean_pass(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SMALL_CONFIGS["mistral"]()
    config.sliding_window = 20  # the probe's text is short
    make_model(config).save_pretrained(tmp_path)
    verifier_config = VerifierConfig(
        model=tmp_path, device="cpu", dtype="float32", threads=1, numerics="fast"
    )
    load_model(verifier_config)
    monkeypatch.setattr("verifier.model.lean_decoder._window_of", lambda attention: None)
    with pytest.raises(CheckpointError, match="not computed as transformers computes it"):
        load_model(verifier_config)
