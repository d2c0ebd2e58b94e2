"""Models cut into parts compute the same as whole ones."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from servicekit.config import ConfigError
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import CPU, SMALL, some_tokens
from verifier.config import VerifierConfig
from verifier.model.model_part import load_part
from verifier.tensor_parallel.sharding import shard
from verifier.transformers_model import checkpoint
from verifier.transformers_model.fp8_weights import Fp8Linear, quantise_linear_layers

HEADS = {"head_dim": 32}
CONFIGS: dict[str, Callable[[], Any]] = {
    # An odd vocabulary, whose head stays whole, and biases in every layer.
    "llama": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SMALL | {"vocab_size": 96}),
    "tied": lambda: LlamaConfig(**SMALL | {"vocab_size": 96}, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(**SMALL | HEADS, query_pre_attn_scalar=32),
    "phi3": lambda: Phi3Config(**SMALL | {"vocab_size": 96}, pad_token_id=0, eos_token_id=0),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SMALL | HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}


class ThreadCollectives:
    """Implements `Collectives` among threads of one process: stands in for torch.distributed."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list[torch.Tensor]) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._parts = parts

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(partial)).sum(0)

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(part), dim=-1)

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = part
        self._barrier.wait(20)
        parts = list(self._parts)
        self._barrier.wait(20)
        return parts


def thread_collectives(size: int) -> list[ThreadCollectives]:
    barrier, parts = threading.Barrier(size), [torch.empty(0)] * size
    return [ThreadCollectives(rank, barrier, parts) for rank in range(size)]


def make_model(name: str) -> PreTrainedModel:
    """A random model, always the same one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name]())
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases start at 0, which would hide one that is added twice
                torch.nn.init.uniform_(parameter)
    model.eval().requires_grad_(False)
    return model


def num_values(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_compute_the_same_as_the_whole(name: str) -> None:
    whole = make_model(name)
    token_ids = torch.tensor([some_tokens(40, whole.config.vocab_size)])
    expected = whole(input_ids=token_ids, use_cache=False).logits
    models = [make_model(name) for _ in range(2)]
    for model, collectives in zip(models, thread_collectives(2), strict=True):
        shard(model, collectives, CPU)
        assert num_values(model) < 0.75 * num_values(whole)

    for logits in computed_by(models, token_ids):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


def computed_by(models: list[PreTrainedModel], token_ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of models that wait for each other, each in a thread."""

    def run(model: PreTrainedModel) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
            return logits

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(run, models))


def in_fp8(name: str, collectives: ThreadCollectives | None, *, rounds_rows: bool) -> Any:
    """A model with FP8 weights, whole or cut: a part's layers are quantised as they are cut."""
    model = make_model(name)

    def quantise(within: str) -> None:
        quantise_linear_layers(model, CPU, rounds_rows=rounds_rows, within=within)

    if collectives is not None:
        shard(model, collectives, CPU, convert=quantise)
    quantise("")
    return model


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3_moe"])
def test_parts_in_fp8_have_the_values_of_the_whole(name: str) -> None:
    """A part of a channel may have a smaller scale, by which only its smallest values differ."""
    whole = in_fp8(name, None, rounds_rows=False)
    token_ids = torch.tensor([some_tokens(40, whole.config.vocab_size)])
    expected = whole(input_ids=token_ids, use_cache=False).logits
    models = [in_fp8(name, each, rounds_rows=False) for each in thread_collectives(2)]
    num_layers = [
        sum(isinstance(m, Fp8Linear) for m in each.modules()) for each in (whole, *models)
    ]
    assert num_layers == [num_layers[0]] * 3
    for logits in computed_by(models, token_ids):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "3: does not divide the model's num_attention_heads, 4"),
        (4, "4: does not divide the model's num_key_value_heads, 2"),
    ],
)
def test_heads_that_cannot_be_divided_evenly_are_refused(size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        shard(make_model("llama"), thread_collectives(size)[0], CPU)
    assert str(refused.value).startswith("--tensor-parallel-size")


def test_a_model_without_a_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr(model, "_tp_plan", {})
    with pytest.raises(ConfigError, match="no plan to cut LlamaForCausalLM"):
        shard(model, thread_collectives(2)[0], CPU)


def test_a_rank_quantises_each_layer_before_it_cuts_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a device never holds its part unquantised, which may not fit."""
    left: list[int] = []

    def quantise_the_rest(*arguments: Any, **options: Any) -> None:
        left.append(quantise_linear_layers(*arguments, **options))

    monkeypatch.setattr(checkpoint, "quantise_linear_layers", quantise_the_rest)
    config = VerifierConfig(
        model=MODEL_FOLDER, device="cpu", quantization="fp8", threads=1, tensor_parallel_size=2
    )
    part = load_part(config, device=CPU, collectives=thread_collectives(2)[1])
    assert left == [0]
    layers = [m for m in part.checkpoint.model.modules() if isinstance(m, Fp8Linear)]
    assert len(layers) == 7 * part.checkpoint.kv_shape.num_layers


def test_a_layer_that_cannot_be_cut_evenly_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL | {"intermediate_size": 111}))
    with pytest.raises(ConfigError, match=r"2: does not divide model\.layers\.0\.mlp\.\w+, 111"):
        shard(model, thread_collectives(2)[0], CPU)
