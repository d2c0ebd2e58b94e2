"""The check against transformers: sound models pass once, wrong ones never."""

import dataclasses
import itertools
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.verifier.cpu.running_decoder import MODEL_FOLDER, load
from tests.verifier.cpu.test_loader import CONFIGS, SMALL, save
from tests.volume import cases
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.weight_types import FloatArray
from verifier.cpu.decoder import CpuDecoder
from verifier.cpu.weights import DecoderWeights
from verifier.parity import comparison, cpu_check
from verifier.parity.cpu_check import ParityCheck, Subject
from verifier.parity.reference import reference


def subject(folder: Path, dtype: str = "float32", quantization: str = "none") -> Subject:
    return Subject(
        folder=folder,
        model_digest="of a test",
        dtype=dtype,
        quantization=quantization,
        max_position_embeddings=512,
    )


def started(subject: Subject, cache: Path) -> ParityCheck:
    """A check; each has a child that imports transformers, which takes seconds."""
    return ParityCheck(subject, cache=cache, num_threads=1)


def refer_here(check: ParityCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the reference computed by this process, which has imported transformers; the child calls
    the same function.
    """
    told = check._subject
    exact, rounding = reference(
        told.folder,
        dtype=getattr(torch, told.dtype),
        quantization=told.quantization,
        rounds_kv=True,
    )
    monkeypatch.setattr(check, "_reference", lambda **_: (exact.numpy(), rounding))


def is_known(subject: Subject, cache: Path) -> bool:
    with started(subject, cache) as check:
        return check.is_known


def with_scaling(weights: DecoderWeights, factor: float) -> DecoderWeights:
    return dataclasses.replace(weights, attention_scaling=weights.attention_scaling * factor)


def logits_of(weights: DecoderWeights) -> FloatArray:
    """Of the check's text."""
    decoder = CpuDecoder(
        cpu_check._with_short_windows(weights),
        num_blocks=3,
        block_size=16,
        num_threads=1,
        max_num_tokens=comparison.NUM_TOKENS,
    )
    text = comparison.probe_text(vocab_size=SMALL["vocab_size"], max_model_len=512)
    try:
        has_long_rope = weights.rotaries[0].long_inv_freq is not None
        return comparison.paged_logits(
            decoder, text, [], block_size=16, has_long_rope=has_long_rope
        )
    finally:
        decoder.close()


def test_a_model_is_checked_once_and_again_when_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    save(model, "qwen2")  # with a sliding window
    weights = load(model)
    with started(subject(model), cache) as check:
        refer_here(check, monkeypatch)
        with pytest.raises(CheckpointError, match=r"logits differ by"):
            check.verify(with_scaling(weights, 1.02))
        assert not is_known(subject(model), cache), "a failure is no verdict"
        check.verify(weights)
    assert is_known(subject(model), cache)
    assert not is_known(dataclasses.replace(subject(model), model_digest="of another"), cache)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_rounded_models_are_held_to_their_rounding(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load(MODEL_FOLDER, "bfloat16", quantization)
    told = subject(MODEL_FOLDER, "bfloat16", quantization)
    with started(told, tmp_path) as check:
        if quantization == "none":  # by which the child shows that it knows dtype and quantization
            refer_here(check, monkeypatch)
        with pytest.raises(CheckpointError, match="where rounding is"):
            check.verify(with_scaling(weights, 1.05))
        check.verify(weights)
    assert is_known(told, tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        [
            ("llama_biases", "float16"),
            ("gemma2", "bfloat16"),
            ("phi3", "float16"),
            ("mixtral", "bfloat16"),
        ],
        list(itertools.product(CONFIGS, ["bfloat16", "float16"])),
    ),
)
def test_correct_models_are_far_from_the_limits_of_rounding(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """The reference rounds K/V as the decoder does. Without that, a dense model differs by up to a
    tenth, and a mixture of experts by any amount.
    """
    torch_dtype = getattr(torch, dtype)
    save(tmp_path, name, torch_dtype)
    told, rounding = reference(tmp_path, dtype=torch_dtype, quantization="none", rounds_kv=True)
    exact = told.numpy()
    logits = logits_of(load(tmp_path))
    comparison.check_difference(logits, exact, 0.01)
    comparison.check_rounding(logits, exact, rounding, 0.1)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma4_mixture"])
def test_experts_are_quantised_by_the_rows_of_each(name: str, tmp_path: Path) -> None:
    """They lie in one tensor in transformers, GPT-OSS's by columns."""
    save(tmp_path, name, torch.bfloat16)
    told, rounding = reference(tmp_path, dtype=torch.bfloat16, quantization="fp8", rounds_kv=True)
    logits = logits_of(load(tmp_path, quantization="fp8"))
    comparison.check_rounding(logits, told.numpy(), rounding, 0.01)


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_only_a_token_of_a_mixture_of_experts_may_go_another_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, name, torch.bfloat16)
    weights = load(tmp_path)
    logits = logits_of(weights)
    told = logits.copy()
    told[17] = -told[17]
    with started(subject(tmp_path, "bfloat16"), tmp_path) as check:
        monkeypatch.setattr(check, "_reference", lambda **_: (told, 0.01))
        if name == "mixtral":
            check.verify(weights)
        else:
            with pytest.raises(CheckpointError, match="logits differ by"):
                check.verify(weights)
        monkeypatch.setattr(check, "_reference", lambda **_: (told * 1.5, 0.01))
        with pytest.raises(CheckpointError):
            check.verify(weights)


def test_a_child_that_dies_is_told_and_whether_its_files_had_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "llama")
    weights = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with started(subject(tmp_path), tmp_path) as check:
        with pytest.raises(CheckpointError, match=r"exit status 1\): .*safetensors") as refusal:
            check.verify(weights)
        assert "no space left" not in str(refusal.value)
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(CheckpointError, match=f"no space left in {tempfile.gettempdir()}, "):
            check.verify(weights)


def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    with started(subject(MODEL_FOLDER), tmp_path) as check:
        assert check._child.stdin is not None
        check._child.stdin.close()  # as if this process were killed
        with pytest.raises(CheckpointError, match="exit status 1"):
            check.verify(load(MODEL_FOLDER))


def test_without_transformers_a_verdict_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    verdict = tmp_path / f"parity-{subject(tmp_path).key()}.json"
    with pytest.raises(CheckpointError, match=f"torch and transformers.*{verdict.name}.*: No such"):
        started(subject(tmp_path), tmp_path)
    verdict.mkdir()
    with pytest.raises(CheckpointError, match=f"torch and transformers.*{verdict.name}.*: Is a"):
        started(subject(tmp_path), tmp_path)
    verdict.rmdir()

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError

    verdict.write_text('{"transformers": "5.0"}')
    monkeypatch.setattr(metadata, "version", version)
    assert is_known(subject(tmp_path), tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"transformers": "0.1"}'])
def test_a_verdict_that_is_broken_or_of_another_version_does_not_count(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / f"parity-{subject(tmp_path).key()}.json"
    path.write_text(content)
    with started(subject(tmp_path), tmp_path) as check:
        assert not check.is_known


def test_a_child_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "llama")
    monkeypatch.setattr(cpu_check, "_TIMEOUT_S", 0.01)
    with started(subject(tmp_path), tmp_path) as check:
        with pytest.raises(CheckpointError, match="did not come within"):
            check.verify(load(tmp_path))
        assert check._child.poll() is None
    assert check._child.poll() is not None
