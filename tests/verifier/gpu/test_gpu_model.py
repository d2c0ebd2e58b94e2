"""Which models the decoder for GPUs serves, and its check against transformers; on a CPU."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from servicekit.config import ConfigError
from tests.verifier.cpu.running_decoder import MODEL_FOLDER
from tests.verifier.cpu.test_loader import CONFIGS, save
from tests.verifier.gpu.capped_attention import CappedBackend
from tests.verifier.gpu.graph_stand_in import RecordingCapture
from tests.verifier.gpu.running_decoder import CPU, backend_for, load
from tests.verifier.gpu.tables_attention import TablesBackend
from tests.verifier.gpu.test_decoder import assert_near, folder_of, transformers_logits
from tests.verifier.paged_model import some_tokens
from tests.verifier.scoring_engine import score, stacked, started
from tests.volume import cases
from verifier.attention.sdpa import SdpaBackend
from verifier.batch.target_model import FloatArray, TargetModel
from verifier.build import load_model
from verifier.checkpoint.refusals import CheckpointError
from verifier.config import VerifierConfig
from verifier.gpu.decoder import GpuDecoder
from verifier.gpu.plain import PlainOperations
from verifier.gpu.weights import GpuWeights, Layer
from verifier.model import fallback_model, gpu_model, own_model
from verifier.model.gpu_model import find_on_gpu, load_on_gpu
from verifier.parity import gpu_check
from verifier.parity.comparison import paged_logits
from verifier.parity.gpu_check import check_decoder, reference_on
from verifier.parity.reference import reference
from verifier.service.score_call import DraftsToScore

GPU = torch.device("cuda", 0)
SOME = ["llama_biases", "gemma2", "mixtral", "gemma4", "olmo3", "qwen3_5"]


def config_for(folder: Path = MODEL_FOLDER, **options: Any) -> VerifierConfig:
    return VerifierConfig(model=folder, **{"device": "cuda", "num_kv_blocks": 8, **options})


def check(weights: GpuWeights, folder: Path) -> None:
    exact, rounding = reference(folder, dtype=weights.dtype, quantization="none")
    check_decoder(
        weights, backend_for(weights), block_size=16, exact=exact.numpy(), rounding=rounding
    )


@pytest.mark.parametrize("name", cases(SOME, CONFIGS))
def test_every_family_passes_the_check(name: str) -> None:
    check(load(folder_of(name)), folder_of(name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", cases(SOME, CONFIGS))
def test_rounding_passes_the_check(name: str, dtype: str, tmp_path: Path) -> None:
    save(tmp_path, name, getattr(torch, dtype))
    check(load(tmp_path), tmp_path)


def with_scaled_attention(weights: GpuWeights) -> GpuWeights:
    config = dataclasses.replace(
        weights.config, attention_scaling=weights.config.attention_scaling * 1.1
    )
    return dataclasses.replace(weights, config=config)


def with_layers(weights: GpuWeights, change: Callable[[Layer], Layer]) -> GpuWeights:
    return dataclasses.replace(weights, layers=[change(layer) for layer in weights.layers])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "change",
    [
        with_scaled_attention,
        lambda w: with_layers(w, lambda each: dataclasses.replace(each, sliding_window=None)),
        lambda w: with_layers(w, lambda each: dataclasses.replace(each, mlp_norm=each.input_norm)),
        lambda w: dataclasses.replace(w, inv_freqs=[each * 1.02 for each in w.inv_freqs]),
        lambda w: dataclasses.replace(w, head=w.head * torch.nan),
    ],
)
def test_a_decoder_that_computes_another_model_is_refused(
    change: Callable[[GpuWeights], GpuWeights], dtype: str, tmp_path: Path
) -> None:
    save(tmp_path, "mistral", getattr(torch, dtype))
    with pytest.raises(CheckpointError, match="not computed as transformers computes it"):
        check(change(load(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ("gemma2", {"attention_backend": "sdpa"}, "attention backend sdpa serves no softcap"),
        ("gpt_oss", {"attention_backend": "sdpa"}, "attention backend sdpa serves no sinks"),
    ],
)
def test_others_go_to_transformers_and_the_log_says_why(
    name: str, options: dict[str, Any], reason: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert find_on_gpu(config_for(folder_of(name), **options), GPU) is None
    assert [(log["event"], log["reason"]) for log in logs] == [("served_by_transformers", reason)]


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"quantization": "fp8"}, "--quantization fp8"),
        ("llama", {"attention_backend": "sdpa"}, "attention backend sdpa, whose bits"),
        ("gemma2", {"attention_backend": "sdpa"}, "attention backend sdpa serves no softcap"),
    ],
)
def test_strict_is_refused_by_the_reason_for_which_transformers_would_compute(
    name: str, options: dict[str, Any], reason: str
) -> None:
    config = config_for(folder_of(name), numerics="strict", dtype="bfloat16", **options)
    with pytest.raises(ConfigError, match=f"--numerics: strict: .* not serve this: {reason}"):
        find_on_gpu(config, GPU)


def test_softcaps_are_served_where_the_backend_serves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_model, "make_backend", lambda choice, **_: CappedBackend())
    config = config_for(folder_of("gemma2"), device="cpu")
    described = find_on_gpu(config, CPU)
    assert described is not None
    ready = load_on_gpu(config, described, CPU)
    text = list(range(30))
    rows = paged_logits(ready.model, text, [11], block_size=16)
    assert_near(torch.from_numpy(rows), transformers_logits(folder_of("gemma2"), text))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_where_transformers_model_does_not_fit_the_cpu_computes_its_logits(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP8, the decoder needs half of that memory."""
    for name in ("reference", "fp8_reference"):
        compute = getattr(gpu_check, name)

        def of_a_small_gpu(
            *arguments: Any, device: torch.device, compute: Any = compute, **o: Any
        ) -> Any:
            if device.type == "cuda":
                raise torch.OutOfMemoryError("tried to allocate 141 GiB")
            return compute(*arguments, device=device, **o)

        monkeypatch.setattr(gpu_check, name, of_a_small_gpu)
    is_fp8 = quantization == "fp8"
    with structlog.testing.capture_logs() as logs:
        got = reference_on(MODEL_FOLDER, torch.bfloat16, is_fp8, GPU)
    assert [log["event"] for log in logs] == ["reference_on_cpu"]
    expected = reference_on(MODEL_FOLDER, torch.bfloat16, is_fp8, CPU)
    assert (got[0] == expected[0]).all()
    assert got[1:] == expected[1:]


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("load_weights", "--model"),
        ("WrittenCache", "--num-kv-blocks: 4 blocks"),
        ("GpuDecoder.warm_up", "--num-kv-blocks: 4 blocks leave no memory for a step"),
    ],
)
def test_memory_that_is_short_is_refused_by_the_flag(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(folder_of("llama"), device="cpu", num_kv_blocks=4)
    described = find_on_gpu(config, CPU)
    assert described is not None
    monkeypatch.setattr(gpu_model, "check_decoder", lambda *_, **__: None)

    def failing(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(f"verifier.model.gpu_model.{name}", failing)
    with pytest.raises(ConfigError, match=f"{flag}.*9 GiB"):
        load_on_gpu(config, described, CPU)


@pytest.mark.parametrize(("free_gib", "expected_mib"), [(80, 1024), (2, 512)])
def test_graphs_take_a_quarter_of_what_weights_leave_at_most(
    free_gib: int, expected_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_model, "CudaCapture", lambda device: RecordingCapture())
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free_gib << 30, 80 << 30))
    graphs = gpu_model._graphs_for(TablesBackend(), GPU)
    assert graphs is not None
    assert graphs.limits.max_bytes == expected_mib << 20


def fake_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is computed on the CPU."""
    monkeypatch.setattr(own_model, "has_gpu_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(fallback_model, "choose_device", lambda config, rank: GPU)
    monkeypatch.setattr(
        fallback_model,
        "load_on_gpu",
        lambda config, described, device: load_on_gpu(config, described, CPU),
    )


def test_an_engine_scores_drafts_by_the_decoder_as_transformers_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a thread of its own, and in chunks; hidden states included."""
    fake_a_gpu(monkeypatch)
    config = config_for(
        dtype="float32", num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=24
    )
    loaded = load_model(config)
    text = some_tokens(90, loaded.served.vocab_size)
    batch = [
        DraftsToScore(token_ids=text[:40], draft_token_ids=text[40:45]),
        DraftsToScore(token_ids=text[:1], draft_token_ids=text[1:4]),
        DraftsToScore(token_ids=text[:80], draft_token_ids=[]),
    ]
    with started(loaded, config) as engine:
        scores = score(engine, batch, hidden_states=True)
    expected = transformers_logits(MODEL_FOLDER, text, torch.float32)
    head = load(MODEL_FOLDER, "float32").head
    for each, (first, end) in zip(scores, ((39, 45), (0, 4), (79, 80)), strict=True):
        rows = stacked(each, "hidden_state").float() @ head.T
        assert_near(rows, expected[first:end])


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_verifier_on_a_gpu_serves_the_bundled_model_by_the_decoder(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_a_gpu(monkeypatch)
    with structlog.testing.capture_logs() as logs:
        loaded = load_model(config_for(device=device))
    assert isinstance(loaded.model, GpuDecoder)
    served = loaded.served
    assert (served.numerics, served.dtype, served.architecture) == (
        "fast",
        "bfloat16",
        "Qwen3ForCausalLM",
    )
    assert (served.attention_backend, served.block_size, served.num_kv_blocks) == ("sdpa", 16, 8)
    assert served.max_model_len == 128
    assert served.eos_token_ids == {0}
    assert [log["event"] for log in logs] == ["gpu_decoder", "model loaded"]
    text = list(range(30))
    rows = torch.from_numpy(paged_logits(loaded.model, text, [11], block_size=16))
    exact = transformers_logits(MODEL_FOLDER, text, torch.float32)
    off = (transformers_logits(MODEL_FOLDER, text) - exact).abs().mean()
    assert (rows - exact).abs().mean() <= 2 * off


class CallsItselfStrict(PlainOperations):
    """Stands in for a GPU's operations, which do what they say."""

    @property
    def is_strict(self) -> bool:
        return True


def in_one_piece(
    model: TargetModel, text: list[int], cuts: list[int], **options: Any
) -> FloatArray:
    return paged_logits(model, text, [], **options)


class OnlyCallsItselfStrict(CallsItselfStrict):
    """A single row's product is another one, by a rounding of its dtype."""

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().linear(rows, weight, bias) * (
            1.0 + torch.finfo(rows.dtype).eps * (len(rows) == 1)
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_strict_decoder_whose_bits_depend_on_chunks_is_refused(
    dtype: str, tmp_path: Path
) -> None:
    save(tmp_path, "mistral", getattr(torch, dtype))
    weights = load(tmp_path, operations=OnlyCallsItselfStrict())
    with pytest.raises(CheckpointError, match="strict: the bits of logits depend on chunks"):
        check(weights, tmp_path)


class DiffersForManyRows(CallsItselfStrict):
    """As a tile would that is larger than the text of the check."""

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        linear = super().linear
        product = torch.cat([linear(row[None], weight, bias) for row in rows])
        return product * (1.0 + torch.finfo(rows.dtype).eps * (len(rows) > 128))


class AddsFewRowsInAnotherOrder(CallsItselfStrict):
    """As instructions of another length would. Sums are float32, and rounded once."""

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert bias is None
        num_inputs = 16 if len(rows) <= 16 else 8
        sums = torch.zeros(len(rows), len(weight))
        for some, of_weight in zip(
            rows.float().split(num_inputs, dim=1),
            weight.float().split(num_inputs, dim=1),
            strict=True,
        ):
            sums = (sums + some.double() @ of_weight.double().T).float()
        return sums.to(rows.dtype)


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("operations", "dtype"),
    [
        (DiffersForManyRows(), torch.float32),
        (AddsFewRowsInAnotherOrder(), torch.float32),
        (AddsFewRowsInAnotherOrder(), torch.bfloat16),
    ],
    ids=["by a rounding", "by the order of float32 sums", "by the order, rounded"],
)
def test_a_strict_decoder_whose_tiles_differ_is_refused(
    operations: PlainOperations,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_check, "paged_logits", in_one_piece)
    save(tmp_path, "mistral", dtype)
    weights = load(tmp_path, operations=operations)
    with pytest.raises(CheckpointError, match="strict: the bits of products depend on rows"):
        check(weights, tmp_path)


def test_what_transformers_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu_check, "reference", failing)
    config = config_for()
    described = find_on_gpu(config, GPU)
    assert described is not None
    with pytest.raises(CheckpointError, match=r"logits could not be computed: no kernel image"):
        load_on_gpu(config, described, CPU)


def test_a_backend_that_fails_at_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SdpaBackend, "prepare", lambda *_: 1 / 0)
    with pytest.raises(CheckpointError, match="the decoder for GPUs cannot compute it: division"):
        check(load(folder_of("llama")), folder_of("llama"))
