"""The rename task: its source text, and how tasks are drawn from it.

Owns the two splits of the running Python's standard library (training: everything outside the
test folders; held-out: the test folders), the drawing of rename tasks, and the committed file
`heldout.jsonl`. Knows nothing of models; the tokenizer only limits lengths.

Identifiers are found in two ways, on purpose:

* which names may be renamed comes from `tokenize` over the *whole file*, so that prose in comments
  and strings is never taken for an identifier;
* the renaming itself is a word-boundary regular expression over the *window*. A window of a file is
  usually not valid Python (open brackets, half a string, a dedent to nowhere), which `tokenize`
  refuses, and whole-word replacement also reaches the names inside f-strings, docstrings and
  comments, so the answer follows from the prompt's text alone.

    python examples/demo_model/dataset.py --write-heldout
"""

from __future__ import annotations

import argparse
import bisect
import builtins
import io
import itertools
import json
import keyword
import random
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODEL_FOLDER = FOLDER / "model"
HELDOUT_FILE = FOLDER / "heldout.jsonl"

CODE, RENAME, TO, OUT, END = "<|code|>", "<|rename|>", "<|to|>", "<|out|>", "<|end|>"
SPECIAL_TOKENS = (END, CODE, RENAME, TO, OUT)  # in the order of their ids, from 0

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Written by each Python build and full of that machine's paths; not source text.
BUILD_FILE_PREFIXES = ("_sysconfigdata", "config-")
NEVER_RENAMED = frozenset({*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls"})
JOINED_NAME_SHARE = 0.15

TRAINING_LINES = (3, 30)  # fewest and most lines of a window, both included
HELDOUT_LINES = (6, 24)
HELDOUT_SEED = 20_311
HELDOUT_TASKS = 400
# Prompt, answer and end token. Training rows have 512 tokens, and the model is unreliable at
# positions that it never saw, although it accepts 2,048.
HELDOUT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file: its path relative to the standard library, and its lines without line ends."""

    path: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A source file with, for each line, the identifiers on it that may be renamed."""

    file: SourceFile
    names: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameTask:
    """Rename `old` to `new` wherever it stands as a whole word in `source`.

    Example: source `a = b`, old `b`, new `count` has the prompt
    `<|code|>a = b<|rename|>b<|to|>count<|out|>` and the reference `a = count`.
    """

    source: str
    old: str
    new: str
    source_file: str

    @property
    def prompt(self) -> str:
        return f"{CODE}{self.source}{RENAME}{self.old}{TO}{self.new}{OUT}"

    @property
    def reference(self) -> str:
        return rename_identifier(self.source, self.old, self.new)


def rename_identifier(source: str, old: str, new: str) -> str:
    """`source` with every whole word `old` replaced by `new`."""
    return re.sub(rf"\b{re.escape(old)}\b", new, source)


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_files(root: Path | None = None) -> list[SourceFile]:
    """The standard library without its test folders, sorted by path."""
    return list(_read_files(root or standard_library(), in_tests=False))


def heldout_files(root: Path | None = None) -> list[SourceFile]:
    """The standard library's test folders, sorted by path; some Pythons come without them."""
    return list(_read_files(root or standard_library(), in_tests=True))


def name_files(files: Iterable[SourceFile]) -> list[NamedFile]:
    """The files that `tokenize` accepts, with their identifiers (about 5 MB/s)."""
    named = []
    for file in files:
        names = _names_by_line(file.lines)
        if names is not None and any(names):
            named.append(NamedFile(file=file, names=names))
    return named


def text_blocks(lines: Sequence[str]) -> set[tuple[str, ...]]:
    """All runs of as many non-blank lines as the shortest held-out snippet has, stripped: what two
    files may share by copying.
    """
    size = HELDOUT_LINES[0]
    kept = [stripped for line in lines if (stripped := line.strip())]
    return {tuple(kept[i : i + size]) for i in range(len(kept) - size + 1)}


class RenameSampler:
    """Draws rename tasks without end; equal files, bounds and seed give equal tasks.

    Windows start at any line of any file with equal chance; the name to be replaced is drawn from
    the window's distinct identifiers, the new name from all distinct identifiers of the files.
    """

    def __init__(
        self, files: Sequence[NamedFile], *, line_bounds: tuple[int, int], seed: int
    ) -> None:
        usable = [file for file in files if len(file.names) >= line_bounds[0]]
        if not usable:
            raise ValueError(f"no file has {line_bounds[0]} lines or more")
        self._files = usable
        self._line_ends = list(itertools.accumulate(len(file.names) for file in usable))
        self._line_bounds = line_bounds
        self._names = sorted({n for file in usable for names in file.names for n in names})
        self._rng = random.Random(seed)

    def draw(self) -> RenameTask:
        """The next task, from any file."""
        while True:
            line = self._rng.randrange(self._line_ends[-1])
            task = self._draw_window(self._files[bisect.bisect_right(self._line_ends, line)])
            if task is not None:
                return task

    def draw_from(self, file: NamedFile, attempts: int) -> Iterator[RenameTask]:
        """Tasks from one file: those that `attempts` random windows yield."""
        for _ in range(attempts):
            task = self._draw_window(file)
            if task is not None:
                yield task

    def _draw_window(self, named: NamedFile) -> RenameTask | None:
        fewest, most = self._line_bounds
        num_lines = self._rng.randint(fewest, most)
        start = self._rng.randrange(max(1, len(named.names) - num_lines + 1))
        window = slice(start, start + num_lines)
        # A list without repeats in order of appearance: a set's order changes between processes.
        names = list(dict.fromkeys(n for line in named.names[window] for n in line))
        if not names:
            return None
        source = "\n".join(named.file.lines[window])
        old = self._rng.choice(names)
        new = self._new_name()
        # A name that stands in the window already would make the edit merge two identifiers.
        if re.search(rf"\b{re.escape(new)}\b", source):
            return None
        return RenameTask(source=source, old=old, new=new, source_file=named.file.path)

    def _new_name(self) -> str:
        if self._rng.random() < JOINED_NAME_SHARE:
            return "_".join(self._rng.choices(self._names, k=2))
        return self._rng.choice(self._names)


def make_heldout(
    training: Iterable[SourceFile],
    candidates: Iterable[SourceFile],
    count_tokens: Callable[[str], int],
    *,
    num_tasks: int = HELDOUT_TASKS,
    max_tokens: int = HELDOUT_MAX_TOKENS,
    seed: int = HELDOUT_SEED,
) -> list[RenameTask]:
    """At most one task per file, from files that share no block of text with the training files.

    A snippet has six non-blank lines or more, so a file without a shared block of six cannot yield
    one that stands in the training text. Sorted by path.

    Raises:
        ValueError: the candidates yield fewer than `num_tasks` tasks.
    """
    trained = set().union(*(text_blocks(file.lines) for file in training))
    unseen = [file for file in candidates if trained.isdisjoint(text_blocks(file.lines))]
    named = name_files(unseen)
    sampler = RenameSampler(named, line_bounds=HELDOUT_LINES, seed=seed)
    random.Random(seed).shuffle(named)
    tasks: list[RenameTask] = []
    taken: set[tuple[str, ...]] = set()
    for file in named:
        for task in sampler.draw_from(file, attempts=8):
            blocks = text_blocks(task.source.split("\n"))
            num_tokens = count_tokens(task.prompt + task.reference + END)
            if blocks and taken.isdisjoint(blocks) and num_tokens <= max_tokens:
                tasks.append(task)
                taken |= blocks
                break
        if len(tasks) == num_tasks:
            return sorted(tasks, key=lambda task: task.source_file)
    raise ValueError(f"only {len(tasks)} of {num_tasks} held-out tasks could be drawn")


def heldout_json(tasks: Sequence[RenameTask]) -> str:
    """The tasks as JSON lines with the keys id, prompt, reference, source_file, old, new."""
    return "".join(
        json.dumps(
            {
                "id": f"rename-{index:03d}",
                "prompt": task.prompt,
                "reference": task.reference,
                "source_file": task.source_file,
                "old": task.old,
                "new": task.new,
            },
            ensure_ascii=False,
        )
        + "\n"
        for index, task in enumerate(tasks)
    )


def read_heldout(path: Path = HELDOUT_FILE, limit: int | None = None) -> list[dict[str, str]]:
    """The rows of a held-out file; with `limit`, that many spread evenly over it."""
    # Split at "\n" only: splitlines() would also cut at a form feed inside a snippet.
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def _read_files(root: Path, *, in_tests: bool) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts:
            continue
        if relative.parts[0].startswith(BUILD_FILE_PREFIXES):
            continue
        if TEST_FOLDERS.isdisjoint(relative.parts[:-1]) == in_tests:
            continue
        try:
            with tokenize.open(path) as stream:
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # the tests keep files of broken encoding on purpose
        # Special tokens inside a source would end the prompt early; the library has none today.
        if text and not any(token in text for token in SPECIAL_TOKENS):
            yield SourceFile(path=relative.as_posix(), lines=tuple(text.rstrip("\n").split("\n")))


def _names_by_line(lines: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
    """The identifiers that may be renamed on each line; None where `tokenize` gives up."""
    names: list[list[str]] = [[] for _ in lines]
    readline = io.StringIO("\n".join(lines) + "\n").readline
    try:
        for token in tokenize.generate_tokens(readline):
            if token.type == tokenize.NAME and token.string not in NEVER_RENAMED:
                names[token.start[0] - 1].append(token.string)
    except (tokenize.TokenError, SyntaxError):
        return None
    return tuple(tuple(line) for line in names)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the held-out rename tasks.")
    parser.add_argument("--write-heldout", action="store_true", help="write the held-out file")
    parser.add_argument("--file", type=Path, default=HELDOUT_FILE, help="where it is written")
    parser.add_argument(
        "--max-tokens", type=int, default=HELDOUT_MAX_TOKENS, help="of prompt, answer and end"
    )
    arguments = parser.parse_args()

    training, candidates = training_files(), heldout_files()
    report: dict[str, object] = {
        "training_files": len(training),
        "training_characters": sum(len(line) + 1 for file in training for line in file.lines),
        "test_files": len(candidates),
    }
    if arguments.write_heldout:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
        tasks = make_heldout(
            training,
            candidates,
            lambda text: len(tokenizer.encode(text).ids),
            max_tokens=arguments.max_tokens,
        )
        arguments.file.write_text(heldout_json(tasks), "utf-8")
        report["heldout_tasks"] = len(tasks)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
