"""`/openapi.json`: the document that describes the API (OpenAPI 3.1).

Owns which path has which request and statuses. The schemas are those that requests are checked
with; answers are OpenAI's objects, with the extensions that docs/openai.md lists.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from gateway.api.openai.reading import schema
from gateway.api.openai.responses.schema import ResponsesRequest

_REF = "#/components/schemas/{model}"

_MODELS: Sequence[type[pydantic.BaseModel]] = (
    schema.CompletionRequest,
    schema.ChatCompletionRequest,
    ResponsesRequest,
)

_ANY_OBJECT: Mapping[str, Any] = {"application/json": {"schema": {"type": "object"}}}

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
            "/v1/models": {"get": _operation("The models that are served.", "list")},
            "/v1/models/{model}": {"get": _operation("One of them.", "model", with_model=True)},
            "/v1/completions": {
                "post": _operation("Continues prompts.", "text_completion", "CompletionRequest")
            },
            "/v1/chat/completions": {
                "post": _operation(
                    "Answers a conversation.", "chat.completion", "ChatCompletionRequest"
                )
            },
            "/v1/responses": {
                "post": _operation(
                    "Answers a conversation with items.", "response", "ResponsesRequest"
                )
            },
            "/health": {"get": _health("Whether requests that come now would be run.")},
            "/ready": {"get": _health("The same.")},
            "/metrics": {
                "get": {
                    "summary": "Metrics, for Prometheus.",
                    "security": [],
                    "responses": {
                        "200": {"description": "The metrics.", "content": {"text/plain": {}}},
                        "401": {
                            "description": "The operator keeps them for clients.",
                            "content": _ANY_OBJECT,
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
    summary: str, answer: str, request: str | None = None, *, with_model: bool = False
) -> dict[str, Any]:
    """An operation.

    Args:
        answer: the kind of OpenAI's object that it is answered with.
        request: the name of its body's schema. Its answer may be a stream.
        with_model: whether its path names a model.
    """
    content: dict[str, Any] = dict(_ANY_OBJECT)
    if request is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    without_body = () if request else (408, 413, 415)
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": f"OpenAI's object `{answer}`.", "content": content},
            **{
                str(status): {"description": description, "content": _ANY_OBJECT}
                for status, description in _ERRORS.items()
                if status not in without_body
            },
        },
    }
    if request is not None:
        body = {"schema": {"$ref": _REF.format(model=request)}}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if with_model:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _health(summary: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "security": [],
        "responses": {
            "200": {"description": "They would.", "content": _ANY_OBJECT},
            "503": {"description": "They would not.", "content": _ANY_OBJECT},
        },
    }
