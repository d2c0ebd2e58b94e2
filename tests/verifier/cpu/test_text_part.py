"""The text part of multimodal checkpoints, as transformers saves them and as they are published."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.verifier.cpu.numpy_decoder import all_logits
from tests.verifier.cpu.running_decoder import load
from tests.verifier.cpu.test_loader import DELTA, GEMMA4, SHARED_EXPERT, SMALL
from tests.verifier.quantized_files import write_quantized
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.model_config import read_model_config
from verifier.checkpoint.refusals import NotServedError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.checkpoint.weight_types import WeightType
from verifier.parity.reference import reference

# Its type information lacks most classes.
TRANSFORMERS: Any = transformers
TEXT = [(7 * i) % 97 for i in range(40)]
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_TILES = {**_VISION, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}
# Of a head of 32: their halves have 16.
_SECTIONS = {"mrope_section": [4, 6, 6], "rope_theta": 1e4}


def _mapping(name: str) -> Any:
    text: Mapping[str, Any] = SMALL
    ids = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    if name == "gemma3":
        text = {**SMALL, "head_dim": 48, "sliding_window": 20, "sliding_window_pattern": 2}
        return TRANSFORMERS.Gemma3Config(
            text_config=dict(text), vision_config=_TILES, mm_tokens_per_image=4, **ids
        )
    if name == "gemma4":
        audio = {**_VISION, "subsampling_conv_channels": [8, 4], "output_proj_dims": 32}
        return TRANSFORMERS.Gemma4Config(
            text_config={**GEMMA4, "hidden_size_per_layer_input": 16, "pad_token_id": 0},
            vision_config={**_VISION, "num_key_value_heads": 2, "head_dim": 16},
            audio_config=audio,
            **dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), 96),
        )
    if name == "gemma4_unified":
        text = {key: GEMMA4[key] for key in GEMMA4 if not key.endswith("per_layer_input")}
        return TRANSFORMERS.Gemma4UnifiedConfig(
            text_config={**text, "pad_token_id": 0},
            vision_config={"mm_embed_dim": 64, "mm_posemb_size": 8, "output_proj_dims": 64},
            audio_config={"audio_embed_dim": 32},
            **dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), 96),
        )
    if name == "mistral3":
        text = {**SMALL, "head_dim": 32, "sliding_window": None, "model_type": "mistral"}
        vision = {**_TILES, "model_type": "pixtral", "head_dim": 16}
        return TRANSFORMERS.Mistral3Config(
            text_config=dict(text), vision_config=vision, image_token_index=90
        )
    if name.startswith("qwen3_5"):
        text = {**SMALL, **DELTA, **(SHARED_EXPERT if name.endswith("moe") else {})}
        text = {key: text[key] for key in text if "moe" not in name or key != "intermediate_size"}
        kind = "Qwen3_5MoeConfig" if name.endswith("moe") else "Qwen3_5Config"
        return getattr(TRANSFORMERS, kind)(
            text_config=text, vision_config=_QWEN_VISION, image_token_id=90
        )
    text = {**SMALL, "head_dim": 32, "rope_parameters": {**_SECTIONS, "rope_type": "default"}}
    if name == "qwen3_vl":
        vision = {**_QWEN_VISION, "deepstack_visual_indexes": [0]}
        return TRANSFORMERS.Qwen3VLConfig(
            text_config=dict(text), vision_config=vision, image_token_id=90
        )
    text = {**text, "hidden_size": 128}
    text.pop("head_dim")
    return TRANSFORMERS.Qwen2_5_VLConfig(
        text_config=dict(text),
        vision_config={**_QWEN_VISION, "out_hidden_size": 128},
        image_token_id=90,
    )


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "mistral3",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_5",
        "qwen3_5_moe",
    ],
)
@pytest.mark.parametrize("has_head", [False, True])
def test_logits_are_those_of_the_whole_model(tmp_path: Path, name: str, has_head: bool) -> None:
    torch.manual_seed(3)
    config = _mapping(name)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = not has_head
    model = TRANSFORMERS.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        exact = model(input_ids=torch.tensor([TEXT])).logits[0].numpy()
    weights = load(tmp_path, "float32")
    own = all_logits(weights, TEXT)
    # torch adds up in other orders on other processors.
    np.testing.assert_allclose(own, exact, rtol=0, atol=2e-4 * float(np.abs(exact).max()))
    checked, _ = reference(tmp_path, dtype=torch.float32, quantization="none", rounds_kv=True)
    assert torch.isfinite(checked).all()
    with TensorFiles(tmp_path) as files:
        assert not [each for each in files.tensors if not each.startswith(("model.", "lm_head."))]
        assert len(files.tensors) < len(load_file(tmp_path / "model.safetensors"))


def test_a_folder_of_before_nested_configurations_is_read(tmp_path: Path) -> None:
    """As Qwen2.5-VL was published: all keys side by side, and names without a prefix."""
    torch.manual_seed(3)
    config = _mapping("qwen2_5_vl")
    model = TRANSFORMERS.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    nested = describe_decoder(tmp_path)
    content = json.loads((tmp_path / "config.json").read_bytes())
    text = content.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    rope = {"type": "mrope", "mrope_section": [4, 6, 6]}
    flat = {**content, **text, "rope_theta": 1e4, "rope_scaling": rope, "vision_start_token_id": 93}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    described = describe_decoder(tmp_path)
    assert described.config.layers == nested.config.layers
    assert described.config.ties_embeddings == nested.config.ties_embeddings
    [rotary], [expected] = described.config.rotaries, nested.config.rotaries
    np.testing.assert_array_equal(rotary.inv_freq, expected.inv_freq)


def test_defaults_are_the_text_classes(tmp_path: Path) -> None:
    """As Gemma 3 4B was published: what its class has by default is left out."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "boi_token_index": 255999,
                "eos_token_id": [1, 106],
                "image_token_index": 262144,
                "mm_tokens_per_image": 256,
                "torch_dtype": "bfloat16",
                "text_config": {
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "model_type": "gemma3_text",
                    "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024,
                },
                "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
            }
        )
    )
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.num_heads, config.layers[0].num_kv_heads) == (2560, 8, 4)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert (config.eos_token_ids, config.dtype) == (frozenset({1, 106}), WeightType.BFLOAT16)
    assert [layer.sliding_window for layer in config.layers[:7]] == [1024] * 5 + [0, 1024]
    assert config.rotaries[0].inv_freq[0] == 0.125


def test_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    content = {"model_type": "mistral3", "text_config": {"model_type": "mamba"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(NotServedError, match="models of type mamba"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_quantised_text_part_is_read(tmp_path: Path, is_nested: bool) -> None:
    """Wherever the configuration tells how it is quantised."""
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    write_quantized(plain, "packed_int4")
    whole.mkdir()
    text = json.loads((plain / "config.json").read_bytes())
    content = {"model_type": "llava", "text_config": text, "vision_config": {}}
    content["tie_word_embeddings"] = text["tie_word_embeddings"]
    if not is_nested:
        content["quantization_config"] = text.pop("quantization_config")
    (whole / "config.json").write_text(json.dumps(content))
    tensors = {
        f"language_model.{name}": tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    tensors["vision_tower.patch.weight"] = torch.zeros(2, 2)
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    with TensorFiles(whole) as own, TensorFiles(plain) as expected:
        assert own.quantization == expected.quantization == "compressed-tensors"
        assert own.tensors.keys() == expected.tensors.keys()
        name = "model.layers.1.mlp.down_proj.weight"
        np.testing.assert_array_equal(
            own.rows(own.tensors[name], 0, 32), expected.rows(expected.tensors[name], 0, 32)
        )
    assert describe_decoder(whole).linear_type("auto", "none") is WeightType.GROUPS
