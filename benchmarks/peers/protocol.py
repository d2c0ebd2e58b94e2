"""What the benchmark and the process of a peer say to each other: one JSON object a line.

A worker is started with its options as one JSON argument, and answers each line of its standard
input with one line on its standard output:

    {"mode": "plain", "streams": 2, "tasks": [{"prompt": [5, 6], "max_new_tokens": 3}, ...]}
    {"duration_s": 0.01, "answers": [[7, 8, 9], ...]}
    {"error": "..."}

A worker loads a model at its first line, ends when its input ends, and finds its own best way to
run `streams` tasks at a time. Standard library only: peers run it in environments of their own.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAIN = "plain"
# Prompt lookup with up to so many tokens: "lookup 10".
LOOKUP = "lookup "
# Tandem's own drafting.
SPECULATION = "speculation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a worker; constant over its life."""

    # A Hugging Face checkpoint, and where a worker keeps what it converts of it.
    model: Path
    converted: Path
    # "float32" or "bfloat16": of weights, K/V, and arithmetic where the peer has such.
    dtype: str
    threads: int

    def to_json(self) -> str:
        values = asdict(self)
        return json.dumps({**values, "model": str(self.model), "converted": str(self.converted)})

    @classmethod
    def from_json(cls, text: str) -> "Options":
        values = json.loads(text)
        values |= {"model": Path(values["model"]), "converted": Path(values["converted"])}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and the maximum number of output tokens. Generation ends after `eos_token_id`."""

    prompt: list[int]
    max_new_tokens: int


# Mode, requests, number of streams; returns the output tokens of each, the end token included.
Generate = Callable[[str, Sequence[Request], int], list[list[int]]]


def converted_folder(cache: Path, model: Path, dtype: str) -> Path:
    """Where workers keep what they convert of a model; of a changed one, elsewhere."""
    # The path tells models apart, and their versions the time of their last change.
    path = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:12]
    changed = int((model / "config.json").stat().st_mtime)
    return cache / "models" / f"{model.name}-{path}-{changed}" / dtype


def lookup_tokens(mode: str) -> int:
    """Returns how many tokens prompt lookup drafts in this mode; 0: none."""
    return int(mode.removeprefix(LOOKUP)) if mode.startswith(LOOKUP) else 0


def eos_token_id(model: Path) -> int:
    value: Any = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    return int(value[0] if isinstance(value, list) else value)


def serve(start: Callable[[Options], Generate]) -> None:
    """Answers lines until the input ends; `start` is called at the first."""
    # Libraries print to descriptor 1: they get standard error instead.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate: Generate | None = None
    for line in sys.stdin:
        try:
            generate = generate or start(Options.from_json(sys.argv[1]))
            message = json.loads(line)
            requests = [Request(**task) for task in message["tasks"]]
            started_at_s = time.perf_counter()
            outputs = generate(message["mode"], requests, message["streams"])
            duration_s = time.perf_counter() - started_at_s
            answer: dict[str, object] = {"duration_s": duration_s, "answers": outputs}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
