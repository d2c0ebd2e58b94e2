"""JSON schemas: what is accepted can always be completed, and holds; what is refused says where."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from tests.verifier.structured.random_schemas import random_schema
from tests.verifier.structured.schema_cases import EVERYDAY, REFUSALS, TAKEN, an_object
from tests.volume import cases
from verifier.structured.json_schema.keywords import ENFORCED, ENFORCED_FORMATS, REFUSED
from verifier.structured.json_schema.reader import read_schema
from verifier.structured.json_schema.refusals import SchemaError
from verifier.structured.library_grammar import LIMITS, GrammarKind, Source, library_grammar

DOCS = Path(__file__).parents[3] / "docs"
# A token for each byte.
TOKENIZER = LLTokenizer("byte")
END = TOKENIZER.eos_token
# After so many bytes, a walk takes what may end a value.
_LONG = 200
_TOO_LONG = 8_000


class DeadEndError(AssertionError):
    """Nothing may follow, not even the end; or the end is not reached."""


def matcher_of(schema: Any) -> LLMatcher:
    """That of a schema as it is read. It may be in error."""
    grammar = library_grammar(Source(GrammarKind.JSON_SCHEMA, json.dumps(schema)), {})
    return LLMatcher(TOKENIZER, grammar.text, log_level=0, limits=LIMITS)


def walk(matcher: LLMatcher, draw: random.Random) -> str:
    """A complete output: random, but keen on the characters that JSON is made of."""
    output = bytearray()
    mask = np.zeros((1, (TOKENIZER.vocab_size + 31) // 32), dtype=np.int32)
    while len(output) < _TOO_LONG:
        fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [each for each in np.flatnonzero(bits).tolist() if each < 256 or each == END]
        if matcher.is_error() or not allowed:
            raise DeadEndError(f"nothing follows {bytes(output)!r}")
        if END in allowed:
            if allowed == [END] or draw.random() < 0.5:
                return output.decode()
            allowed.remove(END)
        ends = [each for each in allowed if each in b'"}]:bz']
        others = [each for each in allowed if each in b'abcxz"}],:{[0123456789 tfn-.\\u']
        chance = draw.random()
        if chance < (0.7 if len(output) > _LONG else 0.4):
            allowed = ends or others or allowed
        elif chance < 0.9:
            allowed = others or allowed
        output.append(draw.choice(allowed))
        matcher.consume_tokens([output[-1]])
    raise DeadEndError(f"no end after {bytes(output)!r}")


def read_back(text: str) -> Any:
    """As a client reads it; a number that no float holds, as a large one."""

    def number(written: str) -> float:
        return max(min(float(written), 1e300), -1e300)

    return json.loads(text, parse_float=number)


def assert_kept(schema: Any, draw: random.Random, num_walks: int = 4) -> None:
    """Each output can be completed, and is valid then."""
    validator = jsonschema_rs.validator_for(schema)
    for _ in range(num_walks):
        text = walk(matcher_of(schema), draw)
        assert validator.is_valid(read_back(text)), (schema, text)


@pytest.mark.parametrize("part", range(4))
def test_a_random_schema_that_is_accepted_is_kept_and_ends(part: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(part, cases(1_200, 40_000), 4):
        draw = random.Random(seed)
        schema = random_schema(draw)
        try:
            matcher = matcher_of(schema)
        except SchemaError:
            outcomes["refused"] += 1
            continue
        if matcher.is_error():
            outcomes["contradictory"] += 1
            continue
        assert_kept(schema, draw)
        outcomes["kept"] += 1
    assert outcomes["kept"] > sum(outcomes.values()) // 5, outcomes


@pytest.mark.parametrize("name", TAKEN)
def test_a_pattern_whose_names_are_taken_is_no_dead_end(name: str) -> None:
    assert_kept({"type": "object", **TAKEN[name]}, random.Random(1), num_walks=30)


def test_a_name_has_one_spelling() -> None:
    """Otherwise an escaped one would get past the schema of the name."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "additionalProperties": {"type": "integer"},
    }
    for text, is_allowed in (('{"a": "x"', True), ('{"b": 1', True), ('{"\\u0061": 1', False)):
        text_bytes = list(text.encode())
        assert (matcher_of(schema).validate_tokens(text_bytes) == len(text_bytes)) is is_allowed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0},
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.25}]},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 3},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    ],
)
def test_bounds_of_numbers_are_kept(schema: dict[str, Any]) -> None:
    assert_kept(schema, random.Random(2), num_walks=40)


@pytest.mark.parametrize(("schema", "text"), EVERYDAY)
def test_what_pydantic_and_zod_write_for_everyday_types_is_kept(
    schema: dict[str, Any], text: str
) -> None:
    matcher = matcher_of(schema)
    assert matcher.validate_tokens(list(text.encode())) == len(text)
    assert_kept(schema, random.Random(3), num_walks=5)


def test_formats_that_the_library_does_not_know_are_named_once() -> None:
    strings = [{"type": "string", "format": each} for each in ("path", "date", "path", "regex")]
    read = read_schema({"type": "array", "prefixItems": strings})
    assert read.ignored_formats == ("path", "regex")
    assert read_schema({"type": "integer", "format": "int64"}).ignored_formats == ()
    contradictory = {"type": "string", "format": "date", "pattern": "^today$"}
    assert read_schema(contradictory).ignored_formats == ("date",)


@pytest.mark.parametrize(("schema", "path", "instead"), REFUSALS)
def test_what_is_refused_is_named_by_its_path_with_what_to_write_instead(
    schema: dict[str, Any], path: str, instead: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        read_schema(schema)
    assert str(caught.value).startswith(path)
    assert instead in str(caught.value)


def test_a_branch_that_would_never_end_is_left_out() -> None:
    endless = an_object(properties={"n": {"$ref": "#/$defs/n"}}, required=["n"])
    schema = {"$defs": {"n": endless}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}
    assert {walk(matcher_of(schema), random.Random(seed)) for seed in range(20)} == {"null"}


def test_a_branch_that_only_a_contradiction_ends_is_left_out() -> None:
    nothing = {"type": "array", "anyOf": [{"type": "string"}]}
    schema: dict[str, Any] = {
        "$defs": {"n": {"anyOf": [an_object(properties={"n": {"$ref": "#/$defs/n"}}), nothing]}},
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/m"}]}},
    }
    schema["$defs"]["m"] = {"anyOf": [{"anyOf": [{"$ref": "#/$defs/m"}]}, nothing]}
    schema["properties"]["n"] = {"$ref": "#/$defs/n"}
    schema["additionalProperties"] = False
    texts = {walk(matcher_of(schema), random.Random(seed)) for seed in range(20)}
    assert not any('"a"' in text.split('"n"')[0] for text in texts)
    assert any('"n"' in text for text in texts)


@pytest.mark.parametrize("pattern", [r"^[\x00-\x7F]*$", r"^[^\x00-\x1f]+$", r"^\t\p{L}$"])
def test_a_pattern_may_name_control_characters_with_others(pattern: str) -> None:
    assert_kept({"type": "string", "pattern": pattern}, random.Random(4))


def test_the_docs_list_what_is_enforced_and_what_is_refused() -> None:
    table = (
        (DOCS / "openai.md").read_text().partition("### JSON schemas\n")[2].partition("\n## ")[0]
    )
    rows = dict(re.findall(r"^\| (Enforced|Formats|Refused) \|(.*)\|$", table, re.MULTILINE))
    listed = {name: set(re.findall(r"`([^`]+)`", row)) for name, row in rows.items()}
    assert listed == {
        "Enforced": set(ENFORCED),
        "Formats": set(ENFORCED_FORMATS),
        "Refused": set(REFUSED),
    }
