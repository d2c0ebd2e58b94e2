"""A checkpoint of Qwen3 0.6B's shape with random weights: a model of real size, decoded plainly."""

from pathlib import Path

import torch
from transformers.configuration_utils import PreTrainedConfig

from benchmarks.gpu.shapes import QWEN3_0_6B, Shape, write_checkpoint

NAME = "random-0.6b"


def random_model(cache: Path) -> Path:
    """Writes the checkpoint, 1.2 GB of bfloat16, unless it is there; returns its folder."""
    shape = Shape(name=NAME, config=_config)
    return write_checkpoint(shape, cache, device=torch.device("cpu"), dtype=torch.bfloat16)


def _config() -> PreTrainedConfig:
    config = QWEN3_0_6B.config()
    # Some peers allocate K/V for so many.
    config.max_position_embeddings = 2048
    return config
