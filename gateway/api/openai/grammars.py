"""Grammars of an output, as verifiers take them: written, and within their size."""

import json
from typing import Any

from gateway.api.openai.errors import ApiError
from gateway.api.wire import encoded_grammar, max_grammar_bytes
from gateway.messages.request import EncodedGrammar

# Of a schema: what holds schemas by names that are the client's, and what holds no schema.
MAPS_OF_SCHEMAS = frozenset(
    ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
)
VALUES = frozenset(("const", "enum", "default", "example", "examples"))

# Keywords that constrain nothing.
_ANNOTATIONS = frozenset(("title", "description", "$comment"))


def written(schema: Any) -> str:
    """A JSON schema in as few bytes as it takes: a grammar's size is limited in bytes.

    Verifiers refuse `propertyNames`. It is left out where it allows any name, as generators of
    schemas write it for every map.
    """
    text = _dumped(schema)
    if '"propertyNames"' not in text or len(text) > max_grammar_bytes("json_schema"):
        return text
    return _dumped(_without_any_names(schema))


def _without_any_names(given: Any) -> Any:
    if isinstance(given, list):
        return [_without_any_names(each) for each in given]
    if not isinstance(given, dict):
        return given
    kept: dict[str, Any] = {}
    for key, value in given.items():
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _without_any_names(each) for name, each in value.items()}
        elif key != "propertyNames" or not _allows_any_name(value):
            kept[key] = value if key in VALUES else _without_any_names(value)
    return kept


def _allows_any_name(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    return schema.keys() - _ANNOTATIONS <= {"type"} and schema.get("type", "string") == "string"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def of_schema(schema: Any, *, param: str) -> EncodedGrammar:
    """That of a JSON schema.

    Args:
        param: the parameter that it comes from.

    Raises:
        ApiError: it is too large.
    """
    text = written(schema)
    _check("json_schema", text, param)
    return encoded_grammar(json_schema=text)


def of_lark(text: str, *, param: str) -> EncodedGrammar:
    """That of a Lark grammar; as above."""
    _check("lark", text, param)
    return encoded_grammar(lark=text)


def _check(field: str, text: str, param: str) -> None:
    num_bytes, limit = len(text.encode()), max_grammar_bytes(field)
    if num_bytes > limit:
        message = f"{param}: a grammar of {num_bytes} bytes is over the limit of {limit}"
        raise ApiError(400, message, param=param, code="invalid_value")
