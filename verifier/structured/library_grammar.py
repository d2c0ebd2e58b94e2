"""A grammar in the grammar library's own form. Imports little: a process of its own needs it."""

import enum
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits

from tandem.values import ReasoningTags
from verifier.structured.json_schema.reader import (
    ReadSchema,
    located,
    read_schema,
    with_options,
)
from verifier.structured.json_schema.refusals import SchemaError

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# A text in Lark as its lexer reads it: what may hold any character, repetitions ("a"~3), and the
# two operators whose automata double with each step of a regex. What is not closed is no Lark; it
# is taken as a whole, or a search for its end would begin at each of its characters.
_LARK_TOKEN = re.compile(
    r"""
    "(?:\\.|[^"\\])*(?:"|\\?\Z) | /(?:\\.|[^/\\])+(?:/|\\?\Z) | (?://|\#)[^\n]*
    | (?P<tag><[^<>\s]+>) | (?P<json>%json\b\s*)
    | ~[ \t]*[0-9] | (?P<refused>[&~])
    """,
    re.VERBOSE | re.DOTALL,
)


# Before what is wrong with a schema that is part of a grammar in Lark: a line and a column of that.
_OF_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")


class GrammarKind(enum.Enum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    LARK = "lark"


class Source(NamedTuple):
    """A grammar as a client writes it.

    Attributes:
        text: of choices, the strings as a JSON list.
        reasoning: what may come before its text; None: nothing.
    """

    kind: GrammarKind
    text: str
    reasoning: ReasoningTags | None = None


class LibraryGrammar(NamedTuple):
    """A grammar as the library takes it.

    Attributes:
        schemas: the JSON schemas in it.
        is_lark: they are parts of a grammar in Lark.
    """

    text: str
    schemas: tuple[ReadSchema, ...] = ()
    is_lark: bool = False

    @property
    def ignored_formats(self) -> list[str]:
        """Of the schemas, each once."""
        return list(dict.fromkeys(name for each in self.schemas for name in each.ignored_formats))

    def named(self, reason: str) -> str:
        """What the library says of it, with the place in a schema, if that is plain."""
        found = _OF_SCHEMA.match(reason)
        if len(self.schemas) != 1 or (self.is_lark and not found):
            return reason
        return located(self.schemas[0], reason[found.end() :] if found else reason)


def library_grammar(source: Source, tags: Mapping[str, int]) -> LibraryGrammar:
    """A grammar in the library's form.

    Args:
        tags: as in `LibraryTokenizer`.

    Raises:
        ValueError: it asks for what is not supported, or is no JSON; says what.
    """
    grammar = _of_text(source.kind, source.text, tags)
    if source.reasoning is None:
        return grammar
    return grammar._replace(text=_behind_reasoning(grammar.text, source.reasoning, tags))


def _of_text(kind: GrammarKind, text: str, tags: Mapping[str, int]) -> LibraryGrammar:
    if kind is GrammarKind.JSON_SCHEMA:
        read = read_schema(_json(text))
        return LibraryGrammar(
            LLMatcher.grammar_from_json_schema(json.dumps(with_options(read))), (read,)
        )
    if kind is GrammarKind.REGEX:
        return LibraryGrammar(LLMatcher.grammar_from_regex(text))
    if kind is GrammarKind.CHOICES:
        choices = " | ".join(json.dumps(each) for each in json.loads(text))
        return LibraryGrammar(LLMatcher.grammar_from_lark(f"start: {choices}"))
    return _of_lark(text, tags)


def _behind_reasoning(text: str, reasoning: ReasoningTags, tags: Mapping[str, int]) -> str:
    """The grammar of an output that may reason before it follows another one.

    Args:
        text: of that one, in the library's form.
        tags: as in `LibraryTokenizer`.
    """
    parts: list[dict[str, Any]] = [{"lark_grammar": text}]
    if text.lstrip().startswith("{"):
        parts = json.loads(text)["grammars"]
    parts[0]["name"] = "answer"
    begin, end = (
        f"<[{tags[tag]}]>" if tag in tags else json.dumps(tag)
        for tag in (reasoning.begin, reasoning.end)
    )
    if reasoning.end in tags:
        # Where the end is a token, its text must not come otherwise: who reads the output would
        # take it for the end.
        written = f"(TEXT {json.dumps(reasoning.end)} TEXT)"
        rules = f"thought: THOUGHT {end}\nTHOUGHT: TEXT & ~{written}\nTEXT: /(?s:.*)/"
    else:
        rules = f"thought[lazy]: /(?s:.*)/ {end}"
    before = f"({begin} thought SPACE?)?" if reasoning.begin else "thought SPACE?"
    first = f"start: {before} @answer\n{rules}\nSPACE: /\\s{{1,8}}/"
    return json.dumps({"grammars": [{"lark_grammar": first}, *parts]})


def _of_lark(text: str, tags: Mapping[str, int]) -> LibraryGrammar:
    parts: list[str] = []
    schemas: list[ReadSchema] = []
    place = 0
    while found := _LARK_TOKEN.search(text, place):
        parts.append(text[place : found.start()])
        place = found.end()
        if operator := found["refused"]:
            raise ValueError(f"the operator {operator} is not supported outside of regexes")
        if found["json"]:
            try:
                schema, place = json.JSONDecoder().raw_decode(text, place)
            except ValueError:
                raise ValueError("no JSON follows %json") from None
            schemas.append(read_schema(schema))
            parts.append(f"%json {json.dumps(with_options(schemas[-1]))}")
        else:
            token_id = tags.get(found["tag"])
            parts.append(found[0] if token_id is None else f"<[{token_id}]>")
    parts.append(text[place:])
    return LibraryGrammar(LLMatcher.grammar_from_lark("".join(parts)), tuple(schemas), is_lark=True)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise SchemaError("the schema is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the schema is no JSON: {error}") from None
