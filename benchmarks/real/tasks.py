"""Prompts of everyday work, made of texts that every Python brings.

chat      questions, with nothing to copy
edit      source code, to be given back with a change
extract   records, to be given back in another form
quote     a text, to be answered from in its words
retrieve  a long text or module, of which one part is to be found
turns     chats of six turns about what was said before
agent     a tool loop of six turns, in which one file is read and changed again and again

One more is only read: `PROMPT_TOKENS` tokens of a text.
"""

import argparse
import errno
import inspect
import itertools
import mimetypes
import pydoc_data.topics
import random
import re
import shutil
import signal
import string
import tarfile
import textwrap
import types
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.entities import name2codepoint
from http import HTTPStatus
from os import strerror
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from benchmarks.workloads import Task
from gateway.text.chat_template import ChatTemplate
from servicekit.gguf.folder import model_folder

Kind = TypeVar("Kind")

# So that a prompt of one turn and its answer fit in the place that each server has for them.
CODE_CHARACTERS = 1600
# Of a long text: for a context of 8,192 tokens, with its question and answer.
_LONG_CHARACTERS = (14_000, 14_000, 14_000, 14_000, 14_000, 14_000, 26_000)
PROMPT = "prompt"
PROMPT_TOKENS = 256

NUM_TURNS = 6
_NUM_QUESTIONS = 7
_MODULES = (argparse, inspect, random, shutil, string, tarfile, textwrap, zipfile)
_SUBJECTS = (
    "bread", "bicycles", "volcanoes", "bookshops", "honey bees", "the Moon", "chess", "windmills",
    "old maps", "coffee", "lighthouses", "wool", "railways", "mushrooms", "violins", "glaciers",
    "paper", "sailing", "markets", "owls",
)  # fmt: skip
_QUESTIONS = (
    "What should a beginner know about {}?",
    "Tell a child a short story about {}.",
    "Suggest five titles for a book about {}, each with a reason.",
    "Which mistakes do people make with {}?",
    "Write a short poem about {}.",
    "Why do some people dislike {}?",
    "Explain the history of {} in one paragraph.",
    "Write a letter to a friend who asked about {}.",
    "Compare {} of today with those of a hundred years ago.",
    "What would you ask an expert on {}?",
)
_FOLLOW_UPS = (
    "List the main points of that as bullets.",
    "Now write your first answer again, half as long.",
    "Write that for a child.",
    "Repeat the list, and add one point to it.",
    "Put all that you said into one text.",
    "Which of your points matters most? Quote it and say why.",
    "Write the last answer again, more formally.",
)
_CHANGES = (
    "Rename the variable `{name}` to `{name}_value`",
    "Write a comment above each `if`",
    "Add type hints",
    "Rename the function to `run_{name}`",
    "Add a docstring that explains `{name}`",
    "Print `{name}` in the first line",
)
_FORMS = (
    "as a JSON array of objects with the keys code, name and text",
    "as a Markdown table with the columns code, name and text",
    "as CSV with the columns code, name and text",
    "in the same form, but only those whose code is even",
    "as YAML with the keys code, name and text",
    "as SQL statements INSERT INTO codes VALUES (code, name, text)",
)
_ABOUT_A_TEXT = (
    "What is the most important rule of this text? Quote it.",
    "Repeat the first two paragraphs of this text in full.",
    "Summarise this text in three sentences, in its own words.",
    "List the rules of this text, each in its own words.",
    "Which examples does this text give? Repeat them.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a user says, turn by turn.

    Attributes:
        keeps_answers: whether a prompt holds the turns before and their answers; otherwise each is
            a prompt of its own, and they may share their beginning.
    """

    turns: Sequence[str]
    keeps_answers: bool = False


#: By kind, the most tokens of an answer.
ANSWER_TOKENS = {
    "chat": 128,
    "edit": 192,
    "extract": 192,
    "quote": 96,
    "retrieve": 96,
    "turns": 96,
    "agent": 160,
}
ONE_TURN = ("chat", "edit", "extract", "quote")


class PromptMaker:
    """From messages to the tokens of a prompt, as the gateway makes them."""

    def __init__(self, model: Path) -> None:
        """Raises SystemExit if the model has no chat template."""
        folder = model_folder(model)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = ChatTemplate.load(folder)
        if template is None:
            raise SystemExit(f"{model} has no chat template")
        self._template = template

    def prompt(self, said: Sequence[str]) -> list[int]:
        """Tokens up to where the assistant answers; user and assistant speak by turns."""
        messages = [
            {"role": role, "content": text}
            for role, text in zip(itertools.cycle(("user", "assistant")), said, strict=False)
        ]
        return self._encode(self._template.render(messages))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def real_tasks(model: Path, *, count: int, max_new_tokens: int) -> dict[str, list[Task]]:
    """Up to so many tasks of each kind of one turn, for a model with a chat template."""
    maker = PromptMaker(model)
    kinds = conversations()
    tasks = {
        kind: [
            Task(prompt_token_ids=maker.prompt([text]), max_new_tokens=max_new_tokens)
            for text in _spread([turn for each in kinds[kind] for turn in each.turns], count)
        ]
        for kind in ONE_TURN
    }
    prose = maker.tokenizer.encode(pydoc_data.topics.topics["types"], add_special_tokens=False).ids
    tasks[PROMPT] = [Task(prompt_token_ids=prose[:PROMPT_TOKENS], max_new_tokens=1)]
    return tasks


def conversations() -> dict[str, list[Conversation]]:
    """All of each kind, the same on every machine with the same Python."""
    return {
        "chat": [
            Conversation(turns=[form.format(subject)])
            for form in _QUESTIONS
            for subject in _SUBJECTS
        ],
        "edit": [
            Conversation(
                turns=[f"{_change(i, code)} in this code, and give back the whole code:\n\n{code}"]
            )
            for i, code in enumerate(_spread(_functions(), 100))
        ],
        "extract": [
            Conversation(turns=[f"Write these lines {_FORMS[i % len(_FORMS)]}:\n\n{lines}"])
            for i, lines in enumerate(_spread(_records(), 100))
        ],
        "quote": [
            Conversation(turns=[f"{text}\n\n{question}" for question in _ABOUT_A_TEXT])
            for text in _short_texts()
        ],
        "retrieve": [_about_parts(text) for text in _long_texts()],
        "turns": [_chat(number) for number in range(33)],
        "agent": [_tool_loop(code) for code in _spread(_functions(), 25)],
    }


def _spread(items: Sequence[str], count: int) -> list[str]:
    """So many of them, evenly; all if there are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _functions() -> list[str]:
    """The source of functions and methods that are short enough to be given back."""
    found = []
    for module in _MODULES:
        owners: list[types.ModuleType | type] = [module, *_own(module, type)]
        for owner in owners:
            for function in _own(owner, types.FunctionType):
                if function.__module__ == module.__name__:
                    code = textwrap.dedent(inspect.getsource(function)).strip()
                    if 300 <= len(code) <= CODE_CHARACTERS:
                        found.append(code)
    return found


def _own(owner: types.ModuleType | type, kind: type[Kind]) -> Iterator[Kind]:
    return (each for each in vars(owner).values() if isinstance(each, kind))


def _change(number: int, code: str) -> str:
    return _CHANGES[number % len(_CHANGES)].format(name=_names(code)[0])


def _names(code: str) -> list[str]:
    """Of variables, else of functions."""
    return re.findall(r"\b[a-z_]{3,}\b(?= = )", code) or re.findall(r"def (\w+)", code)


def _records() -> list[str]:
    """Ten lines each: a number, a name, a text."""
    kinds = (
        [f"{each.value} {each.phrase}: {each.description or 'no text'}" for each in HTTPStatus],
        [f"{code} {name}: {strerror(code)}" for code, name in sorted(errno.errorcode.items())],
        [f"{each.value} {each.name}: {signal.strsignal(each)}" for each in signal.Signals],
        [
            f"{code} {name}: {unicodedata.name(chr(code))}"
            for name, code in sorted(name2codepoint.items(), key=lambda item: item[1])
        ],
        [
            f"{i} {end}: {name}"
            for i, (end, name) in enumerate(sorted(mimetypes.types_map.items()), 1)
        ],
    )
    return [
        "\n".join(lines[start : start + 10])
        for lines in kinds
        for start in range(0, len(lines) - 9, 5)
    ]


def _short_texts() -> list[str]:
    topics = sorted(pydoc_data.topics.topics.items())
    return _spread([text[:CODE_CHARACTERS] for _, text in topics if len(text) > 900], 20)


def _long_texts() -> list[str]:
    topics = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    modules = [inspect.getsource(module) for module in _MODULES]
    texts = [each for pair in zip(topics, modules, strict=False) for each in pair]
    lengths = itertools.cycle(_LONG_CHARACTERS)
    return [text[2000:][:length] for text, length in zip(texts[:14], lengths, strict=False)]


def _about_parts(text: str) -> Conversation:
    """Questions whose answers lie anywhere in a text."""
    parts = [part.strip() for part in text.split("\n\n")]
    wanted = _spread([part for part in parts[1:-1] if 200 < len(part) < 500], _NUM_QUESTIONS)
    return Conversation(
        turns=[
            f"{text}\n\nFind the part that begins with these words, and repeat it in full: "
            f"{' '.join(part.split()[:6])}"
            for part in wanted
        ]
    )


def _chat(number: int) -> Conversation:
    first = _QUESTIONS[number % len(_QUESTIONS)].format(_SUBJECTS[(7 * number) % len(_SUBJECTS)])
    later = [_FOLLOW_UPS[(number + i) % len(_FOLLOW_UPS)] for i in range(NUM_TURNS - 1)]
    return Conversation(turns=[first, *later], keeps_answers=True)


def _tool_loop(code: str) -> Conversation:
    """The file shows each change that was asked for before, as a good editor would have made it."""
    names = list(dict.fromkeys(_names(code)))
    turns = []
    before = "You change files with the tools read_file and write_file. The file is main.py."
    for number in range(NUM_TURNS):
        name = names.pop(0)
        changed = f"{name.rstrip('_0123456789')}_{number}"
        turns.append(
            f"{before}\n\nread_file main.py:\n```python\n{code}\n```\n"
            f"Rename `{name}` to `{changed}`. Answer with write_file main.py and the whole file."
        )
        before = "write_file main.py: done."
        code = re.sub(rf"\b{name}\b", changed, code)
        names.append(changed)
    return Conversation(turns=turns, keeps_answers=True)
