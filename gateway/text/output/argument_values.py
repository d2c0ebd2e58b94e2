"""A call's argument that a model writes as plain text, as the JSON that its schema asks for."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.text.output.json_mender import mended

#: By tool, the schemas of its parameters.
Parameters = Mapping[str, Mapping[str, Any]]

_CONSTANTS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, of an OpenAI tool's object; what is none is left out."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def is_text(schema: Any) -> bool:
    """Whether a value can be nothing but a string."""
    return _kinds(schema) == {"string"}


def value_of(text: str, schema: Any) -> str:
    """The JSON of a value: of another type than a string, if the schema allows it and it is one."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    plain = text.strip()
    written = _CONSTANTS.get(plain.lower(), plain)
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        if plain[:1] in ("{", "[") and "string" not in kinds:
            return mended(plain)
        return json.dumps(text, ensure_ascii=False)
    if "string" in kinds and _kind(value) not in kinds - {"string"}:
        return json.dumps(text, ensure_ascii=False)
    return written


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", type(None): "null"}
    return names.get(type(value), "number")


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names; empty: it names none. Integers are numbers."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    named = {
        each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str)
    }
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and not named:
        named = {_kind(each) for each in values}
    for key in _ALTERNATIVES:
        if isinstance(schema.get(key), list):
            for each in schema[key]:
                named |= _kinds(each)
    return {"number" if each == "integer" else each for each in named}
