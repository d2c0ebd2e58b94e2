"""Small models in folders, as transformers writes them, and how the verifier is to load them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from verifier.config import VerifierConfig

SaveModel = Callable[..., Path]


def config_for(folder: Path, **options: Any) -> VerifierConfig:
    """For transformers to compute, unless an option says otherwise."""
    defaults: dict[str, Any] = {
        "numerics": "fast",
        "device": "cpu",
        "threads": 1,
        "num_kv_blocks": 32,
    }
    return VerifierConfig(model=folder, **(defaults | options))


def change_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Replaces and adds tensors."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | change(weights), file, metadata={"format": "pt"})
