"""Prompts of everyday work, made of texts that every Python brings.

chat     questions, with nothing to copy
edit     source code, to be given back with a change
extract  records, to be given back in another form
quote    a text, to be answered from in its words
prompt   a text of `PROMPT_TOKENS` tokens, to be read only
"""

import inspect
import pydoc_data.topics
import random
import shutil
import string
import textwrap
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.workloads import Task
from gateway.text.chat_template import ChatTemplate
from servicekit.gguf.folder import model_folder

# So that a prompt and its answer fit in the place that each server has for them.
CODE_CHARACTERS = 1600
PROMPT = "prompt"
PROMPT_TOKENS = 256

_CHAT = (
    "How do I keep bread fresh for longer?",
    "Tell a child what a volcano is.",
    "Suggest five names for a small bookshop, each with a reason.",
    "What should I look at when I buy a used bicycle?",
)
_CHANGES: tuple[tuple[str, Callable[..., object]], ...] = (
    ("Rename the variable `fsrc` to `source`", shutil.copyfileobj),
    ("Write a comment above each `if`", textwrap.indent),
    ("Rename the parameter `x` to `items`", random.Random.shuffle),
    ("Add type hints", string.capwords),
)
_FORMS = (
    "as a JSON array of objects with the keys code, name and text",
    "as a Markdown table with the columns code, name and text",
    "as CSV with the columns code, name and text",
    "in the same form, but only those whose code is even",
)
_QUESTIONS = (
    ("What does this text say about exceptions? Quote it.", "with"),
    ("Repeat the first two paragraphs of this text in full.", "booleans"),
    ("Summarise this text in three sentences, in its own words.", "integers"),
    ("List the rules of this text, each in its own words.", "naming"),
)


def real_tasks(model: Path, *, count: int, max_new_tokens: int) -> dict[str, list[Task]]:
    """Up to four tasks of each kind, for a model with a tokenizer and a chat template."""
    folder = model_folder(model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = ChatTemplate.load(folder)
    if template is None:
        raise SystemExit(f"{model} has no chat template")
    tasks: dict[str, list[Task]] = {}
    for kind, questions in _questions().items():
        texts = [template.render([{"role": "user", "content": each}]) for each in questions]
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts[:count]]
        tasks[kind] = [
            Task(prompt_token_ids=prompt, max_new_tokens=max_new_tokens) for prompt in prompts
        ]
    prose = tokenizer.encode(pydoc_data.topics.topics["types"], add_special_tokens=False).ids
    tasks[PROMPT] = [Task(prompt_token_ids=prose[:PROMPT_TOKENS], max_new_tokens=1)]
    return tasks


def _questions() -> dict[str, Sequence[str]]:
    statuses = "\n".join(
        f"{status.value} {status.phrase}: {status.description}"
        for status in list(HTTPStatus)[-16:]
        if status.description
    )
    return {
        "chat": _CHAT,
        "edit": [
            f"{change} in this code, and give back the whole code:\n\n"
            + textwrap.dedent(inspect.getsource(function))[:CODE_CHARACTERS]
            for change, function in _CHANGES
        ],
        "extract": [f"Write these lines {form}:\n\n{statuses}" for form in _FORMS],
        "quote": [
            f"{question}\n\n{pydoc_data.topics.topics[topic][:CODE_CHARACTERS]}"
            for question, topic in _QUESTIONS
        ],
    }
