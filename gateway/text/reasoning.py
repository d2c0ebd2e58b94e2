"""The tags around a model's reasoning, and where a prompt leaves it.

Owns the tags, and which of them a chat template teaches. `output_reader.py` reads them in outputs.
"""

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around reasoning.

    Attributes:
        tokens: which must be shown where a tokenizer says that they are special.
    """

    begin: str
    end: str
    tokens: tuple[str, ...]


THINK = Tags("<think>", "</think>", ("<think>", "</think>"))
# Gemma 4's.
_THOUGHT = Tags("<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>"))


class Reasoning(enum.Enum):
    """Where a prompt leaves the reasoning that is told from the answer."""

    # None is told from it.
    NONE = enum.auto()
    MAY_BEGIN = enum.auto()
    # The prompt ends with the begin tag.
    HAS_BEGUN = enum.auto()
    # The prompt ends with the end tag: none is asked for, and models begin it again now and then.
    IS_OVER = enum.auto()


def tags_of_template(source: str) -> Tags | None:
    """The tags that a chat template knows; None: none."""
    return next((tags for tags in (THINK, _THOUGHT) if tags.end in source), None)


def reasoning_after(prompt: str, tags: Tags) -> Reasoning:
    """Where a prompt leaves it: templates may begin the reasoning, or end it at once."""
    end = prompt.rstrip()
    if end.endswith(tags.begin.rstrip()):
        return Reasoning.HAS_BEGUN
    return Reasoning.IS_OVER if end.endswith(tags.end) else Reasoning.MAY_BEGIN
