"""Texts that random weights are made to say: acceptance is a real text's, the computation a real
model's.
"""

import functools
import json
import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from benchmarks.workloads import BUNDLED_MODEL, HELD_OUT, Task

Text = tuple[Task, Sequence[int]]

# `ForcedTexts` tells sequences from each other by so many tokens.
_SHORTEST_PROMPT = 64
_RANDOM_PROMPT = 128
MOST_RANDOM_TEXTS = 256


def replays(max_new_tokens: int) -> list[Text]:
    """Recorded code edits: a prompt holds code and what to rename in it; the text is the result."""
    return [_text(prompt, result, max_new_tokens) for prompt, result in _code_edits()]


def random_texts(max_new_tokens: int) -> list[Text]:
    """Texts that repeat only by accident."""
    draw = random.Random(2026)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(8, 2048) for _ in range(count)]

    return [
        _text(tokens(_RANDOM_PROMPT), tokens(max_new_tokens), max_new_tokens)
        for _ in range(MOST_RANDOM_TEXTS)
    ]


def all_texts(max_new_tokens: int) -> list[Text]:
    """What `ForcedTexts` must know."""
    return replays(max_new_tokens) + random_texts(max_new_tokens)


@functools.cache
def _code_edits() -> list[tuple[list[int], list[int]]]:
    """Prompts and results. Every row needs them, and tokenizing takes a while."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    edits = []
    for line in HELD_OUT.read_text().splitlines():
        edit = json.loads(line)
        prompt = tokenizer.encode(edit["prompt"], add_special_tokens=False).ids
        result = tokenizer.encode(edit["reference"], add_special_tokens=False).ids
        if len(prompt) >= _SHORTEST_PROMPT:
            edits.append((prompt, result))
    return edits


def _text(prompt: Sequence[int], output: Sequence[int], max_new_tokens: int) -> Text:
    return (
        Task(prompt_token_ids=prompt, max_new_tokens=min(len(output), max_new_tokens)),
        output,
    )
