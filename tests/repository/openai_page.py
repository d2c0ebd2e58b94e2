"""Writes docs/openai_reference.md: the OpenAI API's reference, made of the gateway's document.

After a change of `gateway/api/openai/schema.py`, `answer_schema.py` or `document.py` there:

    python -m tests.repository.openai_page
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.api.openai.document import openapi_json

FILE = Path(__file__).resolve().parents[2] / "docs" / "openai_reference.md"

_HEAD = """\
# The OpenAI API, field by field

Made of the gateway's `/openapi.json` by `python -m tests.repository.openai_page`. \
[openai.md](openai.md) says what differs from OpenAI's own API; \
[quickstart_openai.md](quickstart_openai.md) has examples.

A field in **bold** must be there; `null` means the same as its absence. A request with an unknown \
field is refused, and so is one with a value that is not allowed here: the error names the field. \
A field that allows a single value, or only `null`, is not supported.

"""

_Schema = Mapping[str, Any]


def render() -> str:
    document = json.loads(openapi_json())
    parts = [_HEAD, "## Paths\n\n"]
    statuses: dict[str, str] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation)
            for status, response in operation["responses"].items():
                if "ErrorAnswer" in str(response):
                    statuses.setdefault(status, response["description"])
    parts.append("\n## Errors\n\nThe body is an [ErrorAnswer](#erroranswer).\n\n")
    parts += [f"- {status}: {statuses[status]}\n" for status in sorted(statuses)]
    schemas = document["components"]["schemas"]
    for name in _by_first_reference(document["paths"], schemas):
        parts += _model(name, schemas[name])
    return "".join(parts).rstrip() + "\n"


def _operation(path: str, method: str, operation: _Schema) -> Iterator[str]:
    yield f"- `{method.upper()} {path}`: {operation['summary']}"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body:
        yield f" Takes a {_type(body['schema'])}."
    contents = operation["responses"]["200"]["content"]
    if "$ref" in contents.get("application/json", {}).get("schema", {}):
        yield f" Answers with a {_type(contents['application/json']['schema'])}"
        if events := contents.get("text/event-stream"):
            last = events.get("x-last-event")
            yield f"; with `stream`, events of {_type(events['x-event'])}"
            yield f", then `{last}`" if last else ""
        yield "."
    yield "\n"


def _by_first_reference(paths: _Schema, schemas: Mapping[str, _Schema]) -> list[str]:
    """The schemas in the order in which a reader of the paths meets them."""
    names = list(_references(paths))
    for name in names:  # grows meanwhile
        names += [each for each in _references(schemas[name]) if each not in names]
    return list(dict.fromkeys(names))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for key, each in value.items():
            if key != "discriminator":
                yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def _model(name: str, schema: _Schema) -> Iterator[str]:
    yield f"\n## {name}\n\n"
    if "description" in schema:
        yield f"{schema['description']}\n\n"
    if "properties" not in schema:
        yield f"A {_type(schema)}.\n"
        return
    for field, described in schema["properties"].items():
        shown = f"**`{field}`**" if field in schema.get("required", ()) else f"`{field}`"
        comment = f": {_one_line(described['description'])}" if "description" in described else ""
        yield f"- {shown}, {_type(described)}{comment}\n"


def _type(schema: _Schema) -> str:
    """A schema's values, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_type(each) for each in _without_null(schema))
    if "const" in schema:
        return _literal(schema["const"])
    if "enum" in schema:
        return " or ".join(_literal(value) for value in schema["enum"])
    match schema.get("type"):
        case "array":
            items = f" of {_type(schema['items'])}" if schema.get("items") else ""
            return "list" + _range(schema, "minItems", "maxItems") + items
        case "object":
            values = schema.get("additionalProperties")
            kind = f" of {_type(values)}" if isinstance(values, dict) else ""
            return "object" + _range(schema, "minProperties", "maxProperties") + kind
        case "string":
            return "text" + _range(schema, "minLength", "maxLength", " characters")
        case "boolean":
            return "true or false"
        case "null":
            return "`null`"
        case "integer" | "number" as kind:
            return str(kind) + _range(schema, "minimum", "maximum")
    return "any value"


def _without_null(schema: _Schema) -> list[_Schema]:
    """The members of a union; null goes without saying where it is the default."""
    members: list[_Schema] = schema.get("anyOf") or schema["oneOf"]
    others = [member for member in members if member.get("type") != "null"]
    return others if others and schema.get("default", ...) is None else members


def _range(schema: _Schema, least: str, most: str, unit: str = "") -> str:
    """The bounds with these keys, in words: those of a number, a length or a count."""
    bounds = {
        "over": schema.get("exclusiveMinimum"),
        "at least": schema.get(least),
        "under": schema.get("exclusiveMaximum"),
        "at most": schema.get(most),
    }
    words = [
        f"{word} {bound:,g}" if isinstance(bound, float) else f"{word} {bound:,}"
        for word, bound in bounds.items()
        if bound is not None
    ]
    return f" ({', '.join(words)}{unit})" * bool(words)


def _literal(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    FILE.write_text(render())
