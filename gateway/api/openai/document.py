"""`/openapi.json`: the document that describes the API (OpenAPI 3.1).

Owns which path has which request, answers and statuses. The schemas are those that requests are
checked with.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from gateway.api.openai import answer_schema, schema
from gateway.api.openai.responses.answer_schema import Response, ResponseEvent
from gateway.api.openai.responses.schema import ResponsesRequest

_REF = "#/components/schemas/{model}"

_MODELS: Sequence[type[pydantic.BaseModel]] = (
    schema.CompletionRequest,
    schema.ChatCompletionRequest,
    answer_schema.ModelList,
    answer_schema.ModelCard,
    answer_schema.Completion,
    answer_schema.ChatCompletion,
    answer_schema.ChatCompletionChunk,
    ResponsesRequest,
    Response,
    ResponseEvent,
    answer_schema.ErrorAnswer,
)

_ERRORS: Mapping[int, str] = {
    400: "A parameter is wrong, or not supported.",
    401: "Valid credentials are required.",
    403: "The client may not do this.",
    404: "The model is not served.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "There is no room now; retry-after says when to repeat the request.",
    500: "An error of the server.",
    503: "No verifier serves now, or the server is shutting down.",
    504: "A draft that the request waits for did not come.",
}


@functools.cache
def openapi_json() -> str:
    """The document."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template=_REF
    )
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": "1"},
        "paths": {
            "/v1/models": {"get": _operation("The models that are served.", "ModelList")},
            "/v1/models/{model}": {
                "get": _operation("One of them.", "ModelCard", with_model=True),
            },
            "/v1/completions": {
                "post": _operation(
                    "Continues prompts.",
                    "Completion",
                    request="CompletionRequest",
                    chunk="Completion",
                )
            },
            "/v1/chat/completions": {
                "post": _operation(
                    "Answers a conversation.",
                    "ChatCompletion",
                    request="ChatCompletionRequest",
                    chunk="ChatCompletionChunk",
                )
            },
            "/v1/responses": {
                "post": _operation(
                    "Answers a conversation with items.",
                    "Response",
                    request="ResponsesRequest",
                    chunk="ResponseEvent",
                    has_done=False,
                )
            },
            "/health": {"get": _health("Whether requests that come now would be run.")},
            "/ready": {"get": _health("The same.")},
            "/metrics": {
                "get": {
                    "summary": "Metrics, for Prometheus.",
                    "security": [],
                    "responses": {
                        "200": {"description": "The metrics.", "content": _text("plain")},
                        "401": {
                            "description": "The operator keeps them for clients.",
                            "content": _json("ErrorAnswer"),
                        },
                    },
                }
            },
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
    return json.dumps(document)


def _operation(
    summary: str,
    answer: str,
    *,
    request: str | None = None,
    chunk: str | None = None,
    has_done: bool = True,
    with_model: bool = False,
) -> dict[str, Any]:
    content = _json(answer)
    if chunk is not None:
        # Each event's `data` is one, but for the last one's, if there is such.
        events: dict[str, Any] = {"schema": {"type": "string"}, "x-event": _ref(chunk)}
        if has_done:
            events["x-last-event"] = "[DONE]"
        content |= {"text/event-stream": events}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    without_body = () if request else (408, 413, 415)
    for status, description in _ERRORS.items():
        if status not in without_body:
            operation["responses"][str(status)] = {
                "description": description,
                "content": _json("ErrorAnswer"),
            }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": _json(request)}
    if with_model:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _health(summary: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "summary": summary,
        "security": [],
        "responses": {
            "200": {"description": "They would.", "content": content},
            "503": {"description": "They would not.", "content": content},
        },
    }


def _json(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _text(kind: str) -> dict[str, Any]:
    return {f"text/{kind}": {"schema": {"type": "string"}}}


def _ref(model: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=model)}
