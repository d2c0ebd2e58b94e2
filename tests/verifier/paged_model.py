"""Real models over a paged K/V cache, run chunk by chunk."""

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.verifier.chunks import Chunk, lay_out_chunks, rows_in_chunks
from verifier.attention.backend import AttentionBackend
from verifier.attention.kv_cache import KVCache
from verifier.attention.sdpa import SdpaBackend
from verifier.transformers_model.checkpoint import checkpoint_of, load_checkpoint, reference_logits
from verifier.transformers_model.paged_model import (
    ATTENTION_NAME,
    TransformersModel,
    register_attention,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 256
MAX_MODEL_LEN = 2048

# Weights ten times larger than usual: attention is far from uniform, so errors show in the bits.
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
}
# A window far smaller than the contexts of the tests.
DENSE_CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=100, max_window_layers=1
    ),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=100),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL,
        head_dim=48,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": lambda: Phi3Config(**SMALL, sliding_window=100, pad_token_id=0),
}
EXPERT_CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}
SMALL_CONFIGS = DENSE_CONFIGS | EXPERT_CONFIGS


class PagedModel:
    """A model and its cache; `run` is one step, which sets `kv_is_finite` [T]."""

    kv_is_finite: torch.Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: AttentionBackend | None = None,
        block_size: int = BLOCK_SIZE,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.model = model
        self.device = model.device
        self.checkpoint = checkpoint_of(model, dtype=model.dtype, model_digest="")
        self.cache = KVCache(
            self.checkpoint.kv_shape,
            num_blocks=num_blocks,
            block_size=block_size,
            device=self.device,
        )
        self.paged = TransformersModel(
            model,
            backend=backend or SdpaBackend(device=self.device),
            cache=self.cache,
            device=self.device,
        )

    @property
    def vocab_size(self) -> int:
        return self.paged.vocab_size

    def run(self, *chunks: Chunk, is_expanded: bool = False) -> list[torch.Tensor]:
        """One step over all chunks; returns each one's logits [num_rows, vocab_size].

        `is_expanded`: tokens that stand for drafts attend one by one.
        """
        layout = lay_out_chunks(chunks, block_size=self.cache.block_size, is_expanded=is_expanded)
        logits, self.kv_is_finite = self.paged.forward_on_device(layout)
        return list(logits.split([chunk.num_rows for chunk in chunks]))

    def run_in_chunks(
        self, token_ids: list[int], sizes: SequenceOf[int], block_table: list[int]
    ) -> torch.Tensor:
        """All logits of the text, computed from position 0 in chunks of these sizes in rotation."""
        return torch.cat(rows_in_chunks(self.run, token_ids, sizes, block_table))

    def check_that_sequences_do_not_mix(
        self, tables: SequenceOf[list[int]], *, longest: int, is_expanded: bool
    ) -> None:
        """A decode at the end of the longest text, drafts and a prefill chunk together, each as if
        alone; `tables`: of the three.
        """
        texts = [some_tokens(n, self.vocab_size, seed=n) for n in (longest, 40, 20)]
        starts, row_counts = [longest - 1, 35, 0], [1, 5, 1]
        for text, table, start in zip(texts, tables, starts, strict=True):
            if start:
                self.run_in_chunks(text[:start], [start], table)
        chunks = [
            Chunk(token_ids=text[start:], start=start, block_table=table, num_rows=num_rows)
            for text, table, start, num_rows in zip(texts, tables, starts, row_counts, strict=True)
        ]
        for rows, text in zip(self.run(*chunks, is_expanded=is_expanded), texts, strict=True):
            expected = reference_logits(self.model, text)[-len(rows) :]
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)


def make_small_model(name: str, dtype: torch.dtype = torch.float32) -> PagedModel:
    """A random model of one of `SMALL_CONFIGS`, always the same one."""
    register_attention()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            SMALL_CONFIGS[name](), attn_implementation=ATTENTION_NAME
        )
    return PagedModel(model.to(dtype).eval().requires_grad_(False))


def load_bundled_model(folder: Path, dtype: torch.dtype) -> PagedModel:
    checkpoint = load_checkpoint(folder, dtype=str(dtype).removeprefix("torch."), device=CPU)
    return PagedModel(checkpoint.model)


def some_tokens(num_tokens: int, vocab_size: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
