"""Which checkpoint folders are served, within which limits, and their digests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    PhimoeConfig,
    PreTrainedModel,
)

from servicekit.config import ConfigError
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import CPU, EXPERT_CONFIGS, SMALL, SMALL_CONFIGS
from tests.verifier.saved_models import SaveModel, config_for
from tests.volume import cases
from verifier.attention.backend import StepAttention
from verifier.attention.kv_cache import KVCache
from verifier.attention.sdpa import SdpaBackend
from verifier.batch.batch_layout import BatchLayout
from verifier.build import load_model
from verifier.checkpoint.digests import digest_of
from verifier.checkpoint.refusals import CheckpointError
from verifier.parity.quantised_values import replaced_weights
from verifier.transformers_model import dtypes
from verifier.transformers_model.checkpoint import checkpoint_of, load_checkpoint
from verifier.transformers_model.config import uses_experts
from verifier.transformers_model.dtypes import choose_dtype
from verifier.transformers_model.paged_model import TransformersModel

SDPA_BACKEND = "verifier.gpu.attention.selection.SdpaBackend"


class TestMixturesOfExperts:
    def test_are_not_quantised(self, save_model: SaveModel) -> None:
        folder = save_model(SMALL_CONFIGS["qwen3_moe"]())
        with pytest.raises(CheckpointError, match="--quantization fp8 is not offered for mixtures"):
            load_model(config_for(folder, quantization="fp8"))

    @pytest.mark.parametrize("name", list(SMALL_CONFIGS))
    def test_are_distinguished_from_dense_models(self, name: str) -> None:
        assert uses_experts(SMALL_CONFIGS[name]()) == (name in EXPERT_CONFIGS)


class BrokenStep:
    """A step's attention with one argument changed or dropped."""

    def __init__(self, step: StepAttention, **changed: Any) -> None:
        self._step = step
        self._changed = changed

    def attend(self, *tensors: Any, **arguments: Any) -> torch.Tensor:
        return self._step.attend(*tensors, **(arguments | self._changed))


def broken_backend(**changed: Any) -> type[SdpaBackend]:
    class BrokenBackend(SdpaBackend):
        def prepare(self, layout: BatchLayout, cache: KVCache) -> Any:
            return BrokenStep(super().prepare(layout, cache), **changed)

    return BrokenBackend


class TestParityProbe:
    """The check before serving that the model is computed as transformers computes it."""

    @pytest.mark.parametrize("name", list(SMALL_CONFIGS))
    @pytest.mark.parametrize("dtype", cases(["bfloat16"], ["float32", "bfloat16", "float16"]))
    def test_accepts_correct_models(self, save_model: SaveModel, name: str, dtype: str) -> None:
        loaded = load_model(config_for(save_model(SMALL_CONFIGS[name]()), dtype=dtype))
        assert loaded.served.vocab_size == 97
        assert loaded.served.dtype == dtype

    @pytest.mark.parametrize(
        ("name", "changed"),
        [
            ("llama", {"scaling": 1.0}),
            ("mistral", {"sliding_window": None}),
            ("gemma3", {"sliding_window": 100}),
        ],
        ids=["scaling ignored", "sliding window ignored", "sliding window in a full layer"],
    )
    @pytest.mark.parametrize(
        ("dtype", "quantization"),
        cases(
            [("bfloat16", "none")],
            [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "fp8")],
        ),
    )
    def test_refuses_a_model_that_would_be_computed_wrongly(
        self,
        save_model: SaveModel,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        changed: dict[str, Any],
        dtype: str,
        quantization: str,
    ) -> None:
        monkeypatch.setattr(SDPA_BACKEND, broken_backend(**changed))
        folder = save_model(SMALL_CONFIGS[name]())
        with pytest.raises(CheckpointError, match="not computed as transformers computes it"):
            load_model(config_for(folder, dtype=dtype, quantization=quantization))

    @pytest.mark.parametrize("dtype", cases(["float16"], ["float32", "bfloat16", "float16"]))
    def test_accepts_the_bundled_model_and_leaves_its_weights_unchanged(self, dtype: str) -> None:
        loaded = load_model(config_for(MODEL_FOLDER, dtype=dtype))
        assert isinstance(loaded.model, TransformersModel)
        stored = load_file(MODEL_FOLDER / "model.safetensors")
        for name, parameter in loaded.model._model.named_parameters():
            assert str(parameter.dtype) == f"torch.{dtype}"
            assert torch.equal(parameter, stored[name].to(parameter.dtype)), name
        modules = list(loaded.model._model.modules())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)

    def test_a_model_that_fails_with_wider_weights_is_compared_in_its_own_dtype(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(model: PreTrainedModel, dtype: torch.dtype, **_: object) -> None:
            raise RuntimeError(f"expected bfloat16, not {dtype}")

        monkeypatch.setattr("verifier.parity.transformers_check.computed_in", fail)
        assert load_model(config_for(MODEL_FOLDER, dtype="bfloat16")).served.dtype == "bfloat16"
        monkeypatch.setattr(SDPA_BACKEND, broken_backend(scaling=1.0))
        with pytest.raises(CheckpointError, match="differ by"):
            load_model(config_for(MODEL_FOLDER, dtype="bfloat16"))

    def test_refuses_a_model_whose_attention_ignores_its_window(
        self, save_model: SaveModel
    ) -> None:
        """PhiMoE's window is in transformers' masks only; it is longer than the probe's text."""
        config = PhimoeConfig(**SMALL, sliding_window=200, num_local_experts=2)
        folder = save_model(config)
        with pytest.raises(CheckpointError, match="not computed as transformers computes it"):
            load_model(config_for(folder))
        # A window that no sequence outgrows hides nothing.
        assert load_model(config_for(folder, max_model_len=200)).served.max_model_len == 200


@pytest.mark.parametrize(
    ("asked", "own", "native", "chosen"),
    [
        ("auto", torch.float32, {"bfloat16", "float16"}, torch.float32),
        ("auto", torch.bfloat16, {"bfloat16"}, torch.bfloat16),
        ("auto", torch.bfloat16, {"float16"}, torch.float32),
        ("auto", torch.float16, {"float16"}, torch.float16),
        ("auto", torch.float16, {"bfloat16"}, torch.float32),
        ("auto", torch.float64, {"bfloat16"}, torch.float32),
        ("auto", None, {"bfloat16"}, torch.float32),
        ("float32", torch.bfloat16, {"bfloat16"}, torch.float32),
        ("bfloat16", torch.float32, set(), torch.bfloat16),
        ("float16", torch.float32, set(), torch.float16),
    ],
)
def test_dtype_is_the_checkpoints_if_the_processor_supports_it_natively(
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    own: torch.dtype | None,
    native: set[str],
    chosen: torch.dtype,
) -> None:
    monkeypatch.setattr(dtypes, "cpu_has_bfloat16", lambda: "bfloat16" in native)
    monkeypatch.setattr(dtypes, "cpu_has_float16", lambda: "float16" in native)
    config = SMALL_CONFIGS["llama"]()
    config.dtype = own
    assert choose_dtype(asked, config=config, device=CPU) is chosen


@pytest.mark.parametrize("eos", [-1, 1 << 32, [3, True], 0.5, "3"])
def test_end_tokens_that_are_no_ids_are_refused(eos: object) -> None:
    model = AutoModelForCausalLM.from_config(SMALL_CONFIGS["llama"]())
    model.config.__dict__["eos_token_id"] = eos
    with pytest.raises(CheckpointError, match="not ids of tokens"):
        checkpoint_of(model, dtype=torch.float32, model_digest="")


def test_replaced_weights_are_put_back_where_a_module_fails() -> None:
    class Failing(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("expected bfloat16")

    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), Failing(2, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    with (
        pytest.raises(RuntimeError, match="expected bfloat16"),
        replaced_weights(model, lambda _, weight: weight + 1),
    ):
        model(torch.ones(1, 2))
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(3, None, {3}), ([3, 4], None, {3, 4}), (3, [5, 6], {5, 6}), (None, None, set())],
)
def test_end_tokens_come_from_the_generation_configuration_if_it_has_any(
    save_model: SaveModel,
    config_eos: int | list[int] | None,
    generation_eos: list[int] | None,
    expected: set[int],
) -> None:
    folder = save_model(SMALL_CONFIGS["llama"]())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": config_eos}))
    generation = {} if generation_eos is None else {"eos_token_id": generation_eos}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_checkpoint(folder, dtype="auto", device=CPU).eos_token_ids == expected


class TestDigest:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("model-1.safetensors", "model-2.safetensors", "tokenizer.json", "config.json"):
            (tmp_path / name).write_bytes(name.encode() * 10)
        return tmp_path

    @pytest.mark.parametrize("name", ["model-1.safetensors", "model-2.safetensors",
                                      "tokenizer.json", "config.json"])  # fmt: skip
    def test_changes_with_any_byte_that_matters(self, folder: Path, name: str) -> None:
        before = digest_of(folder)
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
        assert digest_of(folder) != before


@pytest.mark.parametrize("numerics", ["strict", "fast"])
class TestLimits:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, 512),  # 32 blocks of 16 tokens
            ({"num_kv_blocks": 200}, 2048),  # the model's own limit
            ({"max_model_len": 100}, 100),
        ],
    )
    def test_the_longest_sequence_is_the_smallest_limit_of_model_flag_and_cache(
        self, options: dict[str, Any], expected: int, numerics: str
    ) -> None:
        assert (
            load_model(config_for(MODEL_FOLDER, numerics=numerics, **options)).served.max_model_len
            == expected
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_model_len": 513}, "--max-model-len: 513: the K/V cache holds 512 tokens"),
            (
                {"max_model_len": 2049, "num_kv_blocks": 200},
                "--max-model-len: 2049: the model's limit is 2048",
            ),
        ],
    )
    def test_a_limit_over_the_models_or_the_caches_is_refused(
        self, options: dict[str, Any], message: str, numerics: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            load_model(config_for(MODEL_FOLDER, numerics=numerics, **options))

    def test_blocks_are_sized_to_the_sequences_if_memory_allows(self, numerics: str) -> None:
        config = config_for(
            MODEL_FOLDER,
            numerics=numerics,
            num_kv_blocks=None,
            max_num_seqs=2,
            max_model_len=100,
        )
        assert load_model(config).served.num_kv_blocks == 2 * 7

    def test_no_memory_for_a_block_is_refused(self, numerics: str) -> None:
        config = config_for(
            MODEL_FOLDER, numerics=numerics, num_kv_blocks=None, kv_memory_fraction=1e-9
        )
        with pytest.raises(ConfigError, match="--kv-memory-fraction"):
            load_model(config)
