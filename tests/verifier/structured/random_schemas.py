"""Random JSON schemas, of few names and patterns, so that their keywords meet."""

import random
from typing import Any

NAMES = ["a", "b", "ab", "é", 'x"', "", "a\n"]
PATTERNS = [
    "^a$",
    "^b$",
    "^[ab]$",
    "^a",
    "b$",
    "",
    "^x-",
    "^(a|ab)$",
    "^[^z]*$",
    "^[a-z]{1,2}$",
    "^$",
]
_BOUNDS = [0, 1, -3, 2.5, 10, -0.5, 0.1, 0.3, 1e-7]
_VALUES = [1, 0.5, "a", None, True, [1], {"a": 1}, "é", "x\ty", -3, 1e3, 100, {"b": [2]}, ""]
_MAX_DEPTH = 3


def random_schema(draw: random.Random) -> dict[str, Any]:
    """One with definitions that refer to each other, perhaps without an end."""
    return _Schemas(draw).root()


class _Schemas:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._is_often = draw.choice([0.1, 0.3, 0.6])

    def root(self) -> dict[str, Any]:
        schema = self._schema(0)
        if not isinstance(schema, dict):
            return {"type": "array", "items": schema}
        return {**schema, "$defs": {name: self._schema(1) for name in "pqr"}}

    def _chance(self, probability: float) -> bool:
        return self._draw.random() < probability

    def _schema(self, depth: int) -> Any:
        draw = self._draw
        if depth and self._chance(0.1):
            return {"$ref": f"#/$defs/{draw.choice('pqr')}"}
        if depth >= _MAX_DEPTH or self._chance(0.25):
            return self._leaf()
        schema = draw.choice([self._object, self._object, self._array, _no_keyword])(depth)
        if not schema or self._chance(self._is_often):
            key = draw.choice(["allOf", "anyOf", "oneOf"])
            schema[key] = [self._schema(depth + 1) for _ in range(draw.randint(1, 3))]
            members = list(schema.items())
            draw.shuffle(members)
            return dict(members)
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        schema: dict[str, Any] = {"type": "object"} if self._chance(0.9) else {}
        if self._chance(0.7):
            names = draw.sample(NAMES, draw.randint(0, 3))
            schema["properties"] = {name: self._schema(depth + 1) for name in names}
        if self._chance(0.4):
            patterns = draw.sample(PATTERNS, draw.choice([1, 1, 1, 2]))
            schema["patternProperties"] = {each: self._schema(depth + 2) for each in patterns}
        if self._chance(0.6):
            schema["additionalProperties"] = draw.choice([False, True, self._schema(depth + 2)])
        if self._chance(0.5):
            schema["required"] = draw.sample(NAMES, draw.randint(0, 2))
        for key in ("minProperties", "maxProperties"):
            if self._chance(0.2):
                schema[key] = draw.randint(0, 3)
        if self._chance(0.1):
            schema["propertyNames"] = draw.choice(
                [{"pattern": "^a"}, {"maxLength": 2}, {"enum": ["a", "b"]}, {"type": "string"}]
            )
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        schema: dict[str, Any] = {"type": "array"}
        if self._chance(0.4):
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(draw.randint(1, 2))]
        if self._chance(0.7):
            schema["items"] = draw.choice([False, self._schema(depth + 1)])
        for key in ("minItems", "maxItems"):
            if self._chance(0.4):
                schema[key] = draw.randint(0, 3)
        return schema

    def _leaf(self) -> Any:
        draw = self._draw
        kind = draw.choice(["integer", "number", "string", "values", "types", "any"])
        schema: dict[str, Any] = {"type": kind}
        if kind == "string":
            for key in ("minLength", "maxLength"):
                if self._chance(0.4):
                    schema[key] = draw.randint(0, 3)
            if self._chance(0.3):
                schema["pattern"] = draw.choice(PATTERNS)
        elif kind == "values":
            return {"enum": draw.sample(_VALUES, draw.randint(1, 3))}
        elif kind == "types":
            return {"type": draw.sample(["string", "integer", "null", "boolean"], 2)}
        elif kind == "any":
            return draw.choice([True, {}, False, {"type": "null"}, {"type": "boolean"}])
        else:
            for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
                if self._chance(0.25):
                    schema[key] = draw.choice(_BOUNDS)
            if self._chance(0.2):
                schema["multipleOf"] = draw.choice([2, 3, 0.5, 5, 0.1])
        return schema


def _no_keyword(_: int) -> dict[str, Any]:
    return {}
