"""A checkpoint of Qwen3 0.6B's shape with random weights: a model of real size, decoded plainly."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from benchmarks.workloads import BUNDLED_MODEL

NAME = "random-0.6b"


def random_model(cache: Path) -> Path:
    """Writes the checkpoint, 1.2 GB of bfloat16, unless it is there; returns its folder.

    Tokenizer and end token are the bundled model's, so that its prompts serve.
    """
    folder = cache / NAME
    if folder.exists():
        return folder
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(2026)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    partial = folder.with_name(f"{NAME}.partial")
    model.save_pretrained(partial)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, partial)
    partial.rename(folder)
    return folder
