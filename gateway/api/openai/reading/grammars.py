"""Grammars of an output, as verifiers take them: written, and within their size."""

import json
from typing import Any

from gateway.api.openai.errors import ApiError
from gateway.api.wire import GRAMMAR_LIMITS
from tandem.values import StructuredOutput

# Of a schema: what holds schemas by names that are the client's, and what holds no schema.
MAPS_OF_SCHEMAS = frozenset(
    ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
)
VALUES = frozenset(("const", "enum", "default", "example", "examples"))


def written(schema: Any) -> str:
    """A JSON schema in as few bytes as it takes: a grammar's size is limited in bytes."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def of_schema(schema: Any, *, param: str) -> StructuredOutput:
    """That of a JSON schema.

    Args:
        param: the parameter that it comes from.

    Raises:
        ApiError: it is too large.
    """
    text = written(schema)
    _check("json_schema", text, param)
    return StructuredOutput(json_schema=text)


def of_lark(text: str, *, param: str) -> StructuredOutput:
    """That of a Lark grammar; as above."""
    _check("lark", text, param)
    return StructuredOutput(lark=text)


def _check(field: str, text: str, param: str) -> None:
    num_bytes, limit = len(text.encode()), GRAMMAR_LIMITS.max_bytes(field)
    if num_bytes > limit:
        message = f"{param}: a grammar of {num_bytes} bytes is over the limit of {limit}"
        raise ApiError(400, message, param=param, code="invalid_value")
