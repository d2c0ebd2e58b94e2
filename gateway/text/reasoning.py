"""The tags around a model's reasoning, and where a prompt leaves it.

Owns the tags, and whether a chat template teaches them. `output_reader.py` reads them in outputs.
"""

import enum

BEGIN, END = "<think>", "</think>"

#: The tags, which must be shown where a tokenizer says that they are special.
TAGS = (BEGIN, END)


class Reasoning(enum.Enum):
    """Where a prompt leaves the reasoning that is told from the answer."""

    # None is told from it.
    NONE = enum.auto()
    MAY_BEGIN = enum.auto()
    # The prompt ends with the begin tag.
    HAS_BEGUN = enum.auto()
    # The prompt ends with the end tag: none is asked for, and models begin it again now and then.
    IS_OVER = enum.auto()


def is_taught(source: str) -> bool:
    """Whether a chat template knows reasoning in tags."""
    return END in source


def reasoning_after(prompt: str) -> Reasoning:
    """Where a prompt leaves it: templates may begin the reasoning, or end it at once."""
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return Reasoning.HAS_BEGUN
    return Reasoning.IS_OVER if end.endswith(END) else Reasoning.MAY_BEGIN
