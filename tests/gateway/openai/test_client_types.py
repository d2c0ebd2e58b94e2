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
from tests.gateway.openai.client_type_decisions import IGNORED, REFUSED
from tests.gateway.openai.client_types import Deviation, deviations

pytestmark = pytest.mark.stand_in


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
