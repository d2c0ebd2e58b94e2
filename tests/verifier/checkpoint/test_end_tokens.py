"""Answers end at the tokenizer's own end token, too."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.verifier.cpu.running_decoder import MODEL_FOLDER
from verifier.build import load_model
from verifier.checkpoint.end_tokens import with_tokenizers_end_token
from verifier.config import VerifierConfig

BPE = {
    "added_tokens": [{"id": 7, "content": "<|im_end|>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 3}},
}
UNIGRAM = {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["<unk>", 0], ["</s>", -1]]}}


def end_tokens(folder: Path, config: object, tokenizer: object, configured: set[int]) -> set[int]:
    for name, content in (("tokenizer_config", config), ("tokenizer", tokenizer)):
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return set(with_tokenizers_end_token(folder, frozenset(configured)))


@pytest.mark.parametrize(
    ("eos_token", "tokenizer", "expected"),
    [
        ("<|im_end|>", BPE, {0, 7}),
        ({"content": "<|im_end|>", "lstrip": False}, BPE, {0, 7}),
        ("</s>", BPE, {0, 3}),
        ("</s>", UNIGRAM, {0, 1}),
        ("a", BPE, {0}),
        ("<|absent|>", BPE, {0}),
        ("<|absent|>", UNIGRAM, {0}),
        (None, BPE, {0}),
        (False, BPE, {0}),
    ],
)
def test_the_tokenizers_end_token_counts_beside_the_configured_ones(
    eos_token: Any, tokenizer: object, expected: set[int], tmp_path: Path
) -> None:
    with capture_logs() as logs:
        assert end_tokens(tmp_path, {"eos_token": eos_token}, tokenizer, {0}) == expected
    assert [each["event"] for each in logs] == ["tokenizers_end_token"] * (len(expected) - 1)
    assert end_tokens(tmp_path, {"eos_token": eos_token}, tokenizer, set()) >= expected - {0}


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [
        ("{", BPE),
        ([], BPE),
        ({"eos_token": "a"}, "{"),
        ({"eos_token": "a"}, {}),
        ({"eos_token": "a"}, {"model": {"vocab": 3}}),
        ({"eos_token": "a"}, {"added_tokens": [3], "model": {"vocab": {}}}),
        ({"eos_token": "a"}, "[" * 100_000),
    ],
)
def test_a_tokenizer_that_cannot_be_read_adds_none_and_is_told(
    config: object, tokenizer: object, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        assert end_tokens(tmp_path, config, tokenizer, {0}) == {0}
    assert [each["event"] for each in logs] == ["tokenizers_end_token_unknown"]


@pytest.mark.parametrize("value", [-1, True, "7", 1 << 32, None])
def test_an_id_that_no_token_can_have_adds_none(value: object, tmp_path: Path) -> None:
    tokenizer = {**BPE, "added_tokens": [{"id": value, "content": "<|im_end|>"}]}
    assert end_tokens(tmp_path, {"eos_token": "<|im_end|>"}, tokenizer, {0}) == {0}


@pytest.mark.parametrize("numerics", ["strict", "fast"])
def test_whoever_computes_a_model_its_answers_end_at_the_tokenizers_end_token(
    numerics: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(MODEL_FOLDER, tmp_path / "m")
    own = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": 1000}))
    config = VerifierConfig.model_validate(
        {"model": folder, "device": "cpu", "numerics": numerics, "num_kv_blocks": 4}
    )
    with capture_logs() as logs:
        assert load_model(config).served.eos_token_ids == {own, 1000}
    assert [each["token_id"] for each in logs if each["event"] == "tokenizers_end_token"] == [own]
