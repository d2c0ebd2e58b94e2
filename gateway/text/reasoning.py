"""Tells a model's reasoning from its answer: what stands in <think> tags before it.

Owns the tags, and whether a chat template teaches them. Some templates end with the begin tag, so
that the output begins within the reasoning.
"""

import copy
import enum

BEGIN, END = "<think>", "</think>"

#: The tags, which must be shown where a tokenizer says that they are special.
TAGS = (BEGIN, END)

# So much white space is held back at most, in characters: more of it belongs to no tag.
_MAX_SPACE = 64


def is_taught(source: str) -> bool:
    """Whether a chat template knows reasoning in tags."""
    return END in source


class _Place(enum.Enum):
    START = enum.auto()
    # After the begin tag, and after the end tag: white space there belongs to the tag.
    BEGINNING = enum.auto()
    REASONING = enum.auto()
    ENDING = enum.auto()
    ANSWER = enum.auto()


class ReasoningReader:
    """Reads one output, piece by piece.

    Attributes:
        has_begun: whether there is reasoning, by what was read so far.
    """

    def __init__(self, prompt_end: str) -> None:
        """`prompt_end`: the last of the prompt's text, with its last line at least."""
        self.has_begun = prompt_end.rstrip().endswith(BEGIN)
        self._place = _Place.BEGINNING if self.has_begun else _Place.START
        # White space, and the beginning of a tag.
        self._held = ""

    def copy(self) -> "ReasoningReader":
        """An independent one in the same state."""
        return copy.copy(self)  # every attribute is immutable

    @property
    def is_over(self) -> bool:
        """Whether all further text is the answer's."""
        return self._place in (_Place.ENDING, _Place.ANSWER)

    @property
    def is_answer(self) -> bool:
        """Whether the answer has begun, and nothing is held back: there is no more to tell."""
        return self._place is _Place.ANSWER

    def feed(self, text: str) -> tuple[str, str]:
        """The next piece; returns what of the text so far is reasoning and answer by now."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._place is _Place.START:
            text = self._read_start(text)
        if self._place is _Place.BEGINNING and (text := text.lstrip()):
            self._place = _Place.REASONING
        if self._place is _Place.REASONING:
            reasoning, text = self._read_reasoning(text)
        if self._place is _Place.ENDING and (text := text.lstrip()):
            self._place = _Place.ANSWER
        return reasoning, text if self._place is _Place.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """What was held back, when the output is over."""
        held, self._held = self._held, ""
        return (held, "") if self._place is _Place.REASONING else ("", held)

    def _read_start(self, text: str) -> str:
        """Reads up to behind the begin tag; without one the text is the answer."""
        begun = text.lstrip()
        if begun.startswith(BEGIN):
            self.has_begun = True
            self._place = _Place.BEGINNING
            return begun.removeprefix(BEGIN)
        if BEGIN.startswith(begun) and len(text) - len(begun) <= _MAX_SPACE:
            self._held = text
            return ""
        self._place = _Place.ANSWER
        return text

    def _read_reasoning(self, text: str) -> tuple[str, str]:
        """The reasoning of a text, and what comes behind the end tag."""
        reasoning, tag, rest = text.partition(END)
        if tag:
            self._place = _Place.ENDING
            return reasoning.rstrip(), rest
        num_held = next(
            (n for n in range(min(len(END), len(text)), 0, -1) if END.startswith(text[-n:])), 0
        )
        whole = text[: len(text) - num_held]
        shown = whole.rstrip()
        if len(whole) - len(shown) > _MAX_SPACE:
            shown = whole
        self._held = text[len(shown) :]
        return shown, ""
