"""Which weights of a folder are loaded, which are left to transformers, and which are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.verifier.cpu.numpy_decoder import all_logits
from tests.verifier.cpu.running_decoder import load
from tests.verifier.cpu.test_loader import TEXT, reference, save
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.cpu.loading.loader import load_weights


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = save(tmp_path / "one", "llama")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert (all_logits(one, TEXT) == all_logits(many, TEXT)).all()


def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_not_served_here(
    tmp_path: Path,
) -> None:
    """Transformers computes with it."""
    save(tmp_path, "llama_tied")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embeddings = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embeddings.clone()}, file, {"format": "pt"})
    assert describe_decoder(tmp_path).config.ties_embeddings
    for head in (embeddings + 1, embeddings[:-1].clone()):
        save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
        with pytest.raises(NotServedError, match=r"lm_head\.weight differs"):
            describe_decoder(tmp_path)


def rename(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """All experts in one tensor, as newer versions of transformers compute them."""
    result = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(3):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        new = f"model.layers.{layer}.mlp."
        result[new + "gate.weight"] = result.pop(prefix + "gate.weight")

        def of(name: str, prefix: str = prefix) -> list[Any]:
            return [tensors[f"{prefix}experts.{expert}.{name}.weight"] for expert in range(4)]

        gate_up = [torch.cat(both) for both in zip(of("w1"), of("w3"), strict=True)]
        result[new + "experts.gate_up_proj"] = torch.stack(gate_up)
        result[new + "experts.down_proj"] = torch.stack(of("w2"))
    return result


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", fused),
        ("llama_tied", lambda t: {name.removeprefix("model."): t[name] for name in t}),
    ],
)
def test_weights_by_other_names_are_left_to_transformers(
    name: str, change: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    save(tmp_path, name)
    before = reference(tmp_path)
    rename(tmp_path, change)
    assert (reference(tmp_path) == before).all()
    with pytest.raises(NotServedError, match="the checkpoint holds"):
        describe_decoder(tmp_path)


def test_keys_and_values_that_no_layer_computes_are_left_out(tmp_path: Path) -> None:
    """As published: layers that attend to others' have some of their own."""
    save(tmp_path, "gemma4")
    expected = all_logits(load(tmp_path), TEXT)
    own = {
        f"model.layers.4.self_attn.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj")
    }
    rename(tmp_path, lambda tensors: tensors | own)
    assert (all_logits(load(tmp_path), TEXT) == expected).all()
    rename(tmp_path, lambda t: t | {"model.layers.1.self_attn.v_norm.weight": torch.ones(48)})
    with pytest.raises(NotServedError, match=r"layers\.1\.self_attn\.v_norm\.weight"):
        describe_decoder(tmp_path)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    lost = "model.layers.1.mlp.up_proj.weight"
    rename(tmp_path, lambda t: {name: t[name] for name in t if name != lost})
    with pytest.raises(CheckpointError, match=f"missing: {lost}"):
        describe_decoder(tmp_path)


def test_files_that_changed_since_they_were_described_are_refused(tmp_path: Path) -> None:
    """Packing rows that are longer would write past the matrix."""
    save(tmp_path, "llama")
    described = describe_decoder(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def change(**changed: torch.Tensor) -> None:
        save_file({**tensors, **changed}, file, {"format": "pt"})

    def is_refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_weights(described, dtype="auto", quantization="none")

    down, embeddings = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"
    change(**{down: torch.zeros(64, 4000)})
    is_refused(rf"{down}: has shape \[64, 4000\]")
    change(**{embeddings: tensors[embeddings][:90].clone()})
    is_refused(rf"{embeddings}: has shape")
    change(**{down: tensors[down].to(torch.int8)})
    is_refused(f"has changed: {down} is stored as I8")
    file.unlink()
    is_refused("has changed: .* holds neither")
    change()
    load_weights(described, dtype="auto", quantization="none")
