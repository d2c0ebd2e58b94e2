"""The demonstration model: its held-out tasks, its training and its figures."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from examples.demo_model.dataset import (
    CODE,
    END,
    HELDOUT_LINES,
    HELDOUT_TASKS,
    MODEL_FOLDER,
    NEVER_RENAMED,
    OUT,
    RENAME,
    SPECIAL_TOKENS,
    TO,
    TRAINING_LINES,
    NamedFile,
    RenameSampler,
    heldout_files,
    make_heldout,
    name_files,
    read_heldout,
    rename_identifier,
    training_files,
)
from examples.demo_model.evaluate import (
    load_model,
    load_tokenizer,
    teacher_forced,
)
from examples.demo_model.packing import BATCH_ROWS, IGNORED, ROW_TOKENS, PackedBatches
from examples.demo_model.train import (
    Phase,
    Progress,
    new_model,
    save_checkpoint,
    train_phase,
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


@pytest.fixture(scope="module")
def few_files() -> list[NamedFile]:
    """A dozen files of the training split, so that nothing waits for all of it."""
    names = ("bisect.py", "calendar.py", "colorsys.py", "heapq.py", "queue.py", "textwrap.py")
    return name_files(file for file in training_files() if file.path in names)


def count_words(text: str) -> int:
    return len(text.split())


def source_of(row: dict[str, str]) -> str:
    match = PROMPT.fullmatch(row["prompt"])
    assert match is not None, row["id"]
    return match[1]


# The held-out file


def test_heldout_rows_are_well_formed(rows: list[dict[str, str]]) -> None:
    assert len(rows) == HELDOUT_TASKS
    assert [row["id"] for row in rows] == [f"rename-{i:03d}" for i in range(HELDOUT_TASKS)]
    assert len({row["source_file"] for row in rows}) == HELDOUT_TASKS
    for row in rows:
        assert row.keys() == {"id", "prompt", "reference", "source_file", "old", "new"}
        match = PROMPT.fullmatch(row["prompt"])
        assert match is not None, row["id"]
        assert match.groups()[1:] == (row["old"], row["new"], "")
        assert not any(token in match[1] + row["reference"] for token in SPECIAL_TOKENS)
        fewest, most = HELDOUT_LINES
        assert fewest <= match[1].count("\n") + 1 <= most, row["id"]


def test_heldout_references_are_the_sources_with_the_identifier_renamed(
    rows: list[dict[str, str]],
) -> None:
    for row in rows:
        # Words and what lies between them alternate: no word boundaries as in the dataset's code.
        pieces = re.split(r"(\W+)", source_of(row))
        assert row["old"] in pieces, row["id"]
        assert row["new"] not in pieces, row["id"]
        assert row["old"] not in NEVER_RENAMED, row["id"]
        renamed = "".join(row["new"] if piece == row["old"] else piece for piece in pieces)
        assert row["reference"] == renamed, row["id"]


def test_no_heldout_snippet_stands_in_the_training_split(rows: list[dict[str, str]]) -> None:
    trained = "\n".join("\n".join(file.lines) for file in training_files())
    assert len(trained) > 1_000_000
    # A search through all of it for each snippet would take minutes.
    lines = set(trained.split("\n"))
    suspects = [row for row in rows if lines.issuperset(source_of(row).split("\n"))]
    assert suspects, "short ones may consist of such lines, elsewhere"
    assert [row["id"] for row in suspects if source_of(row) in trained] == []


# Where tasks come from


def test_test_folders_and_foreign_files_stay_out_of_the_training_split(tmp_path: Path) -> None:
    for path in (
        "json/decoder.py",
        "test/test_json.py",
        "idlelib/idle_test/test_run.py",
        "lib2to3/tests/data/py3_test.py",
        "site-packages/torch/version.py",
        "_sysconfigdata__linux.py",
        "config-3.11/python-config.py",
        "test.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("value = 1\n")
    assert [file.path for file in training_files(tmp_path)] == ["json/decoder.py", "test.py"]
    assert [file.path for file in heldout_files(tmp_path)] == [
        "idlelib/idle_test/test_run.py",
        "lib2to3/tests/data/py3_test.py",
        "test/test_json.py",
    ]


def test_files_that_share_text_with_the_training_split_yield_no_heldout_task(
    tmp_path: Path,
) -> None:
    shared = [f"shared_{i} = compute({i})" for i in range(6)]
    own = [f"own_{i} = measure({i})" for i in range(60)]
    (tmp_path / "test").mkdir()
    (tmp_path / "module.py").write_text("\n".join(["import os", *shared, "trained = True"]))
    (tmp_path / "test/test_copied.py").write_text("\n".join([*own[:6], "", *shared, *own[6:]]))
    (tmp_path / "test/test_own.py").write_text("\n".join(own))
    splits = training_files(tmp_path), heldout_files(tmp_path)
    tasks = make_heldout(*splits, count_words, num_tasks=1, seed=3)
    assert [task.source_file for task in tasks] == ["test/test_own.py"]
    with pytest.raises(ValueError, match="only 1 of 2"):
        make_heldout(*splits, count_words, num_tasks=2, seed=3)


def test_renaming_replaces_whole_words_only() -> None:
    source = "for item in items:\n    print(f'{item} of', my_item, item.item_)  # each item"
    renamed = "for row in items:\n    print(f'{row} of', my_item, row.item_)  # each row"
    assert rename_identifier(source, "item", "row") == renamed


# Training


@pytest.mark.parametrize("answer_only", [False, True])
def test_packed_rows_hold_tasks_and_their_targets(
    few_files: list[NamedFile], tokenizer: Tokenizer, answer_only: bool
) -> None:
    sampler = RenameSampler(few_files, line_bounds=TRAINING_LINES, seed=1)
    batches = PackedBatches(sampler, tokenizer, answer_only=answer_only)
    inputs, targets = next(iter(batches))
    assert inputs.shape == targets.shape == (BATCH_ROWS, ROW_TOKENS)
    (out_id,), (end_id,) = tokenizer.encode(OUT).ids, tokenizer.encode(END).ids
    for token_ids, row_targets in zip(inputs.tolist(), targets.tolist(), strict=True):
        in_answer = False
        for token_id, next_id, target in itertools.zip_longest(
            token_ids, token_ids[1:], row_targets
        ):
            in_answer = token_id == out_id or (in_answer and token_id != end_id)
            counts = in_answer or not answer_only
            assert (target == IGNORED) != counts
            if counts and next_id is not None:
                assert target == next_id


def test_training_steps_lower_the_loss(few_files: list[NamedFile], tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = new_model()
    # One layer; processors without bfloat16 take seconds for a step of all.
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    sampler = RenameSampler(few_files, line_bounds=TRAINING_LINES, seed=1)
    inputs, targets = next(iter(PackedBatches(sampler, tokenizer, answer_only=True)))
    batch = (inputs[:2, :256], targets[:2, :256])
    phase = Phase(
        name="test",
        minutes=8 / 60,
        muon_learning_rate=0.02,
        adamw_learning_rate=3e-3,
        answer_only=True,
    )
    steps: list[Progress] = []
    seconds = itertools.count()  # one per step, so that the phase has 8
    train_phase(
        model, itertools.repeat(batch), phase, steps.append, clock=lambda: float(next(seconds))
    )
    assert [step.num_steps for step in steps] == list(range(1, 9))
    assert steps[-1].num_tokens == 8 * batch[0].numel()
    assert steps[-1].fraction == 1
    assert steps[-1].loss < steps[0].loss - 1


def test_checkpoints_load_with_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = new_model()
    save_checkpoint(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, parameter in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter.bfloat16()), name
    text = f"{CODE}a = b{RENAME}b{TO}count{OUT}"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer.encode(text).ids


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
