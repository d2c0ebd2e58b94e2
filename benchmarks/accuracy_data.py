"""Prompts and references of `benchmarks.accuracy`, from a file or from a task's rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class DataError(Exception):
    """The data is invalid; the message names the file and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One line of the data."""

    line: int
    prompt_token_ids: list[int]
    reference: str | None
    max_new_tokens: int


def read_examples(path: Path, tokenizer: Tokenizer, max_new_tokens: int | None) -> list[Example]:
    """Reads a file; see `make_examples`.

    Raises:
        DataError: it cannot be read, or not be used.
    """
    rows: list[tuple[int, Any]] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from None
    return make_examples(rows, str(path), tokenizer, max_new_tokens)


def make_examples(
    rows: Sequence[tuple[int, Any]], source: str, tokenizer: Tokenizer, max_new_tokens: int | None
) -> list[Example]:
    """Makes examples of numbered rows.

    Without `max_new_tokens`, answers may be a little longer than the reference.

    Raises:
        DataError: a row is not an object with a `prompt`, or there is none.
    """
    examples = []
    for number, row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise DataError(f"{source}:{number}: expected an object with a text `prompt`")
        reference = row.get("reference")
        if not isinstance(reference, str | None):
            raise DataError(f"{source}:{number}: `reference` is not text")
        prompt_token_ids = tokenizer.encode(row["prompt"], add_special_tokens=False).ids
        if not prompt_token_ids:
            raise DataError(f"{source}:{number}: `prompt` is empty")
        length = len(tokenizer.encode(reference).ids) + 16 if reference else 128
        examples.append(
            Example(
                line=number,
                prompt_token_ids=prompt_token_ids,
                reference=reference,
                max_new_tokens=max_new_tokens or length,
            )
        )
    if not examples:
        raise DataError(f"{source}: no line")
    return examples
