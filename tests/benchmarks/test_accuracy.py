"""The accuracy benchmark: divergences, data formats, exit status."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import accuracy
from benchmarks.accuracy import (
    Divergence,
    ask_transformers,
    find_divergence,
    find_failures,
    rouge,
)
from benchmarks.accuracy_data import DataError, Example, make_examples, read_examples
from benchmarks.package_summaries import summary_tasks
from benchmarks.workloads import BUNDLED_MODEL, HELD_OUT

END = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        BUNDLED_MODEL, dtype=torch.float32
    )
    model.eval()
    return model


@pytest.fixture(scope="module")
def example(tokenizer: Tokenizer) -> Example:
    [first, *_] = read_examples(HELD_OUT, tokenizer, max_new_tokens=6)
    return first


def test_equal_answers_do_not_diverge(model: PreTrainedModel, example: Example) -> None:
    assert find_divergence(model, example, [5, 6, 7], [5, 6, 7], END) is None


def test_a_divergence_has_its_position_and_distances_from_the_best(
    model: PreTrainedModel, example: Example
) -> None:
    [answer] = ask_transformers(model, [example], batch_size=1, end_ids=frozenset({END})).token_ids
    wrong = [*answer[:3], answer[3] + 1, *answer[4:]]
    divergence = find_divergence(model, example, wrong, answer, END)
    assert divergence is not None
    assert divergence.position == 3
    assert (divergence.tandem_token_id, divergence.transformers_token_id) == (wrong[3], answer[3])
    assert divergence.transformers_gap == 0
    assert divergence.tandem_gap > 1
    assert not divergence.is_near_tie


def test_an_answer_that_ends_early_diverges_at_its_end(
    model: PreTrainedModel, example: Example
) -> None:
    divergence = find_divergence(model, example, [5, 6], [5, 6, 7], END)
    assert divergence is not None
    assert (divergence.position, divergence.tandem_token_id) == (2, END)


def divergence_of(line: int, tandem_gap: float, transformers_gap: float = 0.0) -> Divergence:
    return Divergence(
        line=line,
        position=0,
        tandem_token_id=1,
        transformers_token_id=2,
        tandem_gap=tandem_gap,
        transformers_gap=transformers_gap,
    )


@pytest.mark.parametrize(("gaps", "is_near"), [((0, 9e-5), True), ((2e-4, 0), False)])
def test_both_tokens_of_a_near_tie_are_close_to_the_best(
    gaps: tuple[float, float], is_near: bool
) -> None:
    assert divergence_of(1, *gaps).is_near_tie is is_near


def test_rouge_of_equal_texts_is_1_and_of_disjoint_texts_0() -> None:
    assert set(rouge(["a b c"], ["a b c"]).values()) == {1.0}
    assert set(rouge(["a b c"], ["d e f"]).values()) == {0.0}
    assert rouge(["a b"], ["a c"])["rouge1"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line"),
        ("{", "data.jsonl:1: not JSON"),
        ('{"prompt": "a"}\n[]', "data.jsonl:2: expected an object with a text `prompt`"),
        ('{"prompt": 3}', "data.jsonl:1: expected an object"),
        ('{"prompt": ""}', "data.jsonl:1: `prompt` is empty"),
        ('{"prompt": "a", "reference": 1}', "data.jsonl:1: `reference` is not text"),
    ],
)
def test_invalid_data_is_refused_by_file_and_line(
    tmp_path: Path, tokenizer: Tokenizer, text: str, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r".*") as caught:
        read_examples(path, tokenizer, None)
    assert message in str(caught.value)


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accuracy", *flags])
    return accuracy.main()


def test_it_compares_tandem_with_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    flags = ["--limit", "3", "--batch-size", "2", "--max-new-tokens", "24", "--json", str(found)]
    assert run(monkeypatch, *flags, "--min-rouge1", "0.999") == 1
    result = json.loads(found.read_text())
    assert (result["num_prompts"], result["num_references"]) == (3, 3)
    assert (result["exact_match"], result["divergences"]) == (1, [])
    assert result["rouge"]["tandem"] == result["rouge"]["transformers"]
    captured = capsys.readouterr()
    assert captured.out.startswith("3 prompts, float32, strict: 100.0% equal, 0 diverge. On ")
    assert "failed: ROUGE-1" in captured.err  # answers cut at 24 tokens


@pytest.mark.parametrize("side", accuracy.SIDES)
def test_one_side_alone_is_compared_with_the_references(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    side: str,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("the other side was asked")

    if side == "transformers":
        monkeypatch.setattr(accuracy, "running_stack", fail)
    else:
        monkeypatch.setattr(accuracy, "AutoModelForCausalLM", fail)
    found = tmp_path / "found.json"
    flags = ["--limit", "2", "--max-new-tokens", "8", "--json", str(found), "--only", side]
    assert run(monkeypatch, *flags, "--min-rouge1", "0.999") == 1
    result = json.loads(found.read_text())
    assert list(result["rouge"]) == list(result["tokens_per_s"]) == [side]
    assert (result["exact_match"], result["divergences"]) == (None, [])
    captured = capsys.readouterr()
    assert "2 prompts, float32, strict: one side alone. On " in captured.out
    assert "failed: ROUGE-1" in captured.err


def test_summaries_have_readmes_as_prompts(tokenizer: Tokenizer) -> None:
    tasks = summary_tasks()
    assert len(tasks) > 20
    [numpy] = [task for task in tasks if task["prompt"].endswith("what is numpy?\n\n")]
    assert numpy["reference"] == "Fundamental package for array computing in Python"
    examples = make_examples(list(enumerate(tasks, start=1)), "summaries", tokenizer, None)
    longest = max(len(e.prompt_token_ids) + e.max_new_tokens for e in examples)
    assert longest <= 2048, "more than the bundled model takes"


@pytest.mark.parametrize(
    ("wants_near_ties", "min_rouge1", "failures"),
    [
        (True, 0.5, ["line 2: a divergence that is no near-tie"]),
        (False, 0.5, []),
        (False, 0.75, ["ROUGE-1 0.7000 is under 0.75"]),
        (False, None, []),
    ],
)
def test_divergences_and_low_rouge_fail_the_command(
    wants_near_ties: bool, min_rouge1: float | None, failures: list[str]
) -> None:
    divergences = [divergence_of(1, 0.0), divergence_of(2, 0.5)]
    found = find_failures(
        divergences, rouge1=0.7, wants_near_ties=wants_near_ties, min_rouge1=min_rouge1
    )
    assert found == failures


def test_without_references_one_side_cannot_require_rouge() -> None:
    found = find_failures([], rouge1=None, wants_near_ties=True, min_rouge1=0.1)
    assert found == ["there is no reference for ROUGE-1"]
    assert find_failures([], rouge1=None, wants_near_ties=True, min_rouge1=None) == []


def test_missing_data_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--data", str(tmp_path / "none.jsonl")) == 2
    assert "none.jsonl: [Errno 2]" in capsys.readouterr().err


def test_a_count_is_at_least_1() -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        accuracy._count("0")
