"""Prompts to put load on a server with.

renames   the held-out tasks that the bundled model does well; in Tandem's source tree
source    excerpts of Python's standard library: code, which drafts from its own text suit
random    random words, at temperature 1: hardly any draft is accepted
FILE      JSON lines: {"prompt": TEXT or [TOKEN IDS], "max_new_tokens": N, "temperature": T},
          of which only the prompt is required
"""

import json
import random
import string
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("renames", "source", "random")

HELD_OUT = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "heldout.jsonl"

_MAX_FILE_BYTES = 256 << 20
# Several times more than requests run at once, so that few find their prompt in a prefix cache.
_NUM_MADE = 256
_SOURCE_CHARACTERS = 1200
_RANDOM_WORDS = 60


class WorkloadError(Exception):
    """There are no such prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one request asks for."""

    prompt: str | Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0


def read_workload(name: str, *, max_new_tokens: int, seed: int = 0) -> list[Prompt]:
    """The prompts of a workload, in an order that `seed` chooses; at least one.

    Args:
        name: one of NAMES, or the path of a file of JSON lines.
        max_new_tokens: of prompts that do not say it themselves.

    Raises:
        WorkloadError: there is no such workload, or it cannot be read.
    """
    draw = random.Random(seed)
    match name:
        case "renames":
            if not HELD_OUT.is_file():
                raise WorkloadError(
                    f"renames: {HELD_OUT} is not there: it comes with Tandem's source tree"
                )
            prompts = _read_file(HELD_OUT, max_new_tokens)
        case "source":
            texts = _excerpts(draw)
            prompts = [Prompt(prompt=text, max_new_tokens=max_new_tokens) for text in texts]
        case "random":
            prompts = [
                Prompt(prompt=_words(draw), max_new_tokens=max_new_tokens, temperature=1.0)
                for _ in range(_NUM_MADE)
            ]
        case _:
            prompts = _read_file(Path(name), max_new_tokens)
    draw.shuffle(prompts)
    return prompts


def _excerpts(draw: random.Random) -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    texts = [text for text in texts if len(text) > 2 * _SOURCE_CHARACTERS]
    if not texts:
        raise WorkloadError("source: Python's standard library is not there as source text")
    excerpts = []
    for _ in range(_NUM_MADE):
        text = draw.choice(texts)
        start = draw.randrange(len(text) - _SOURCE_CHARACTERS)
        excerpts.append(text[start : start + _SOURCE_CHARACTERS])
    return excerpts


def _words(draw: random.Random) -> str:
    return " ".join(
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9)))
        for _ in range(_RANDOM_WORDS)
    )


def _read_file(path: Path, max_new_tokens: int) -> list[Prompt]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise WorkloadError(f"{path}: is larger than {_MAX_FILE_BYTES >> 20} MiB")
        # Not splitlines(): a text may hold U+2028, which ends no line of JSON.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    prompts = [
        _parse(line, max_new_tokens, where=f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise WorkloadError(f"{path}: holds no prompt")
    return prompts


def _parse(line: str, max_new_tokens: int, *, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: is no JSON: {error}") from error
    prompt: Any = entry.get("prompt") if isinstance(entry, dict) else None
    is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise WorkloadError(f'{where}: has no "prompt" that is a text or a list of token ids')
    limit = entry.get("max_new_tokens", max_new_tokens)
    temperature = entry.get("temperature", 0.0)
    if type(limit) is not int or limit < 1:
        raise WorkloadError(f"{where}: max_new_tokens: {limit!r} is no positive number")
    if type(temperature) not in (int, float) or abs(temperature) > sys.float_info.max:
        raise WorkloadError(f"{where}: temperature: {temperature!r:.40} is no number, or too large")
    return Prompt(prompt=prompt, max_new_tokens=limit, temperature=float(temperature))
