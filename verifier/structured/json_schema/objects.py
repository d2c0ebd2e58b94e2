"""The names of an object's properties."""

from typing import Any

from verifier.structured.json_schema.patterns import LOOK_AROUND
from verifier.structured.json_schema.probes import allows_a_name, matching
from verifier.structured.json_schema.refusals import member, refused


def read_object(read: dict[str, Any], path: str, is_joined: bool) -> None:
    patterns = read.get("patternProperties")
    if patterns:
        if is_joined:
            instead = "write all that it says about its properties in one schema"
            reason = "is not supported where allOf, anyOf, oneOf or $ref says more of the object"
            raise refused(f"{path}.patternProperties", f"{reason}; {instead}")
        _take_names(read, path)
    elif patterns is not None:
        del read["patternProperties"]
    _count_names(read, path, is_joined)


def _take_names(read: dict[str, Any], path: str) -> None:
    """Names that are given take the schemas of the patterns that match them; patterns that
    match no other name go.
    """
    patterns: dict[str, Any] = read["patternProperties"]
    properties = dict(read.get("properties", {}))
    names = [*dict.fromkeys((*properties, *read.get("required", ())))]
    taken: dict[str, Any] = dict.fromkeys(names, False)
    matched: dict[str, list[Any]] = {}
    left = {}
    for pattern, schema in patterns.items():
        place = member(f"{path}.patternProperties", pattern)
        if LOOK_AROUND.search(pattern):
            raise refused(place, "look-around is not supported; write a pattern without it")
        matches = matching(pattern, place)
        for name in filter(matches, names):
            matched.setdefault(name, []).append(schema)
        if allows_a_name({"properties": taken, "patternProperties": {pattern: True}}, place):
            left[pattern] = schema
    for name, schemas in matched.items():
        if name in properties:
            schemas = [properties[name], *schemas]
        properties[name] = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
    read["properties"] = properties
    rest = {
        "properties": taken,
        "patternProperties": dict.fromkeys(patterns, False),
        "additionalProperties": True,
    }
    if read.get("additionalProperties", True) is not False and not allows_a_name(rest, path):
        read["additionalProperties"] = False
    del read["patternProperties"]
    if left:
        read["patternProperties"] = left


def _count_names(read: dict[str, Any], path: str, is_joined: bool) -> None:
    required = read.get("required", ())
    properties = read.get("properties", {})
    is_open = "patternProperties" in read or read.get("additionalProperties") is not False
    minimum, maximum = read.get("minProperties", 0), read.get("maxProperties")
    if minimum <= len(required):
        read.pop("minProperties", None)
        minimum = 0
    num_named = len(set(properties) | set(required))
    if maximum is not None and maximum >= num_named and not is_open:
        del read["maxProperties"]
        maximum = None
    for key, value in (("minProperties", minimum), ("maxProperties", maximum)):
        if not value and (key == "minProperties" or value is None):
            continue
        if is_joined or set(properties) - set(required):
            instead = "write the names that must come as required"
            reason = "is supported only of an object in one schema, whose properties are required"
            raise refused(f"{path}.{key}", f"{reason}; {instead}")
    if minimum > len(required) + 1:
        instead = "write the names as properties and required"
        reason = f"a name may come twice, so {minimum} names cannot be promised"
        raise refused(f"{path}.minProperties", f"{reason}; {instead}")
