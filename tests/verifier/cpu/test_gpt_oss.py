"""GPT-OSS with experts in MXFP4, by transformers' own class and its own reading of the bytes."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from servicekit.gguf.folder import model_folder
from tests.servicekit.gguf_files import VOCABULARY, write_model
from tests.verifier.cpu.running_decoder import load, logits_of, some_tokens
from verifier.build import load_model
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.model_config import read_model_config
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.checkpoint.weight_types import Activation, WeightType
from verifier.config import VerifierConfig
from verifier.parity.reference import fused_experts, reference

# Its type information lacks some classes.
TRANSFORMERS: Any = transformers
HIDDEN, INNER, NUM_EXPERTS = 64, 96, 5
EXPERTS = "model.layers.1.mlp.experts."
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def small_model() -> Any:
    config = TRANSFORMERS.GptOssConfig(
        vocab_size=97,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        sliding_window=16,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    model = TRANSFORMERS.GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.to(torch.bfloat16)


def write_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """A model as it is published. Returns the values of its tensors in transformers' class."""
    model = small_model()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    values = {name: tensor.float() for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(5)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, size, depth in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            shape = NUM_EXPERTS, size, depth // 32
            blocks, scales = (
                torch.randint(low, high, size, generator=generator, dtype=torch.uint8)
                for low, high, size in ((0, 256, (*shape, 16)), (122, 126, shape))
            )
            del tensors[prefix + name]
            tensors |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales}
            values[prefix + name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": MXFP4}
    # As OpenAI's is.
    config |= {"experts_per_token": 2, "initial_context_length": 4096}
    file.write_text(json.dumps(config))
    return values


def expected_logits(folder: Path, values: dict[str, torch.Tensor], text: list[int]) -> Any:
    config = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    model: Any = TRANSFORMERS.GptOssForCausalLM.from_pretrained(
        None, config=config, state_dict=values, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    with torch.inference_mode():
        return model(torch.tensor([text])).logits[0].numpy()


def test_values_are_those_that_transformers_reads(tmp_path: Path) -> None:
    values = write_mxfp4(tmp_path)
    with TensorFiles(tmp_path) as files:
        state = {
            name: torch.from_numpy(np.array(files.rows(tensor, 0, tensor.shape[0])))
            for name, tensor in files.tensors.items()
            if tensor.dtype == "MXFP4" or name.endswith("_proj.bias")
        }
        some = files.rows(files.tensors[f"{EXPERTS}2.up_proj.weight"], 7, 20)
    gate_up = values[f"{EXPERTS}gate_up_proj"]
    assert (some == gate_up[2, :, 1::2].T[7:27].numpy()).all()
    for expert in range(NUM_EXPERTS):
        own = [state[f"{EXPERTS}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        assert torch.equal(own[0], gate_up[expert, :, ::2].T)
        assert torch.equal(own[1], gate_up[expert, :, 1::2].T)
        assert torch.equal(own[2], values[f"{EXPERTS}down_proj"][expert].T)


def test_logits_are_transformers_with_experts_as_they_are_stored(tmp_path: Path) -> None:
    values = write_mxfp4(tmp_path)
    text = some_tokens(40, 97)
    weights = load(tmp_path, "float32")
    experts = weights.layers[0].experts
    assert experts is not None
    assert [part.form for part in experts.gate_up.parts] == ["MXFP4"] * 2
    # 32 weights of 16 outputs: 4 bits each, and 16 scales of a byte.
    assert experts.down.parts[0].blocks.shape[-1] == 16 * 32 // 2 + 16
    assert (weights.activation, weights.linear_type) == (Activation.CLAMPED, WeightType.GROUPS)
    exact = expected_logits(tmp_path, values, text)
    own = logits_of(weights, text)
    assert np.abs(own - exact).max() < 2e-3 * np.abs(exact).max()
    # So the check at load compares with the same model.
    checked, _ = reference(tmp_path, dtype=torch.float32, quantization="none", rounds_kv=True)
    probed = [(37 * i + 11) % 97 for i in range(48)]
    np.testing.assert_allclose(
        checked.numpy(), expected_logits(tmp_path, values, probed), rtol=0, atol=1e-4
    )


def test_it_passes_the_check_at_load_in_the_type_that_it_is_published_in(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    config = VerifierConfig(model=tmp_path, device="cpu", threads=1, num_kv_blocks=8)
    served = load_model(config).served
    assert (served.dtype, served.numerics) == ("bfloat16, mxfp4 weights", "strict")


def test_experts_that_are_not_quantised_keep_their_bits(tmp_path: Path) -> None:
    model = small_model()
    model.save_pretrained(tmp_path)
    weights = load(tmp_path)
    assert weights.linear_type is weights.other_type is WeightType.BFLOAT16
    with TensorFiles(tmp_path) as files:
        state = {
            name: torch.from_numpy(np.array(files.rows(tensor, 0, tensor.shape[0]))).reshape(
                tensor.shape
            )
            for name, tensor in files.tensors.items()
        }
    for name, tensor in fused_experts(state).items():
        stored = model.get_parameter(name).view(torch.uint16)
        assert torch.equal(tensor, stored), name


def write_gguf(path: Path) -> Path:
    return write_model(
        path / "oss.gguf",
        {"_exps": "MXFP4", "ffn_gate_inp": "F32", "": "BF16"},
        architecture="gpt-oss",
        num_experts=4,
        metadata={
            "gpt-oss.rope.scaling.type": "yarn",
            "gpt-oss.rope.scaling.factor": 32.0,
            "gpt-oss.rope.scaling.original_context_length": 4096,
            "gpt-oss.rope.scaling.yarn_beta_fast": 32.0,
            "gpt-oss.rope.scaling.yarn_beta_slow": 1.0,
        },
    )


def test_a_gguf_file_is_the_same_family(tmp_path: Path) -> None:
    path = write_gguf(tmp_path)
    folder = model_folder(path)
    own = read_model_config(folder)
    config = AutoConfig.from_pretrained(folder)
    assert own.rotaries[0].scaling == pytest.approx(0.1 * np.log(32) + 1)
    assert [layer.sliding_window for layer in own.layers] == [16, 0]
    assert config.rope_parameters["truncate"] is False
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with TensorFiles(folder) as files:
        state = {
            name: torch.from_numpy(
                np.array(
                    files.rows(tensor, 0, tensor.shape[0]).astype(np.uint32) << 16,
                    dtype=np.uint32,
                ).view(np.float32)
                if tensor.dtype == "BF16"
                else np.array(files.rows(tensor, 0, tensor.shape[0]))
            ).reshape(tensor.shape)
            for name, tensor in files.tensors.items()
        }
        for expert in range(4):
            for part in ("gate", "up", "down"):
                tensor = stored[f"blk.1.ffn_{part}_exps.weight"]
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
                own_values = state[f"{EXPERTS}{expert}.{part}_proj.weight"].numpy()
                np.testing.assert_array_equal(own_values, values[expert])
    text = [(7 * i) % VOCABULARY for i in range(40)]
    exact = expected_logits(folder, fused_experts(state), text)
    ours = logits_of(load(folder, "float32"), text)
    assert np.abs(ours - exact).max() < 2e-3 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        ({"experts_per_token": 3}, "tells experts_per_token and num_experts_per_tok apart"),
        ({"sliding_window": None}, "sliding layers without sliding_window"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_mxfp4(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(NotServedError, match=reason):
        describe_decoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gate_up_proj_blocks", lambda t: t[:, :-1].clone(), "has shape"),
        ("gate_up_proj_blocks", lambda t: t[..., :-1].clone(), "not of groups"),
        ("gate_up_proj_scales", lambda t: t.to(torch.int16), "another shape or type"),
        ("down_proj_blocks", lambda t: t[:-1].clone(), "another shape or type"),
        ("gate_up_proj_bias", lambda t: t[:, :-1].clone(), "has shape"),
        ("down_proj_bias", lambda t: t[0].clone(), "has shape"),
    ],
)
def test_odd_tensors_are_named(name: str, change: Any, reason: str, tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[EXPERTS + name] = change(tensors[EXPERTS + name])
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{EXPERTS}\w+: .*{reason}"):
        describe_decoder(tmp_path)
