"""The demonstration model: its held-out tasks, its training and its figures."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from examples.demo_model.dataset import (
    CODE,
    MODEL_FOLDER,
    OUT,
    RENAME,
    TO,
    read_heldout,
    training_files,
)
from examples.demo_model.evaluate import (
    load_model,
    load_tokenizer,
    teacher_forced,
)
from examples.demo_model.train import (
    new_model,
)

PROMPT = re.compile(
    "".join(
        f"{re.escape(token)}({group})"
        for token, group in ((CODE, ".*"), (RENAME, r"\w+"), (TO, r"\w+"), (OUT, ""))
    ),
    re.DOTALL,
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return read_heldout()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL_FOLDER)


@pytest.fixture(scope="module")
def bundled_model() -> PreTrainedModel:
    return load_model(MODEL_FOLDER, torch.float32)


def source_of(row: dict[str, str]) -> str:
    match = PROMPT.fullmatch(row["prompt"])
    assert match is not None, row["id"]
    return match[1]


# The held-out file


def test_no_heldout_snippet_stands_in_the_training_split(rows: list[dict[str, str]]) -> None:
    trained = "\n".join("\n".join(file.lines) for file in training_files())
    assert len(trained) > 1_000_000
    # A search through all of it for each snippet would take minutes.
    lines = set(trained.split("\n"))
    suspects = [row for row in rows if lines.issuperset(source_of(row).split("\n"))]
    assert suspects, "short ones may consist of such lines, elsewhere"
    assert [row["id"] for row in suspects if source_of(row) in trained] == []


# Where tasks come from


# Training


# The bundled weights


def test_bundled_files_are_those_of_the_model_card() -> None:
    card = (MODEL_FOLDER / "README.md").read_text("utf-8")
    for name in ("model.safetensors", "tokenizer.json"):
        digest = hashlib.sha256((MODEL_FOLDER / name).read_bytes()).hexdigest()
        assert f"{digest}  {name}" in card


def test_the_training_script_builds_the_bundled_architecture() -> None:
    model = new_model()
    parameters = dict(model.named_parameters())
    with safe_open(MODEL_FOLDER / "model.safetensors", framework="pt") as bundled:
        assert set(bundled.keys()) == parameters.keys()
        for name in parameters:
            assert bundled.get_slice(name).get_shape() == list(parameters[name].shape), name
    bundled_config = json.loads((MODEL_FOLDER / "config.json").read_text("utf-8"))
    for name in bundled_config.keys() - {"architectures", "dtype", "transformers_version"}:
        assert model.config.to_dict()[name] == bundled_config[name], name


def test_bundled_model_gets_nearly_every_edited_token_right(
    bundled_model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    result = teacher_forced(bundled_model, tokenizer, read_heldout(limit=20))
    assert result.num_tasks == 20
    assert result.token_accuracy >= 0.95
