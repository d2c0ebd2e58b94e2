"""Whatever the official client's types allow acts, asks for nothing, or is refused by name.

The values are made from the types of the installed client. What a release adds is in none of the
tables, and fails until it is decided: `IGNORED` if it asks for nothing, `REFUSED`, or code. An
entry holds for all that lies within its place too, unless it ends with `$`.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from gateway.api.openai import jobs
from gateway.api.openai.errors import ApiError
from gateway.api.openai.jobs import Job
from gateway.api.openai.reading import requests, schema
from gateway.api.openai.responses.schema import ResponsesRequest
from gateway.text.model_text import ModelText
from tests.gateway.openai.client_types import Deviation, deviations

pytestmark = pytest.mark.stand_in

_ACCOUNTS = "OpenAI's service keeps account of it"
_CACHE = "K/V stays in the prefix cache while there is room, with or without it"
_DEFAULT = "the default"
_NOTED = "a server noted it of an answer that is sent back"
_SAME_TEXT = "the text is the same as a string"
_SCHEMA = "the output follows the schema, whatever is said of it"

_COMMON_IGNORED = {
    "metadata": _ACCOUNTS,
    "safety_identifier": _ACCOUNTS,
    "prompt_cache_options$": _CACHE,
    "prompt_cache_options.mode": _CACHE,
    "prompt_cache_options.ttl": _CACHE,
    "prompt_cache_retention": _CACHE,
    "parallel_tool_calls=True": _DEFAULT,
    "service_tier='auto'": _DEFAULT,
    "service_tier='default'": _DEFAULT,
    "store=False": _DEFAULT,
    "tool_choice='auto'": _DEFAULT,
}
_STREAM_IGNORED = {
    "stream=False": _DEFAULT,
    "stream_options$": _DEFAULT,
    "stream_options.include_obfuscation=False": _DEFAULT,
}
_STREAM_REFUSED = {"stream_options.include_obfuscation=True": "nothing hides the sizes of chunks"}
_OTHER_SERVICE = "no part of what this server does"
_DEPRECATED = "functions are tools by now"
_NO_MEDIA = "text is all that the models read and write"
_NO_STORE = "nothing is stored"
_NO_SUCH_TOOLS = "functions are all that a model may call"

IGNORED: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {
        **_STREAM_IGNORED,
        "best_of=1": _DEFAULT,
        "stream_options.include_usage=False": _DEFAULT,
        "echo=False": _DEFAULT,
    },
    "/v1/chat/completions": {
        **_COMMON_IGNORED,
        **_STREAM_IGNORED,
        **{
            f"messages[]<{role}>.content[]<text>{field}": reason
            for role in ("developer", "system", "user", "assistant", "tool")
            for field, reason in (("$", _SAME_TEXT), (".prompt_cache_breakpoint", _CACHE))
        },
        "function_call='none'": _DEFAULT,
        "function_call='auto'": _DEFAULT,
        "logprobs=False": _DEFAULT,
        "modalities[]='text'": _DEFAULT,
        "response_format<text>": _DEFAULT,
        "response_format<json_schema>.json_schema.description": _SCHEMA,
        "response_format<json_schema>.json_schema.name": _SCHEMA,
        "response_format<json_schema>.json_schema.strict": _SCHEMA,
        "stream_options.include_usage=False": _DEFAULT,
        "verbosity='medium'": _DEFAULT,
    },
    "/v1/responses": {
        **_COMMON_IGNORED,
        **_STREAM_IGNORED,
        "background=False": _DEFAULT,
        "include[]='code_interpreter_call.outputs'": "no answer has such items",
        "include[]='computer_call_output.output.image_url'": "no answer has such items",
        "include[]='file_search_call.results'": "no answer has such items",
        "include[]='message.input_image.image_url'": "no answer has such items",
        "include[]='web_search_call.action.sources'": "no answer has such items",
        "include[]='web_search_call.results'": "no answer has such items",
        "include[]='reasoning.encrypted_content'": "the answer has the reasoning as text",
        "input[]<user>.content[]<input_text>$": _SAME_TEXT,
        "input[]<user>.content[]<input_text>.prompt_cache_breakpoint": _CACHE,
        "input[]<user>.phase": _NOTED,
        "input[]<user>.status": _NOTED,
        "input[]<user>.type='message'": _DEFAULT,
        "input[]<message>.content[]<refusal>$": "the text is the same as one that is no refusal",
        "input[]<message>.content[]<output_text>.annotations": _NOTED,
        "input[]<message>.content[]<output_text>.logprobs": _NOTED,
        "input[]<message>.id": _NOTED,
        "input[]<message>.phase": _NOTED,
        "input[]<message>.status": _NOTED,
        "input[]<function_call>.async=False": _DEFAULT,
        "input[]<function_call>.caller<direct>": _DEFAULT,
        "input[]<function_call>.id": _NOTED,
        "input[]<function_call>.status": _NOTED,
        "input[]<function_call_output>.caller<direct>": _DEFAULT,
        "input[]<function_call_output>.id": _NOTED,
        "input[]<function_call_output>.output[]<input_text>$": _SAME_TEXT,
        "input[]<function_call_output>.output[]<input_text>.prompt_cache_breakpoint": _CACHE,
        "input[]<function_call_output>.status": _NOTED,
        "input[]<reasoning>.encrypted_content": "it is another service's",
        "input[]<reasoning>.id": _NOTED,
        "input[]<reasoning>.status": _NOTED,
        "input[]<reasoning>.summary": "templates take the reasoning itself",
        "max_tool_calls": "it limits tools that the server runs, and there are none",
        "prompt_cache_options.prewarm=False": _DEFAULT,
        "reasoning$": _DEFAULT,
        "reasoning.context='auto'": _DEFAULT,
        "reasoning.generate_summary": "no answer has a summary",
        "reasoning.mode='standard'": _DEFAULT,
        "reasoning.summary": "no answer has a summary",
        "text$": _DEFAULT,
        "text.format<text>": _DEFAULT,
        "text.format<json_schema>.description": _SCHEMA,
        "text.format<json_schema>.name": _SCHEMA,
        "text.format<json_schema>.strict": _SCHEMA,
        "text.verbosity='medium'": _DEFAULT,
        "tools[]<function>.allowed_callers[]='direct'": _DEFAULT,
        "tools[]<function>.async=False": _DEFAULT,
        "tools[]<function>.defer_loading=False": _DEFAULT,
        "tools[]<function>.strict": "a call that must come follows its schema anyway",
        "truncation='disabled'": _DEFAULT,
    },
}

_COMMON_REFUSED = {
    "moderation": _OTHER_SERVICE,
    "service_tier='fast'": _OTHER_SERVICE,
    "service_tier='flex'": _OTHER_SERVICE,
    "service_tier='priority'": _OTHER_SERVICE,
    "service_tier='scale'": _OTHER_SERVICE,
    "store=True": _NO_STORE,
    "tool_choice<allowed_tools>": "leave out the other tools",
    "tool_choice<custom>": _NO_SUCH_TOOLS,
    "tools[]<custom>": _NO_SUCH_TOOLS,
}
_ITEMS = (
    "additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction "
    "compaction_trigger computer_call computer_call_output configuration_update custom_tool_call "
    "custom_tool_call_output file_search_call image_generation_call local_shell_call "
    "local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools "
    "program program_output shell_call shell_call_output tool_search_call tool_search_output "
    "web_search_call"
)
_TOOLS = (
    "apply_patch code_interpreter computer computer_use_preview file_search image_generation "
    "local_shell mcp namespace programmatic_tool_calling shell tool_search web_search "
    "web_search_preview"
)

REFUSED: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {
        **_STREAM_REFUSED,
        "best_of=2": "n choices are all that are made",
        "prompt=None": "there is nothing to continue",
        "suffix": "models are not asked to fill in",
    },
    "/v1/chat/completions": {
        **_COMMON_REFUSED,
        **_STREAM_REFUSED,
        "audio": _NO_MEDIA,
        "function_call": _DEPRECATED,
        "functions": _DEPRECATED,
        "messages[]<assistant>.audio": _NO_MEDIA,
        "messages[]<assistant>.function_call": _DEPRECATED,
        "messages[]<assistant>.tool_calls[]<custom>": _NO_SUCH_TOOLS,
        "messages[]<function>": _DEPRECATED,
        "messages[]<user>.content[]<file>": _NO_MEDIA,
        "messages[]<user>.content[]<image_url>": _NO_MEDIA,
        "messages[]<user>.content[]<input_audio>": _NO_MEDIA,
        "modalities[]='audio'": _NO_MEDIA,
        "prediction": "drafts come from the text itself",
        "verbosity='high'": "no model is told",
        "verbosity='low'": "no model is told",
        "web_search_options": _OTHER_SERVICE,
    },
    "/v1/responses": {
        **_COMMON_REFUSED,
        **_STREAM_REFUSED,
        **{f"input[]<{kind}>": "no answer has such items" for kind in _ITEMS.split()},
        **{f"tools[]<{kind}>": _NO_SUCH_TOOLS for kind in _TOOLS.split()},
        "access_programs": _OTHER_SERVICE,
        "background=True": _NO_STORE,
        "background_options": _NO_STORE,
        "context_management": "nothing is left out of a conversation",
        "conversation": _NO_STORE,
        "image": _NO_MEDIA,
        "input[]$": "a reference to an item: " + _NO_STORE,
        "input[].id": "a reference to an item: " + _NO_STORE,
        "input[].type": "a reference to an item: " + _NO_STORE,
        "input[]<function_call>.async=True": "no tool runs beside its model",
        "input[]<function_call>.caller<program>": _NO_SUCH_TOOLS,
        "input[]<function_call>.namespace": _NO_SUCH_TOOLS,
        "input[]<function_call_output>.call_id=None": "templates need it",
        "input[]<function_call_output>.caller<program>": _NO_SUCH_TOOLS,
        "input[]<function_call_output>.namespace": _NO_SUCH_TOOLS,
        "input[]<function_call_output>.output[]<input_file>": _NO_MEDIA,
        "input[]<function_call_output>.output[]<input_image>": _NO_MEDIA,
        "input[]<user>.content[]<input_file>": _NO_MEDIA,
        "input[]<user>.content[]<input_image>": _NO_MEDIA,
        "previous_response_id": _NO_STORE,
        "prompt": _NO_STORE,
        "prompt_cache_options.comparison_response_id": _NO_STORE,
        "prompt_cache_options.prewarm=True": "an answer is always made",
        "reasoning.context='all_turns'": "the chat template decides it",
        "reasoning.context='current_turn'": "the chat template decides it",
        "reasoning.mode='pro'": _OTHER_SERVICE,
        "reasoning.mode='x'": _OTHER_SERVICE,
        "reasoning.mode='y'": _OTHER_SERVICE,
        "service_tier='ultrafast'": _OTHER_SERVICE,
        "text.verbosity='high'": "no model is told",
        "text.verbosity='low'": "no model is told",
        "tool_choice<apply_patch>": _NO_SUCH_TOOLS,
        "tool_choice<file_search>": _NO_SUCH_TOOLS,
        "tool_choice<mcp>": _NO_SUCH_TOOLS,
        "tool_choice<programmatic_tool_calling>": _NO_SUCH_TOOLS,
        "tool_choice<shell>": _NO_SUCH_TOOLS,
        "tools[]<function>.allowed_callers[]='programmatic'": _NO_SUCH_TOOLS,
        "tools[]<function>.async=True": "no tool runs beside its model",
        "tools[]<function>.defer_loading=True": _NO_SUCH_TOOLS,
        "truncation='auto'": "nothing is left out of a conversation",
    },
}


class Endpoint(NamedTuple):
    """What is swept of an endpoint.

    Attributes:
        kind, streaming: of its requests.
        base: what each request holds.
        needs: by field, what must be there for it to count.
        job: a request's, from its body.
    """

    kind: Any
    streaming: Any
    base: Mapping[str, Any]
    needs: Mapping[str, Mapping[str, Any]]
    job: Callable[[bytes, ModelText], Job]


_FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in "xy"]
_FLAT_FUNCTIONS = [{"type": "function", "name": name} for name in "xy"]


def _completion(body: bytes, text: ModelText) -> Job:
    parsed = requests.parse(schema.CompletionRequest, body)
    return jobs.completion_job(parsed, text=text, allows_trace=False)


def _chat(body: bytes, text: ModelText) -> Job:
    parsed = requests.parse(schema.ChatCompletionRequest, body)
    return jobs.chat_job(parsed, is_served=True, text=text, num_bytes=1, allows_trace=False)


def _response(body: bytes, text: ModelText) -> Job:
    parsed = requests.parse(ResponsesRequest, body)
    return jobs.response_job(parsed, is_served=True, text=text, num_bytes=1)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/completions": Endpoint(
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
        {"model": "scripted", "prompt": "a"},
        {"stream_options": {"stream": True}},
        _completion,
    ),
    "/v1/chat/completions": Endpoint(
        chat_create_params.CompletionCreateParamsNonStreaming,
        chat_create_params.CompletionCreateParamsStreaming,
        {"model": "scripted", "messages": [{"role": "user", "content": "a"}]},
        {
            "stream_options": {"stream": True},
            "top_logprobs": {"logprobs": True},
            "tool_choice": {"tools": _FUNCTIONS},
            "parallel_tool_calls": {"tools": _FUNCTIONS},
        },
        _chat,
    ),
    "/v1/responses": Endpoint(
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
        {"model": "scripted", "input": "a"},
        {
            "stream_options": {"stream": True},
            "top_logprobs": {"include": ["message.output_text.logprobs"]},
            "tool_choice": {"tools": _FLAT_FUNCTIONS},
            "parallel_tool_calls": {"tools": _FLAT_FUNCTIONS},
        },
        _response,
    ),
}


@functools.cache
def _deviations(path: str) -> Mapping[str, Sequence[Deviation]]:
    """Those of an endpoint's requests, by the parameter in which each lies."""
    endpoint = ENDPOINTS[path]
    by_field: dict[str, list[Deviation]] = {}
    for found in deviations(endpoint.kind, endpoint.base):
        by_field.setdefault(_field(found), []).append(found)
    for found in deviations(endpoint.streaming, {**endpoint.base, "stream": False}):
        if found.path.startswith("stream="):
            by_field.setdefault(_field(found), []).append(found)
    return by_field


def _field(found: Deviation) -> str:
    """The parameter in which it lies."""
    return min((found.path.split(mark)[0] for mark in "=.[<"), key=len)


def _entries(table: Mapping[str, str], found: Deviation) -> list[str]:
    """Of a table, those that hold for a deviation: its own, or one that it lies in."""
    path = found.path
    return [
        entry
        for entry in table
        if f"{path}$" == entry
        or path == entry
        or (path.startswith(entry) and path[len(entry)] in "=.[<")
    ]


CASES = [(path, field) for path in ENDPOINTS for field in _deviations(path)]


@pytest.fixture(scope="module")
def text(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """Of a model whose prompts show all that its template is given."""
    folder = tmp_path_factory.mktemp("shows_all")
    (folder / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(
        "{{ messages | tojson }}{{ tools | tojson }}{{ reasoning_effort }}"
        '{# <tool_call>{"name": "arguments":}</tool_call> <think></think> #}'
    )
    return ModelText.load(folder)


def _state(value: Any) -> Any:
    """All that an object holds, in a form that can be compared."""
    if isinstance(value, str | bytes | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {name: _state(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_state(each) for each in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _state(getattr(value, name)) for name in names}
    return _state(vars(value)) if hasattr(value, "__dict__") else repr(value)


def _asked(endpoint: Endpoint, body: Mapping[str, Any], text: ModelText) -> Any:
    """All that a body asks for: what models are given, and what is made of their output."""
    job = endpoint.job(json.dumps(body).encode(), text)
    prompts = []
    for index, request in enumerate(job.requests):
        if (conversation := request.conversation) is not None:
            assert text.chat_template is not None
            prompts.append(
                text.chat_template.render(
                    conversation.messages,
                    tools=conversation.tools or None,
                    variables=conversation.variables,
                    reasoning_effort=conversation.reasoning_effort,
                )
            )
            job.requests[index] = dataclasses.replace(request, conversation=None)
    return _state(job), prompts


def _sent(found: Deviation, body: Mapping[str, Any], needs: Mapping[str, Any]) -> dict[str, Any]:
    sent = {**needs, **body}
    if found.path.startswith("input[]<function_call_output>") and isinstance(sent["input"], list):
        # It need not be there, says the type; templates need it.
        sent["input"] = [{"call_id": "z", **sent["input"][0]}]
    return sent


@pytest.mark.parametrize(("path", "field"), CASES)
def test_every_value_acts_or_asks_for_nothing_or_is_refused_by_name(
    path: str, field: str, text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    endpoint = ENDPOINTS[path]
    undecided = []
    for found in _deviations(path)[field]:
        needs = endpoint.needs.get(field, {})
        try:
            given = _asked(endpoint, _sent(found, found.given, needs), text)
        except ApiError as error:
            is_named = error.status == 400 and str(error.param).split(".")[0] == field
            if not is_named or not _entries(REFUSED[path], found):
                undecided.append(f"refused: {found.path}: {error.message}")
            continue
        if given != _asked(endpoint, _sent(found, found.without, needs), text):
            continue
        is_null = found.path.endswith("=None")
        if not is_null and not _entries(IGNORED[path], found):
            undecided.append(f"without effect: {found.path}")
    assert undecided == []
