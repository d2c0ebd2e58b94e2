"""The forms in which models write tool calls, and which of them a chat template teaches.

    HERMES       <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    HERMES_LIST  <tool_call>[{"name": "f", "arguments": {"x": 1}}]</tool_call>
    LLAMA3_JSON  {"name": "f", "parameters": {"x": 1}}; {...}
    PYTHONIC     [f(x=1), g()]
    OLMO3        <function_calls>, such calls line by line, </function_calls>
    GRANITE      <|tool_call|> or <tool_call> before a list of HERMES_LIST
    QWEN3_XML    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    GLM45        <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>
    MISTRAL      [TOOL_CALLS]f[ARGS]{"x": 1}, or [TOOL_CALLS] before a list of HERMES_LIST
    DEEPSEEK_V3  <｜tool▁calls▁begin｜>, and of each call
                 <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
    GEMMA4       <|tool_call>call:f{x:1,y:<|"|>a<|"|>}<tool_call|>
    KIMI_K2      <|tool_calls_section_begin|>, and of each call <|tool_call_begin|>functions.f:0
                 <|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>

Calls of LLAMA3_JSON and PYTHONIC come before any text, others after any. Between the tags of every
form, JSON as in HERMES is read, too; there, the arguments are the first object that is called
`arguments` or `parameters`. The values are the names that vLLM has for them.
"""

# ruff: noqa: RUF001, RUF002 - DeepSeek's marks have bars of full width.

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from re import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What stands around calls and their parts. Patterns match bounded texts, from their beginning.

    Attributes:
        begin, end: around all calls; no end: a call ends by itself.
        other_begin: what models write in place of `begin`, too, if anything.
        is_python: whether calls are lines of Python, which no other mark concerns.
        name: what comes before a call's arguments; its group that matches is the tool's name. None:
            calls are JSON alone.
        key: what comes before an argument, whose name is its group; None: the arguments are JSON.
        openings: with what all begins that may come between arguments.
        value_ends: what ends an argument, if one of these follows; its own end is the first one.
        has_lines: whether an argument stands on lines of its own.
        call_end: behind a call that has arguments, if anything does.
        quote: of arguments in JSON, where strings have it in place of their quotes.
    """

    begin: str
    end: str
    other_begin: str = ""
    is_python: bool = False
    name: Pattern[str] | None = None
    key: Pattern[str] | None = None
    openings: tuple[str, ...] = ()
    value_ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_lines: bool = False
    call_end: Pattern[str] | None = None
    quote: str = ""


_HERMES = Marks(begin="<tool_call>", end="</tool_call>")
_S = r"\s{0,64}"
_NAME = r"([\w.-]{1,256})"


class ToolCallForm(enum.Enum):
    """How a model writes its calls."""

    HERMES = "hermes"
    HERMES_LIST = "hermes_list"
    LLAMA3_JSON = "llama3_json"
    PYTHONIC = "pythonic"
    QWEN3_XML = "qwen3_xml"
    GLM45 = "glm45"
    MISTRAL = "mistral"
    DEEPSEEK_V3 = "deepseek_v3"
    GEMMA4 = "gemma4"
    KIMI_K2 = "kimi_k2"
    GRANITE = "granite"
    OLMO3 = "olmo3"

    @property
    def arguments_key(self) -> str:
        """The key of a call's arguments, as templates teach it; the other one is read, too."""
        return "parameters" if self is ToolCallForm.LLAMA3_JSON else "arguments"

    @property
    def marks(self) -> Marks | None:
        """None: calls come before any text, without a mark."""
        return _MARKS.get(self)

    @property
    def tags(self) -> tuple[str, ...]:
        """Which must be shown where a tokenizer says that they are special, to be found."""
        return _TAGS.get(self, ())


_MARKS: Mapping[ToolCallForm, Marks] = {
    ToolCallForm.HERMES: _HERMES,
    ToolCallForm.HERMES_LIST: _HERMES,
    ToolCallForm.QWEN3_XML: Marks(
        begin=_HERMES.begin,
        end=_HERMES.end,
        name=re.compile(rf"{_S}<function=([^>\s]{{1,256}})>"),
        key=re.compile(rf"{_S}<parameter=([^>\n]{{1,256}})>"),
        openings=("<parameter=", "</function>", _HERMES.end),
        value_ends={
            "</parameter>": ("<parameter=", "</function>", _HERMES.end),
            "</function>": (_HERMES.end,),
        },
        has_lines=True,
        call_end=re.compile(rf"{_S}</function>"),
    ),
    ToolCallForm.GLM45: Marks(
        begin=_HERMES.begin,
        end=_HERMES.end,
        name=re.compile(rf"{_S}{_NAME}{_S}(?=<arg_key>|{_HERMES.end})"),
        key=re.compile(rf"{_S}<arg_key>([^<]{{1,256}})</arg_key>{_S}<arg_value>"),
        openings=("<arg_key>", _HERMES.end),
        value_ends={"</arg_value>": ("<arg_key>", _HERMES.end)},
    ),
    ToolCallForm.MISTRAL: Marks(
        begin="[TOOL_CALLS]",
        end="",
        name=re.compile(rf"{_S}{_NAME}(?:\[CALL_ID\]\w{{1,64}})?\[ARGS\]"),
    ),
    ToolCallForm.DEEPSEEK_V3: Marks(
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        name=re.compile(
            rf"{_S}<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>{_S}{_NAME}{_S}```json"
            rf"|{_NAME}<｜tool▁sep｜>(?={_S}\{{))"
        ),
        call_end=re.compile(rf"{_S}(?:```)?{_S}<｜tool▁call▁end｜>"),
    ),
    ToolCallForm.GEMMA4: Marks(
        begin="<|tool_call>",
        end="<tool_call|>",
        name=re.compile(rf"{_S}call:{_S}{_NAME}{_S}(?=\{{)"),
        quote='<|"|>',
    ),
    ToolCallForm.KIMI_K2: Marks(
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        name=re.compile(
            rf"{_S}<\|tool_call_begin\|>{_S}(?:functions\.)?([\w.-]{{1,256}}?)(?::\d{{1,9}})?{_S}"
            r"<\|tool_call_argument_begin\|>"
        ),
        call_end=re.compile(rf"{_S}<\|tool_call_end\|>"),
    ),
    ToolCallForm.GRANITE: Marks(begin="<|tool_call|>", end="", other_begin=_HERMES.begin),
    ToolCallForm.OLMO3: Marks(begin="<function_calls>", end="</function_calls>", is_python=True),
}
_TAGS: Mapping[ToolCallForm, tuple[str, ...]] = {
    **{form: (marks.begin, marks.end) for form, marks in _MARKS.items()},
    ToolCallForm.GEMMA4: ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ToolCallForm.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ToolCallForm.GRANITE: ("<|tool_call|>",),
    ToolCallForm.DEEPSEEK_V3: tuple(
        f"<｜tool▁{each}｜>"
        for each in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    ),
    ToolCallForm.KIMI_K2: tuple(
        f"<|tool_{each}|>"
        for each in (
            "calls_section_begin",
            "calls_section_end",
            "call_begin",
            "call_argument_begin",
            "call_end",
        )
    ),
}

# Between what a template writes as one text: its own quotes, operators and statements.
_SEAM = r"""(?:\\[nt"']|['"~+\s-]|\{%[^%]*%\}|\}\}|\{\{(?=-?\s*['"]))*"""
# Behind the begin tag. A template that writes one expression between the tags writes JSON.
_BEHIND_TAG = re.compile(f"{_HERMES.begin}{_SEAM}(?=(.{{0,256}}))", re.DOTALL)
_JSON_OBJECT = re.compile(
    rf"""\{{{_SEAM}(?:name|arguments|parameters)\\?['"]|\{{\{{[^}}]*\}}\}}{_SEAM}{_HERMES.end}"""
)
_JSON_LIST = re.compile(rf"\[{_SEAM}\{{")
_CALLS_OF_PYTHON = re.compile(r"\[\w+\(\w+=\w+")
# By what stands in the templates that teach them, where that is not the begin tag alone.
_TAUGHT_BY = {
    "<function=": ToolCallForm.QWEN3_XML,
    "<arg_key>": ToolCallForm.GLM45,
}
# Between tags: of forms that are not known.
_OTHER_FORMS = ("<parameter=", "<invoke ")
_TAUGHT_BY_BEGIN = (
    ToolCallForm.MISTRAL,
    ToolCallForm.DEEPSEEK_V3,
    ToolCallForm.GEMMA4,
    ToolCallForm.KIMI_K2,
    ToolCallForm.GRANITE,
    ToolCallForm.OLMO3,
)


def form_of_template(source: str) -> ToolCallForm | None:
    """The form that a chat template teaches its model; None: none that is known."""
    if _HERMES.begin in source:
        for mark, form in _TAUGHT_BY.items():
            if mark in source:
                return form
        if any(mark in source for mark in _OTHER_FORMS):
            return None
        begins = [found[1] for found in _BEHIND_TAG.finditer(source)]
        if any(_JSON_LIST.match(each) for each in begins):
            return ToolCallForm.HERMES_LIST
        return ToolCallForm.HERMES if any(_JSON_OBJECT.match(each) for each in begins) else None
    for form in _TAUGHT_BY_BEGIN:
        if _MARKS[form].begin in source:
            return None if any(mark in source for mark in _OTHER_FORMS) else form
    if '"parameters"' in source and ("ipython" in source or "python_tag" in source):
        return ToolCallForm.LLAMA3_JSON
    return ToolCallForm.PYTHONIC if _CALLS_OF_PYTHON.search(source) else None
