"""The chat template of the model's folder: from a conversation to a prompt's text.

Renders as transformers does (`utils/chat_template_utils.py`): the same sandbox, functions and
variables, without transformers. Owns where templates are found, how they are rendered, and how long
a rendered text may be; `message_form.py` knows which form of messages each reads. Read-only once
loaded. Templates are the operator's, and trusted as the weights are; the sandbox limits what a bad
one can do.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.text.message_form import PROBE_TOOLS, MessageForm, Messages, find_form
from servicekit.channels.limits import MAX_MESSAGE_BYTES

#: The most characters of a conversation's text. Good templates can make much more of a small
#: request: each number of nested lists becomes an indented line, or the tools are repeated.
MAX_RENDERED_CHARACTERS = 2 * MAX_MESSAGE_BYTES

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"

#: The variables that a request cannot set.
RESERVED_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))

_EFFORT = "reasoning_effort"
# Templates that know no effort read whether the model reasons.
_WHETHER = ("enable_thinking", "thinking")
_NO_EFFORT = "none"


class ChatTemplateError(Exception):
    """A template cannot be loaded, or does not accept a conversation."""


class RenderedTooLongError(ChatTemplateError):
    """A template makes more than `MAX_RENDERED_CHARACTERS` of a conversation."""


class NoReasoningEffortError(ChatTemplateError):
    """A template that reads nothing of the kind is told how much to reason."""


class ChatTemplate:
    """The template of one model; it may have another one for conversations with tools."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compiles templates, and finds the form of messages that each reads.

        Args:
            sources: by name; there is a `default`.
            special_tokens: variables, such as `bos_token`.

        Raises:
            ChatTemplateError: one is not a template.
        """
        environment = _make_environment()
        self._special_tokens = dict(special_tokens)
        #: What conversations with tools are rendered with.
        self.source_with_tools = sources.get(_WITH_TOOLS, sources[_DEFAULT])
        self._templates: dict[str, jinja2.Template] = {}
        # The variables that each reads.
        self._read: dict[str, set[str]] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._read[name] = jinja2.meta.find_undeclared_variables(environment.parse(source))
            # Python's compiler, too, refuses some: a loop control that leaves a block's scope.
            except Exception as error:
                raise ChatTemplateError(f"the chat template {name!r}: {error}") from None
        self._forms = {name: self._find_form(name) for name in self._templates}

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Loads the template of a model's folder; None if it has none.

        It is in `chat_template.jinja`, or else in `tokenizer_config.json`; further ones may be in
        `additional_chat_templates/`.

        Raises:
            ChatTemplateError: it has one that cannot be used.
        """
        try:
            config = _read_config(folder / "tokenizer_config.json")
            sources = _sources(config.get("chat_template"))
            files = {_DEFAULT: folder / "chat_template.jinja"}
            for path in folder.glob("additional_chat_templates/*.jinja"):
                files[path.stem] = path
            for name, path in files.items():
                if path.is_file():
                    sources[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ChatTemplateError(f"{folder}: {error}") from None
        if _DEFAULT not in sources:
            return None
        return cls(sources, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        reasoning_effort: str = "",
    ) -> str:
        """The text of a conversation up to where the assistant answers.

        Args:
            messages: each with `role` and `content`, in the default form of `MessageForm`.
            tools: JSON schemas of functions.
            variables: more variables of the template; none of `RESERVED_VARIABLES`.
            reasoning_effort: how much the model shall reason, "none" included; "": the template
                decides. It is told by the variables that it reads and `variables` does not set.

        Raises:
            NoReasoningEffortError: it reads none, and shall have the model reason.
            RenderedTooLongError: the text would be too long; no more of it was made.
            ChatTemplateError: the template does not accept them; its text is for the caller.
        """
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT
        variables = {**self._reasoning(name, reasoning_effort), **(variables or {})}
        return self._render(name, self._forms[name].messages(messages), tools, variables)

    def _reasoning(self, name: str, effort: str) -> Mapping[str, Any]:
        """The variables that tell a template how much to reason."""
        if not effort:
            return {}
        told = {_EFFORT: effort, **dict.fromkeys(_WHETHER, effort != _NO_EFFORT)}
        read = {variable: told[variable] for variable in told if variable in self._read[name]}
        if not read and effort != _NO_EFFORT:
            raise NoReasoningEffortError(
                "the model's chat template does not read how much to reason"
            )
        return read

    def _find_form(self, name: str) -> MessageForm:
        tools = PROBE_TOOLS if name == _WITH_TOOLS else None

        def render(messages: Messages) -> str:
            try:
                return self._render(name, messages, tools, {})
            except ChatTemplateError:
                return ""

        return find_form(render)

    def _render(
        self,
        name: str,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        try:
            return self._templates[name].render(
                {
                    **self._special_tokens,
                    # SmolLM3's name for tools.
                    "xml_tools": tools,
                    **variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        except RenderedTooLongError:
            raise
        # A template may stumble over any value: an operation of a wrong type, a missing key.
        except Exception as error:
            raise ChatTemplateError(f"the chat template does not accept this: {error}") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which training finds an assistant's words: here only a scope.

    As in transformers, the body is that of a macro, which is called on the spot: what it sets is
    gone behind it, and no loop control leaves it.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_show")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _show(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that lead to Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:
        # Without a name of its own, as `self` may be one of the values.
        namespace, *given = args
        values = dict(*given, **values)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template cannot set {name!r}")


class _MakeDict:
    """`dict`, as a function with `fromkeys` rather than as Python's class."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


def _make_environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Joins the whole text, and what each macro and block makes of it.
    environment.concat = _join  # type: ignore[method-assign]
    # jinja's own filter escapes for HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _MakeDict()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is None:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys
        )
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _join(encoder.iterencode(value))


def _join(parts: Iterable[str]) -> str:
    """The parts as one text; none is made that would be too long."""
    taken: list[str] = []
    num_characters = 0
    for part in parts:
        num_characters += len(part)
        if num_characters > MAX_RENDERED_CHARACTERS:
            raise RenderedTooLongError(
                f"with the chat template it has more than {MAX_RENDERED_CHARACTERS} characters"
            )
        taken.append(part)
    return "".join(taken)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is not an object")
    return config


def _sources(value: Any) -> dict[str, str]:
    """By name, of a configuration that holds one template or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return {str(each.get("name")): str(each.get("template")) for each in value}
    raise ValueError("chat_template is neither a template nor a list of named ones")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
