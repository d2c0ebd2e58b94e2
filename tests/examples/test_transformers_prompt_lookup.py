"""transformers' generation with a real drafter's candidates, in its own process and in this one."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from examples import transformers_prompt_lookup as example
from examples.demo_model.dataset import END, MODEL_FOLDER, read_heldout
from examples.demo_model.evaluate import load_model, load_tokenizer
from tandem.client import DrafterClient, NgramParams

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_NEW_TOKENS = 40


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with example.local_drafter() as started:
        yield started


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL_FOLDER, torch.float32)


def prompts(count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL_FOLDER)
    return [tokenizer.encode(row["prompt"]).ids for row in read_heldout(limit=count)]


def decode(model: PreTrainedModel, drafter: DrafterClient | None, **options: object) -> list[int]:
    """One output of `generate`, with a drafter's candidates or without."""
    (prompt,) = prompts(1)
    limit = len(prompt) + MAX_NEW_TOKENS
    (end_id,) = load_tokenizer(MODEL_FOLDER).encode(END).ids
    more: dict[str, object] = dict(options)
    if drafter is not None:
        lookup = example.RemotePromptLookup(drafter, params=NgramParams(), max_length=limit)
        more |= {"custom_generate": example.verify_drafts, "candidate_generator": lookup}
    output = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=end_id,
        eos_token_id=end_id,
        **more,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


def test_the_example_shows_equal_output_in_fewer_steps(address: str) -> None:
    command = [sys.executable, "examples/transformers_prompt_lookup.py", "--drafter", address]
    command += ["--prompts", "2", "--max-new-tokens", str(MAX_NEW_TOKENS)]
    ran = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = dict(re.findall(r"^(\S.*?) {2,}(\d+) +[\d.]+  the same$", ran.stdout, re.MULTILINE))
    steps = {name: int(count) for name, count in rows.items()}
    assert len(steps) == 4, ran.stdout
    assert steps["plain"] <= 2 * MAX_NEW_TOKENS
    assert steps["drafter, same options"] == steps["transformers' prompt lookup"]
    assert steps["drafter, same options"] < steps["plain"] / 2
    with DrafterClient(address) as drafter:
        assert drafter.load().num_sequences == 0, "every sequence was released"


def test_logits_processors_and_the_length_limit_hold_for_drafted_tokens_too(
    address: str, model: PreTrainedModel
) -> None:
    with DrafterClient(address) as drafter:
        for options in ({}, {"repetition_penalty": 1.3}, {"min_new_tokens": MAX_NEW_TOKENS}):
            plain = decode(model, None, **options)
            assert decode(model, drafter, **options) == plain
            assert len(plain) <= MAX_NEW_TOKENS


def test_without_a_drafter_the_output_is_the_same(
    model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with example.local_drafter() as gone:
        pass
    with DrafterClient(gone) as drafter:
        assert decode(model, drafter) == decode(model, None)
    assert "no draft" in capsys.readouterr().err
