"""Which keywords and formats are enforced, and which refused.

Every other keyword says nothing about a value, and is ignored; other formats are, with a warning.
"""

from typing import Any

# By what they hold: values, a schema, schemas by name, or a list of schemas.
COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)
NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
VALUES = COUNTS | NUMBERS | {"type", "const", "enum", "required", "pattern", "format"}
SCHEMA = frozenset(("additionalProperties", "items", "propertyNames"))
MAPS = frozenset(("properties", "patternProperties"))
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
# A list of items, and additionalItems beside it, are of older drafts.
ENFORCED = VALUES | SCHEMA | MAPS | LISTS | {"$ref", "additionalItems"}
ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_CASES = "write the cases as anyOf"
# Keywords that are refused, unless they constrain nothing, and what to write instead.
REFUSED = {
    "not": "say what is allowed, by enum, pattern or type",
    "if": _CASES,
    "then": _CASES,
    "else": _CASES,
    "dependentRequired": _CASES,
    "dependentSchemas": _CASES,
    "dependencies": _CASES,
    "contains": "constrain every item, by items or prefixItems",
    "minContains": "constrain every item, by items or prefixItems",
    "maxContains": "constrain every item, by items or prefixItems",
    "uniqueItems": "leave it out, and drop repeated items of the answer",
    "unevaluatedProperties": "write additionalProperties, in one schema with all properties",
    "unevaluatedItems": "write items, in one schema with prefixItems",
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
}
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
# What speaks of the parts of a value: two such schemas of one value are multiplied by the library.
STRUCTURE = MAPS | {
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "items",
    "prefixItems",
}
IN_PLACE = ("const", "enum", "$ref", "allOf", "anyOf", "oneOf")
ANNOTATIONS_OF_NAMES = frozenset(("title", "description", "$comment", "format", "default"))


def constrains_nothing(key: str, given: dict[str, Any]) -> bool:
    value: object = given[key]
    if key in ("if", "then", "else"):
        return "if" not in given or not {"then", "else"} & given.keys()
    if key == "contains":
        return given.get("minContains") == 0 and "maxContains" not in given
    if key in ("minContains", "maxContains"):
        return "contains" not in given
    if key == "not":
        # {"not": {}} is how some write false.
        return isinstance(value, bool) or value == {}
    if key == "uniqueItems":
        return value is False or given.get("maxItems") in (0, 1)
    if key.startswith("unevaluated"):
        return value is True or value == {}
    return value == {}
