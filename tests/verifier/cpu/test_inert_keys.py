"""Keys that are called inert change no logit of transformers' models, and keep none from the own
decoder.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.verifier.cpu.test_loader import CONFIGS, save
from verifier.checkpoint.families import FAMILIES
from verifier.checkpoint.inert_keys import INERT_KEYS
from verifier.checkpoint.model_config import read_model_config
from verifier.checkpoint.refusals import NotServedError
from verifier.parity.reference import reference

ONE_OF_EACH_FAMILY = {CONFIGS[name]().model_type: name for name in CONFIGS}
# As a file of a family has them; other values are no test of the key.
OF_THE_FAMILY = {"architectures", "model_type", "auto_map", "dtype", "torch_dtype"}
# What is neither a flag nor a text.
VALUES: dict[str, Any] = {
    "_sliding_window_pattern": 6,
    "id2label": {"0": "good", "1": "bad", "2": "ugly"},
    "label2id": {"good": 0, "bad": 1, "ugly": 2},
    "num_labels": 3,
    "problem_type": "regression",
    "task_specific_params": {"summarization": {"max_length": 200}},
    "pretraining_tp": 2,
    "bad_words_ids": [[3]],
    "max_length": 4096,
    "temperature": 0.6,
    "top_k": 7,
    "router_aux_loss_coef": 0.5,
    **dict.fromkeys(("bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"), 3),
    **{
        key: 0.5
        for key in INERT_KEYS
        if "dropout" in key or key.endswith(("pdrop", "_noise", "_range", "_p", "_penalty"))
    },
    "layerdrop": 0.5,
}
FLAGS = ("output_", "use_", "return_", "do_", "tf_", "is_", "unsloth_fixed", "torchscript")
# What is off, though transformers' own defaults lack it.
OFF: dict[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "per_layer_config": {},
    "pruned_heads": {},
    "quantization_config": {},
    "tie_encoder_decoder": False,
    "use_mrope": False,
}


def with_keys(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(folder: Path) -> torch.Tensor:
    return reference(folder, dtype=torch.float32, quantization="none")[0]


def odd_values() -> dict[str, Any]:
    """Every inert key with a value that no default is."""
    return {
        key: VALUES.get(key, True if key.startswith(FLAGS) or "_autoset" in key else "unusual")
        for key in sorted(INERT_KEYS - OF_THE_FAMILY)
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_inert_key_changes_a_logit_or_who_computes_it(model_type: str, tmp_path: Path) -> None:
    save(tmp_path, ONE_OF_EACH_FAMILY[model_type])
    expected, described = logits(tmp_path), read_model_config(tmp_path)
    with_keys(tmp_path, OFF | json.loads((tmp_path / "config.json").read_text()) | odd_values())
    assert read_model_config(tmp_path).layers == described.layers
    assert torch.equal(logits(tmp_path), expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_configuration_that_transformers_writes_in_full_is_read(
    model_type: str, tmp_path: Path
) -> None:
    save(tmp_path, ONE_OF_EACH_FAMILY[model_type])
    described = read_model_config(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    read = read_model_config(tmp_path)
    assert (read.layers, read.eos_token_ids) == (described.layers, described.eos_token_ids)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("add_cross_attention", True),
        ("chunk_size_feed_forward", 4),
        ("chunk_size_feed_forward", True),
        ("fusion_config", {"attention": "x"}),
        ("is_causal", False),
        ("logit_scale", 0.5),
        ("num_mtp_layers", 1),
        ("per_layer_config", {"0": {"head_dim": 8}}),
        ("pruned_heads", {"0": [1]}),
        ("quantization", {"bits": 4, "group_size": 64}),
        ("residual_multiplier", 0),
        ("transformers_weights", "adapter.safetensors"),
    ],
)
def test_what_could_change_the_computation_is_refused_by_name(
    key: str, value: object, tmp_path: Path
) -> None:
    save(tmp_path, "llama")
    with_keys(tmp_path, {key: value})
    with pytest.raises(NotServedError, match=key):
        read_model_config(tmp_path)


@pytest.mark.parametrize(("name", "window"), [("mistral", 20), ("qwen2", 0)])
def test_only_families_that_read_it_heed_the_switch_of_windows(
    name: str, window: int, tmp_path: Path
) -> None:
    save(tmp_path, name)
    with_keys(tmp_path, {"use_sliding_window": False, "sliding_window": 20})
    if name == "qwen2":
        with_keys(tmp_path, {"layer_types": None})
    assert {layer.sliding_window for layer in read_model_config(tmp_path).layers} == {window}
