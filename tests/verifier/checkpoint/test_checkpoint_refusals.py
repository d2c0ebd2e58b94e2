"""Which checkpoint folders are refused, and why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DogeConfig,
    Gemma2Config,
    StableLmConfig,
)

from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import CPU, SMALL, SMALL_CONFIGS
from tests.verifier.saved_models import SaveModel, change_weights, config_for
from verifier.build import load_model
from verifier.checkpoint.refusals import CheckpointError
from verifier.transformers_model.checkpoint import load_checkpoint

LONGROPE = {"rope_type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}


def loads_nothing(*_: object, **__: object) -> None:
    raise AssertionError("weights are loaded")


class TestRefusals:
    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere is not a folder"):
            load_checkpoint(tmp_path / "nowhere", dtype="auto", device=CPU)

    def test_pickled_weights(self, tmp_path: Path) -> None:
        shutil.copy(MODEL_FOLDER / "config.json", tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
        with pytest.raises(CheckpointError, match=r"no \.safetensors"):
            load_checkpoint(tmp_path, dtype="auto", device=CPU)

    @pytest.mark.parametrize("has_base_model", [False, True])
    def test_an_adapter(self, tmp_path: Path, has_base_model: bool) -> None:
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (tmp_path / "adapter_model.safetensors").touch()
        if has_base_model:
            for name in ("config.json", "model.safetensors"):
                shutil.copy(MODEL_FOLDER / name, tmp_path)
        with pytest.raises(CheckpointError, match="LoRA adapters are not served: merge it into"):
            load_checkpoint(tmp_path, dtype="auto", device=CPU)

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            ({"model_type": "t5"}, "encoder-decoder"),
            ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent"),
            ({"model_type": "deepseek_v2"}, "latent"),
            ({"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 48}, "linear_att"),
            ({"model_type": "qwen3_5_text"}, "layers of type linear_attention"),
            ({"model_type": "qwen3_5_moe_text"}, "layers of type linear_attention"),
            ({"model_type": "llava"}, "multimodal models are not served, .*: .* has vision_config"),
            ({"model_type": "qwen2_audio"}, "has audio_config"),
            ({"model_type": "moshi"}, "has audio_encoder_config"),
            ({"model_type": "fuyu"}, "has image_size"),
            (
                {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
                "rotary embeddings of type dynamic",
            ),
            ({"model_type": "phi3", "rope_scaling": LONGROPE}, "of type longrope"),
            ({"model_type": "jamba"}, "layers of type linear_attention"),
            ({"model_type": "mamba"}, "layers of type linear_attention"),
            ({"model_type": "minimax"}, "layers of type linear_attention"),
            ({"model_type": "llama4_text"}, "layers of type chunked_attention"),
            ({"model_type": "gpt_oss"}, "attention with sinks"),
            ({"model_type": "gemma2"}, "attention with a softcap"),
            (
                {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
                "llama: quantization_config: ",
            ),
            ({"model_type": "gpt_neo"}, "its code knows no attention function but its own"),
            ({"model_type": "no such model"}, "no such model"),
        ],
    )
    def test_an_architecture_that_is_not_served(
        self, tmp_path: Path, config: dict[str, Any], reason: str
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=reason):
            load_checkpoint(tmp_path, dtype="auto", device=CPU)

    def test_missing_weights(self, save_model: SaveModel) -> None:
        folder = save_model(SMALL_CONFIGS["llama"]())
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj"):
            load_checkpoint(folder, dtype="auto", device=CPU)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
    def test_quantised_weights_that_the_configuration_does_not_tell(
        self, save_model: SaveModel, dtype: torch.dtype
    ) -> None:
        folder = save_model(SMALL_CONFIGS["llama"]())
        name = "model.layers.1.mlp.up_proj.weight"
        change_weights(folder, lambda weights: {name: weights[name].mul(100).to(dtype)})
        with pytest.raises(CheckpointError, match=f"{name} is stored as .*quantised already"):
            load_model(config_for(folder))

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("up_proj.weight_scale", "quantised already"),
            ("up_proj.weight_scale_inv", "quantised already"),
            ("up_proj.weight_zero_point", "quantised already"),
            ("up_proj.lora_A.weight", "LoRA adapters are not served"),
        ],
    )
    def test_tensors_without_which_weights_mean_something_else(
        self, save_model: SaveModel, name: str, reason: str
    ) -> None:
        folder = save_model(SMALL_CONFIGS["llama"]())
        name = f"model.layers.1.mlp.{name}"
        change_weights(folder, lambda _: {name: torch.ones(1)})
        with pytest.raises(CheckpointError, match=f"{name}: .*{reason}"):
            load_model(config_for(folder))

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"num_attention_heads": 3}, "config.json: .*not a multiple"),
            ({"hidden_size": "64"}, "config.json: .*'hidden_size'"),
            ({"layer_types": ["full_attention"]}, "config.json: .*layer"),
            (
                {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
                "config.json: .*factor",
            ),
            ({"hidden_act": "nonsense"}, r"transformers cannot build .*'nonsense'"),
            (
                {"rope_parameters": {"rope_type": "strange", "rope_theta": 1e4}},
                r"transformers cannot build .*'strange'",
            ),
        ],
    )
    def test_a_configuration_that_contradicts_itself_in_one_line(
        self, save_model: SaveModel, changed: dict[str, Any], reason: str
    ) -> None:
        folder = save_model(SMALL_CONFIGS["llama"]())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(CheckpointError, match=reason) as refusal:
            load_model(config_for(folder))
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("{broken", r"generation_config\.json: "),
            ("[1]", r"generation_config\.json: "),
            ('{"eos_token_id": "</s>"}', "end tokens </s>"),
        ],
    )
    def test_a_broken_generation_configuration_before_weights_are_loaded(
        self,
        save_model: SaveModel,
        monkeypatch: pytest.MonkeyPatch,
        content: str,
        reason: str,
    ) -> None:
        folder = save_model(SMALL_CONFIGS["llama"]())
        (folder / "generation_config.json").write_text(content)
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loads_nothing)
        with pytest.raises(CheckpointError, match=reason):
            load_model(config_for(folder))

    def test_layers_that_differ_in_shape_before_weights_are_loaded(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "gemma4_text"}')
        save_file({}, tmp_path / "model.safetensors")
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loads_nothing)
        with pytest.raises(
            CheckpointError, match="gemma4_text: layers of different sizes are not served"
        ):
            load_model(config_for(tmp_path))

    def test_attention_by_no_registered_function(self, save_model: SaveModel) -> None:
        config = AutoConfig.for_model(
            "xglm", vocab_size=97, d_model=64, ffn_dim=64, num_layers=2, attention_heads=4
        )
        folder = save_model(config)
        with pytest.raises(CheckpointError, match="attention does not go through transformers'"):
            load_model(config_for(folder))

    def test_an_unknown_argument_of_attention(self, save_model: SaveModel) -> None:
        config = Gemma2Config(**SMALL, head_dim=16)
        folder = save_model(config)
        stored = json.loads((folder / "config.json").read_text())
        # 0 passes our check by name, but the model passes it on all the same.
        (folder / "config.json").write_text(json.dumps(stored | {"attn_logit_softcapping": 0.0}))
        with pytest.raises(CheckpointError, match="'softcap' is not supported"):
            load_model(config_for(folder))

    def test_attention_that_does_not_get_its_arguments(self, save_model: SaveModel) -> None:
        folder = save_model(StableLmConfig(**SMALL))
        with pytest.raises(CheckpointError, match="hands no arguments on to its attention"):
            load_model(config_for(folder))

    def test_a_mask_of_the_models_own(self, save_model: SaveModel) -> None:
        folder = save_model(DogeConfig(**SMALL))
        with pytest.raises(CheckpointError, match="mask of the model's own"):
            load_model(config_for(folder))
