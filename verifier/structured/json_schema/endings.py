"""Schemas of which each value would hold another one, without an end: nothing completes them."""

from collections.abc import Iterator
from typing import Any

from verifier.structured.json_schema.exclusion import types_of
from verifier.structured.json_schema.keywords import LISTS, MAPS, SCHEMA
from verifier.structured.json_schema.probes import is_contradictory
from verifier.structured.json_schema.refusals import refused

# Each is compiled for itself, perhaps several times.
_MAX_RECURSIVE = 64


def without_endless(root: Any, definitions: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A schema and those that its references name, without references to such schemas.

    Raises:
        SchemaError: no value of the schema is complete.
    """
    ending: set[str] = set()
    before = -1
    while len(ending) > before:
        before = len(ending)
        for name in reversed(definitions):
            if name not in ending and _ends(definitions[name], ending):
                ending.add(name)
    ending = _without_contradictions(definitions, ending)
    if not _ends(root, ending):
        raise refused("$", "no value is valid and complete")
    if len(ending) == len(definitions):
        return root, definitions
    left = {name: _pruned(each, ending) for name, each in definitions.items() if name in ending}
    return _pruned(root, ending), left


def _without_contradictions(definitions: dict[str, Any], ending: set[str]) -> set[str]:
    """Of the schemas that end, those that a value can be valid under. The library notices it of
    others; of one that refers to itself, it may find nothing left but the reference.
    """
    recursive = {name for name in ending if name in _reached(name, definitions)}
    if len(recursive) > _MAX_RECURSIVE:
        raise refused("$", f"more than {_MAX_RECURSIVE} schemas refer to themselves")
    known = ending - recursive
    before = -1
    while len(known) > before:
        before = len(known)
        for name in recursive - known:
            left = {each: _pruned(definitions[each], known) for each in known}
            schema = _pruned(definitions[name], known)
            if schema is not False and not is_contradictory(schema, left):
                known.add(name)
    return known


def _reached(name: str, definitions: dict[str, Any]) -> set[str]:
    """The names that lead on from this one."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        new = set(_names_in(definitions[waiting.pop()])) - reached
        reached |= new
        waiting += new
    return reached


def _names_in(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key == "$ref":
            yield name_of(value)
        elif key in MAPS:
            for each in value.values():
                yield from _names_in(each)
        elif key in LISTS:
            for each in value:
                yield from _names_in(each)
        elif key in SCHEMA:
            yield from _names_in(value)


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether a value is complete without what is not among the references that end."""
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and name_of(schema["$ref"]) not in ending:
        return False
    if not all(_ends(each, ending) for each in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_ends(each, ending) for each in schema["anyOf"]):
        return False
    types = types_of(schema)
    if "const" in schema or "enum" in schema or types - {"object", "array"}:
        return True
    if "object" in types:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if all(_ends(properties.get(name, others), ending) for name in schema.get("required", ())):
            return True
    if "array" in types:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        needed = schema.get("minItems", 0)
        all_end = all(_ends(each, ending) for each in first[:needed])
        return all_end and (needed <= len(first) or _ends(rest, ending))
    return False


def name_of(reference: str) -> str:
    return reference.rpartition("/")[2]


def _pruned(schema: Any, ending: set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and name_of(schema["$ref"]) not in ending:
        return False
    pruned: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS:
            pruned[key] = {name: _pruned(each, ending) for name, each in value.items()}
        elif key in LISTS:
            pruned[key] = [_pruned(each, ending) for each in value]
        else:
            pruned[key] = _pruned(value, ending) if key in SCHEMA else value
    return pruned
