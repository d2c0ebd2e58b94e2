"""The forms in which models write tool calls, and which of them a chat template teaches.

    HERMES        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>    after any text
    HERMES_LIST   <tool_call>[{"name": "f", "arguments": {"x": 1}}]</tool_call>  after any text
    LLAMA3_JSON   {"name": "f", "parameters": {"x": 1}}; {...}                   from the beginning

The first two are read alike: either may hold an object or a list. In all of them the arguments are
the first object that is called `arguments` or `parameters`.
"""

import enum
import re

from gateway.text.output.tool_call_reader import BEGIN, END

#: Of all forms. A tokenizer may say that they are special, but calls are found by their text.
TAGS = (BEGIN, END)

# Between what a template writes as one text: its own quotes, operators and statements.
_SEAM = r"""(?:\\[nt"']|['"~+\s-]|\{%[^%]*%\}|\}\}|\{\{(?=-?\s*['"]))*"""
# Behind the begin tag. A template that writes one expression between the tags writes JSON.
_BEHIND_TAG = re.compile(f"{BEGIN}{_SEAM}(?=(.{{0,256}}))", re.DOTALL)
_JSON_OBJECT = re.compile(
    rf"""\{{{_SEAM}(?:name|arguments|parameters)\\?['"]|\{{\{{[^}}]*\}}\}}{_SEAM}{END}"""
)
_JSON_LIST = re.compile(rf"\[{_SEAM}\{{")
# Between the same tags: of forms that are no JSON.
_OTHER_FORMS = ("<arg_key>", "<function=", "<parameter=", "<invoke ")


class ToolCallForm(enum.Enum):
    """How a model writes its calls."""

    HERMES = "hermes"
    HERMES_LIST = "hermes_list"
    LLAMA3_JSON = "llama3_json"

    @property
    def arguments_key(self) -> str:
        """The key of a call's arguments, as templates teach it; the other one is read, too."""
        return "parameters" if self is ToolCallForm.LLAMA3_JSON else "arguments"

    @property
    def has_tags(self) -> bool:
        """Whether tags stand around a call; else calls come before any text."""
        return self is not ToolCallForm.LLAMA3_JSON


def form_of_template(source: str) -> ToolCallForm | None:
    """The form that a chat template teaches its model; None: none that is known."""
    if BEGIN in source:
        if any(mark in source for mark in _OTHER_FORMS):
            return None
        begins = [found[1] for found in _BEHIND_TAG.finditer(source)]
        if any(_JSON_LIST.match(each) for each in begins):
            return ToolCallForm.HERMES_LIST
        return ToolCallForm.HERMES if any(_JSON_OBJECT.match(each) for each in begins) else None
    if '"parameters"' in source and ("ipython" in source or "python_tag" in source):
        return ToolCallForm.LLAMA3_JSON
    return None
