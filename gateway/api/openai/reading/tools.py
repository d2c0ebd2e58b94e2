"""The tools of a chat completion: which may be called, and the grammar of a call that must come.

Owns `tool_choice`. How a model writes its calls is known to `gateway/text/`.
"""

from collections.abc import Sequence
from typing import Any

from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import grammars, message_schema, schema
from gateway.text.model_text import ModelText
from gateway.text.output.tool_call_form import ToolCallForm
from tandem.values import StructuredOutput

# Of the parameters in a grammar: it is written in the event loop's thread.
_MAX_SIZE = 1 << 18
# In characters of a string: as long takes writing an element of a list or an object.
_SIZE_OF_ELEMENT = 16


def callable_tools(parsed: schema.ChatCompletionRequest) -> Sequence[message_schema.Tool]:
    """The tools that the model may call."""
    return () if parsed.tool_choice == "none" else parsed.tools or ()


def forced_call(
    parsed: schema.ChatCompletionRequest, text: ModelText | None
) -> StructuredOutput | None:
    """The grammar of an output that is one call; None: there need not be one.

    Args:
        text: of the model; None: its tokenizer is unknown.

    Raises:
        ApiError: there is no such tool, the form is unknown, or the output must follow another
            grammar.
    """
    choice = parsed.tool_choice
    if choice in (None, "none", "auto"):
        return None
    tools = list(enumerate(callable_tools(parsed)))
    if isinstance(choice, message_schema.NamedToolChoice):
        name = choice.function.name
        tools = [(index, tool) for index, tool in tools if tool.function["name"] == name]
        if not tools:
            raise _refused(f"there is no tool {name!r}")
    if not tools:
        raise _refused("there are no tools")
    if _size([tool.function.get("parameters") for _, tool in tools]) > _MAX_SIZE:
        raise _refused("the parameters are too large for a grammar", param="tools")
    form = None if text is None else text.tool_call_form
    if text is None or form is None:
        raise _refused(
            f"it is not known how {parsed.model} writes tool calls", code="unsupported_parameter"
        )
    has_format = not isinstance(parsed.response_format, schema.TextFormat | None)
    if parsed.structured_outputs is not None or has_format:
        raise _refused("a call that must come allows no other structured output")
    written = _schema_of_call(tools, form)
    if (marks := form.marks) is None:
        return grammars.of_schema(written, param="tools")
    call = grammars.written(written)
    # As the model does: by the token where there is one, if a grammar can name it.
    begin, end = (
        tag if tag[:1] == "<" and text.tokenizer.is_added_token(tag) else f'"{tag}"'
        for tag in (marks.begin, marks.end)
    )
    # JSON is read between the marks of every form.
    if marks.end:
        body = '"[" call "]"' if form is ToolCallForm.HERMES_LIST else "call"
        output = f'{begin} "\\n" {body} "\\n" {end}'
    else:
        output = f'{begin} "[" call "]"'
    lark = f"start: {output}\ncall: %json {call}\n"
    return grammars.of_lark(lark, param="tools")


def _size(value: Any) -> int:
    """How large a JSON value is; once it is over the limit, no more is counted."""
    size = 0
    waiting = [value]
    while waiting and size <= _MAX_SIZE:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict | list):
            size += _SIZE_OF_ELEMENT * len(value)
            if size <= _MAX_SIZE:
                waiting.extend(value)
                waiting.extend(value.values() if isinstance(value, dict) else ())
    return size


def _schema_of_call(
    tools: Sequence[tuple[int, message_schema.Tool]], form: ToolCallForm
) -> dict[str, Any]:
    calls = []
    # By names that errors repeat.
    definitions: dict[str, Any] = {}
    for index, tool in tools:
        parameters = dict(tool.function.get("parameters") or {"type": "object"})
        # It would become the root of the references below.
        parameters.pop("$id", None)
        place = f"tools.{index}.parameters"
        root = f"#/$defs/{place}"
        try:
            definitions[place] = _as_object(parameters, root)
        except ValueError as error:
            param = f"tools.{index}.function.parameters"
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function["name"]},
                    form.arguments_key: {"$ref": root},
                },
                "required": ["name", form.arguments_key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _as_object(parameters: dict[str, Any], root: str) -> dict[str, Any]:
    """The schema of a call's arguments, moved to below `root`: they are an object, whatever else it
    allows.

    Raises:
        ValueError: it allows no object, or cannot be moved; says why.
    """
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError("its type must be object")
    if "$ref" in parameters:
        # What stands beside a reference may not count.
        return {"allOf": [{"type": "object"}, _moved(parameters, f"{root}/allOf/1")]}
    moved: dict[str, Any] = _moved({**parameters, "type": "object"}, root)
    return moved


def _moved(given: Any, root: str) -> Any:
    """A schema below another one: its references begin at the root of the whole.

    Args:
        given: the schema, or a list of schemas.
        root: where it is now.

    Raises:
        ValueError: it cannot be moved; says why.
    """
    if isinstance(given, list):
        return [_moved(each, root) for each in given]
    if not isinstance(given, dict):
        return given
    moved: dict[str, Any] = {}
    for key, value in given.items():
        if key in grammars.MAPS_OF_SCHEMAS:
            if not isinstance(value, dict):
                raise ValueError(f"{key} must be an object")
            moved[key] = {name: _moved(each, root) for name, each in value.items()}
        elif key == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                raise ValueError("each $ref must be # or begin with #/")
            moved[key] = root + value[1:]
        elif key == "$id":
            raise ValueError("only the whole schema may have an $id")
        else:
            moved[key] = value if key in grammars.VALUES else _moved(value, root)
    return moved


def _refused(message: str, *, param: str = "tool_choice", code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code)
