"""Whether two schemas plainly exclude each other: then oneOf says what anyOf does."""

import json
from collections.abc import Callable
from typing import Any

from verifier.structured.json_schema.keywords import TYPES

_MAX_COMPARISONS = 20_000


class Exclusion:
    """Of schemas as clients write them."""

    def __init__(self, target: Callable[[Any, str], tuple[Any, str]]) -> None:
        """target: what a reference names, which stands at a path."""
        self._target = target
        self._num_comparisons = 0

    def holds(self, one: Any, other: Any, path: str, depth: int = 16) -> bool:
        """Whether it is plain that no value is valid under both."""
        self._num_comparisons += 1
        if depth == 0 or self._num_comparisons > _MAX_COMPARISONS:
            return False
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        for given, against in ((one, other), (other, one)):
            if "$ref" in given:
                target = self._target(given["$ref"], path)[0]
                if self.holds(target, against, path, depth - 1):
                    return True
            for each in _list_of(given, "allOf"):
                if self.holds(each, against, path, depth - 1):
                    return True
            for key in ("anyOf", "oneOf"):
                options = _list_of(given, key)
                if options and all(self.holds(each, against, path, depth - 1) for each in options):
                    return True
        if not types_of(one) & types_of(other):
            return True
        values, others = _values_of(one), _values_of(other)
        if values is not None and others is not None:
            return not values & others
        if types_of(one) | types_of(other) == {"object"}:
            return self._are_disjoint_objects(one, other, path, depth)
        return _ranges_exclude(one, other)

    def _are_disjoint_objects(
        self, one: dict[str, Any], other: dict[str, Any], path: str, depth: int
    ) -> bool:
        required = {*_list_of(one, "required"), *_list_of(other, "required")}
        for name in required:
            schemas = []
            for each in (one, other):
                properties = each.get("properties", {})
                is_matched = bool(each.get("patternProperties"))
                rest = True if is_matched else each.get("additionalProperties", True)
                schemas.append(properties.get(name, rest) if isinstance(properties, dict) else True)
            if self.holds(schemas[0], schemas[1], path, depth - 1):
                return True
        return False


def _list_of(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def types_of(schema: dict[str, Any]) -> set[str]:
    """The types that it allows, as far as it is plain; each number is one of two types."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    types = schema.get("type", list(TYPES))
    allowed = {types} if isinstance(types, str) else set(types)
    if "number" in allowed:
        allowed.add("integer")
    return allowed & set(map(_type_of, values)) if isinstance(values, list) else allowed


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _values_of(schema: dict[str, Any]) -> set[str] | None:
    """Those that it lists, in one form."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return {_canonical(each) for each in values} if isinstance(values, list) else None


def _canonical(value: Any) -> str:
    def plain(each: Any) -> Any:
        if isinstance(each, float) and each == int(each):
            return int(each)
        if isinstance(each, list):
            return [plain(one) for one in each]
        return {k: plain(v) for k, v in each.items()} if isinstance(each, dict) else each

    return json.dumps(plain(value), sort_keys=True)


def _ranges_exclude(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the ranges of their numbers, or lengths, have nothing in common."""
    types = types_of(one) & types_of(other)
    for kinds, low, high in (
        ({"string"}, "minLength", "maxLength"),
        ({"array"}, "minItems", "maxItems"),
        ({"integer", "number"}, "minimum", "maximum"),
    ):
        if types <= kinds:
            for lower, upper in ((one, other), (other, one)):
                least, most = _number(lower, low), _number(upper, high)
                if least is not None and most is not None and most < least:
                    return True
    return False


def _number(schema: dict[str, Any], key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) else None
