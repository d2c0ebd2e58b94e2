"""What the library makes of a schema: asked of small ones, with a tokenizer of bytes."""

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from verifier.structured.json_schema.refusals import refused

# Between the parts of a JSON value: a space or none. Where any white space is allowed, some models
# never end. A character has one spelling: an escaped one could repeat a name that is taken.
OPTIONS: Any = {"whitespace_pattern": " ?", "json_allowed_escapes": 'nrbtf\\"'}

_LIMITS = LLParserLimits(max_grammar_size=100_000, verbose_errors=False)
_tokenizer = LLTokenizer("byte")


def _matcher(schema: dict[str, Any]) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=OPTIONS)
    return LLMatcher(_tokenizer, grammar, log_level=0, limits=_LIMITS)


def error_of(schema: dict[str, Any]) -> str | None:
    matcher = _matcher(schema)
    return matcher.get_error() if matcher.is_error() else None


def is_contradictory(schema: dict[str, Any] | bool, definitions: dict[str, Any]) -> bool:
    """Whether no value is valid under it. Other errors are found later."""
    if isinstance(schema, bool):
        return not schema
    error = error_of({**schema, "$defs": definitions})
    return error is not None and "nsatisfiable" in error


def matching(pattern: str, path: str) -> Callable[[str], bool]:
    """Whether the library finds the pattern in a name."""
    matcher = _matcher({"type": "string", "pattern": pattern})
    if matcher.is_error():
        raise refused(path, matcher.get_error())

    def matches(name: str) -> bool:
        text = json.dumps(name, ensure_ascii=False).encode(errors="replace")
        return bool(matcher.validate_tokens(list(text)) == len(text))

    return matches


def allows_a_name(members: dict[str, Any], path: str) -> bool:
    """Whether an object with these keywords, of a property or none, may have one."""
    matcher = _matcher({"type": "object", "additionalProperties": False, **members})
    if matcher.is_error():
        raise refused(path, matcher.get_error())
    return bool(matcher.validate_tokens(list(b'{"')) == 2)
