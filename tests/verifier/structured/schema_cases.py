"""JSON schemas, with what becomes of them."""

from typing import Any

from verifier.structured.json_schema.keywords import REFUSED

TAKEN: dict[str, Any] = {
    "a name that must come": {
        "required": ["grade"],
        "patternProperties": {"^grade$": {"type": "string", "maxLength": 4}},
        "additionalProperties": False,
    },
    "a name that may come": {
        "properties": {"a": {"maxLength": 2}},
        "patternProperties": {"^a$": {"type": "string"}},
        "additionalProperties": False,
    },
    "some of several": {
        "properties": {"a": True, "b": True},
        "patternProperties": {"^[ab]$": {"type": "null"}, "^c": {"type": "integer"}},
    },
    "every other name": {"patternProperties": {"": {"type": "null"}}},
    "every name with another pattern": {
        "patternProperties": {"^a": {"type": "null"}, "^([^a]|$)": {"type": "boolean"}},
        "additionalProperties": {"type": "integer"},
    },
    "names that must come, counted": {
        "required": ["a"],
        "minProperties": 1,
        "maxProperties": 2,
        "patternProperties": {"^a$": {"type": "null"}},
        "additionalProperties": {"type": "null"},
    },
    "a map": {"patternProperties": {"^a": {"type": "integer"}}, "minProperties": 1},
}


# What Pydantic and Zod write for everyday types, with an output that each allows.
FORMATS = [
    "password", "binary", "path", "file-path", "directory-path", "regex", "json-pointer", "base64",
    "base64url", "ipv4network", "ipv6interface", "ipvanyaddress", "uuid4", "multi-host-uri",
    "nanoid", "cuid", "ulid", "jwt", "cidrv4", "emoji", "e164", "lowercase", "starts_with",
]  # fmt: skip


EVERYDAY: list[tuple[dict[str, Any], str]] = [
    *(({"type": "string", "format": name}, '"any"') for name in FORMATS),
    ({"type": "integer", "format": "int64"}, "7"),
    ({"type": "string", "contentMediaType": "application/json", "contentSchema": {}}, '"{}"'),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1,1]"),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, '"-12.50"'),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"}, '"1.25"'),
    (
        {
            "type": "string",
            "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,6}|(?=[\d.]{1,9}0*$)\d{0,6}\.\d{0,2}0*$)",
        },
        '"123.45"',
    ),
    (
        {
            "type": "string",
            "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)",
        },
        '"12.345"',
    ),
    (
        {
            "type": "string",
            "format": "hostname",
            "pattern": r"^(?=.{1,253}\.?$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z]+)*\.?$",
        },
        '"example.com"',
    ),
    (
        {
            "type": "string",
            "format": "duration",
            "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
            r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        },
        '"P1DT2H"',
    ),
    *(
        (
            {
                "type": "string",
                "format": "email",
                "pattern": rf"^(?!\.)(?!.*\.\.)([{letters}0-9_'+\-\.]*)[{letters}0-9_+-]"
                rf"@([{letters}0-9][{letters}0-9\-]*\.)+[{letters}]{{2,}}$",
            },
            '"a.b-c+d@mail.example.com"',
        )
        for letters in ("A-Za-z", "a-zA-Z")
    ),
    (
        {
            "type": "string",
            "format": "time",
            "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$",
        },
        '"12:30:01.5"',
    ),
    (
        {
            "$defs": {
                "Cat": {
                    "type": "object",
                    "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}},
                    "required": ["kind", "n"],
                },
                "Dog": {
                    "type": "object",
                    "properties": {"kind": {"const": "dog"}, "m": {"type": "string"}},
                    "required": ["kind", "m"],
                },
            },
            "discriminator": {"propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        },
        '{"kind":"dog","m":"x"}',
    ),
    (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"a": {}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"b": {}},
                    "required": ["b"],
                    "additionalProperties": False,
                },
            ]
        },
        '{"b":1}',
    ),
    ({"oneOf": [{"type": "string"}, {"type": "null"}, {"type": "integer"}]}, "null"),
    (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
            "required": ["a", "b"],
        },
        '{"a":1,"b":2}',
    ),
    (
        {
            "$defs": {"Color": {"enum": ["a", "b"], "type": "string"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Color"},
            "additionalProperties": {"type": "integer"},
        },
        '{"b":2}',
    ),
    (
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^x-"},
            "additionalProperties": {"type": "integer"},
        },
        '{"x-a":2}',
    ),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, '{"a":1}'),
    ({"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": False}, "{}"),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "null"}],
            "additionalItems": False,
        },
        "[null]",
    ),
    (
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#"}},
                {
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": {"$ref": "#"},
                },
            ]
        },
        '{"a":["b"]}',
    ),
]


def an_object(**members: Any) -> dict[str, Any]:
    return {"type": "object", **members}


# They say nothing alone.
_BESIDE_OTHERS = {"if", "then", "else", "minContains", "maxContains"}


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    *(
        (
            an_object(properties={"a b": {keyword: {"x": ["y"]}}}),
            f'$.properties["a b"].{keyword}',
            f"is not supported; {instead}",
        )
        for keyword, instead in REFUSED.items()
        if keyword not in _BESIDE_OTHERS
    ),
    ({"if": {}, "then": {}}, "$.if", "write the cases as anyOf"),
    ({"contains": {}, "maxContains": 2}, "$.contains", "constrain every item"),
    (an_object(minProperties=2), "$.minProperties", "a name may come twice"),
    (
        an_object(properties={"a": {}, "b": {}}, minProperties=1),
        "$.minProperties",
        "write the names that must come as required",
    ),
    (
        {"allOf": [an_object(properties={"a": {}}), an_object(patternProperties={"^a": {}})]},
        "$.allOf[1].patternProperties",
        "in one schema",
    ),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "$.oneOf",
        "write anyOf, or give each object a property that is required",
    ),
    (
        an_object(properties={"u": {"oneOf": [an_object(), an_object()]}}),
        "$.properties.u.oneOf",
        "both 0 and 1",
    ),
    (
        {"$defs": {"n": {"pattern": "a(?!b)"}}, "items": {"$ref": "#/$defs/n"}},
        "$.$defs.n.pattern",
        "look-around",
    ),
    ({"pattern": r"\\\bx"}, "$.pattern", r"without (?=, (?!, (?<=, (?<! and \b"),
    (an_object(propertyNames={"minLength": 2}), "$.propertyNames", "patternProperties"),
    ({"const": 2**53 + 1}, "$.const", "write a string"),
    ({"enum": ["\x01"]}, "$.enum", "control characters"),
    ({"pattern": r"^\x01$"}, "$.pattern", "control characters"),
    ({"$ref": "other.json"}, "$.$ref", "write the schema into $defs"),
    ({"type": "text"}, "$.type", "must be of array, boolean"),
    ({"items": {"minLength": -1}}, "$.items.minLength", "not negative"),
    ({"maxItems": float("inf")}, "$.maxItems", "not negative"),
    (
        {
            "$defs": {"n": an_object(properties={"n": {"$ref": "#/$defs/n"}}, required=["n"])},
            "$ref": "#/$defs/n",
        },
        "$",
        "no value is valid and complete",
    ),
]
