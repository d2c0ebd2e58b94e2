"""From a request for a response to the one for a chat completion that it stands for.

Owns how items become messages: a call belongs to the assistant's message before it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import message_schema, schema
from gateway.api.openai.responses.schema import (
    FunctionChoice,
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    InputText,
    NamedSchemaFormat,
    ResponsesRequest,
)

#: By the usual name of a parameter in errors of a chat completion, its name here.
RENAMED_PARAMS: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def to_chat(parsed: ResponsesRequest) -> schema.ChatCompletionRequest:
    """The request for a chat completion. Its values are checked already.

    Raises:
        ApiError: a parameter is not supported here.
    """
    if parsed.speculation is not None and parsed.speculation.report:
        raise ApiError(
            400,
            "speculation.report is not supported here",
            param="speculation.report",
            code="unsupported_parameter",
        )
    common = {name: getattr(parsed, name) for name in schema.CommonRequest.model_fields}
    tools = None if parsed.tools is None else [_tool(tool) for tool in parsed.tools]
    return schema.ChatCompletionRequest.model_construct(
        **common,
        messages=_messages(parsed),
        max_completion_tokens=parsed.max_output_tokens,
        logprobs="message.output_text.logprobs" in (parsed.include or ()),
        top_logprobs=parsed.top_logprobs,
        tools=tools,
        tool_choice=_tool_choice(parsed.tool_choice),
        response_format=_format(parsed),
        chat_template_kwargs=parsed.chat_template_kwargs,
        reasoning_effort=None if parsed.reasoning is None else parsed.reasoning.effort,
        parallel_tool_calls=parsed.parallel_tool_calls,
    )


def renamed(error: ApiError) -> ApiError:
    """The error of a chat completion, with the parameter's name here."""
    if error.param is None:
        return error
    param = re.sub(r"^messages\..*", "messages", error.param)
    param = re.sub(r"^(tools\.\d+)\.function\b", r"\1", param)
    param = RENAMED_PARAMS.get(param, param)
    message = error.message
    if message.startswith(error.param):
        message = param + message.removeprefix(error.param)
    return ApiError(
        error.status,
        message,
        kind=error.kind,
        code=error.code,
        param=param,
        headers=error.headers,
    )


def _messages(parsed: ResponsesRequest) -> list[message_schema.Message]:
    given: list[dict[str, Any]] = []
    if parsed.instructions is not None:
        given.append({"role": "system", "content": parsed.instructions})
    if isinstance(parsed.input, str):
        given.append({"role": "user", "content": parsed.input})
    else:
        # What the last message takes: a call, or all that may come of its reasoning.
        takes: Literal["nothing", "calls", "all"] = "nothing"
        for item in parsed.input:
            if isinstance(item, InputReasoning):
                thoughts = [part.text for part in item.content or () if part.text]
                if takes == "all":
                    thoughts.insert(0, given.pop()["reasoning_content"])
                takes = "all" if thoughts else "nothing"
                if thoughts:
                    given.append({"role": "assistant", "reasoning_content": "\n".join(thoughts)})
            elif isinstance(item, InputMessage):
                is_assistants = item.role == "assistant"
                message = given.pop() if takes == "all" and is_assistants else {"role": item.role}
                given.append({**message, "content": _text(item.content)})
                takes = "calls" if is_assistants else "nothing"
            elif isinstance(item, InputCallOutput):
                given.append(
                    {
                        "role": "tool",
                        "name": item.name,
                        "tool_call_id": item.call_id,
                        "content": _text(item.output),
                    }
                )
                takes = "nothing"
            else:
                if takes == "nothing":
                    given.append({"role": "assistant"})
                takes = "calls"
                given[-1].setdefault("tool_calls", []).append(_call(item))
    return [message_schema.Message.model_construct(**each) for each in given]


def _call(item: InputCall) -> message_schema.EarlierToolCall:
    return message_schema.EarlierToolCall.model_construct(
        id=item.call_id,
        type="function",
        function=message_schema.EarlierFunction.model_construct(
            name=item.name, arguments=item.arguments
        ),
    )


def _text(content: str | Sequence[InputText | message_schema.RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join([part.text for part in content])


def _tool(tool: FunctionTool) -> message_schema.Tool:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.output_schema is not None:
        function["output_schema"] = tool.output_schema
    return message_schema.Tool.model_construct(type="function", function=function)


def _tool_choice(choice: str | FunctionChoice | None) -> Any:
    if not isinstance(choice, FunctionChoice):
        return choice
    return message_schema.NamedToolChoice.model_construct(
        type="function", function=message_schema.NamedFunction.model_construct(name=choice.name)
    )


def _format(
    parsed: ResponsesRequest,
) -> schema.TextFormat | schema.JsonObjectFormat | schema.JsonSchemaFormat | None:
    given = None if parsed.text is None else parsed.text.format
    if not isinstance(given, NamedSchemaFormat):
        return given
    return schema.JsonSchemaFormat.model_construct(
        type="json_schema",
        json_schema=schema.NamedSchema.model_construct(schema_=given.schema_),
    )
