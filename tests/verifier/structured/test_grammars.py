"""Grammars: which tokens they allow, against brute force; what is refused; what is bounded."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.verifier.structured.compiled import END, TOKENIZER, VOCABULARY, state_of, tokens_of
from tests.volume import cases
from verifier.errors import InvalidRequestError, UnsupportedFieldError
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind

CHOICES = ["yes", "yesterday", "no", "not at all", "naïve", "東京", ""]


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    """The bytes of each token; of special tokens none."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    special = {i for i, each in tokenizer.get_added_tokens_decoder().items() if each.special}
    # Byte-level vocabularies write each byte as a character.
    bytes_of = _bytes_of_characters()
    return [
        b""
        if token_id in special
        else bytes(bytes_of[c] for c in tokenizer.id_to_token(token_id) or "")
        for token_id in range(VOCABULARY)
    ]


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's characters of bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def test_allowed_tokens_are_those_that_some_choice_goes_on_with(
    grammars: Grammars, texts: list[bytes]
) -> None:
    choices = [each.encode() for each in CHOICES]
    draw = random.Random(1)
    num_forced = 0
    for _ in range(20):
        state = state_of(grammars, GrammarKind.CHOICES, json.dumps(CHOICES))
        output: list[int] = []
        text = b""
        while True:
            state.take_in([7, 7, *output], 2)
            expected = {
                token_id
                for token_id, piece in enumerate(texts)
                if piece and any(each.startswith(text + piece) for each in choices)
            } | ({END} if text in choices else set())
            allowed = tokens_of(state.allowed([])[0])
            forced = state.forced(8)
            if forced:
                # Of text that must come, only the tokens by which the tokenizer writes it.
                assert allowed == {forced[0]} <= expected
            else:
                assert allowed == expected
            num_forced += bool(forced)
            token_id = draw.choice(sorted(allowed))
            if token_id == END:
                break
            output.append(token_id)
            text += texts[token_id]
        assert text in choices
    assert num_forced > 5


def test_a_row_after_drafts_allows_what_is_allowed_without_them(grammars: Grammars) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    draw = random.Random(2)
    for _ in range(20):
        state = state_of(grammars, GrammarKind.JSON_SCHEMA, schema)
        alone = state_of(grammars, GrammarKind.JSON_SCHEMA, schema)
        drafts: list[int] = []
        masks = []
        for _ in range(12):
            alone.take_in(drafts, 0)
            masks.append(alone.allowed([])[0])
            choices = sorted(tokens_of(masks[-1]) - {END})
            if not choices:
                break
            drafts.append(draw.choice(choices))
        drafts = drafts[: len(masks) - 1]
        assert state.num_possible(drafts) == len(drafts)
        assert np.array_equal(state.allowed(drafts), np.stack(masks))
        # Asking changes nothing.
        assert np.array_equal(state.allowed(drafts), np.stack(masks))


SCHEMA = json.dumps(
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "size": {"type": "integer"},
                "is set": {"type": "boolean"},
                "kind": {"enum": ["the total is 100", "the total is 12", "東京 x"]},
            },
            "required": ["name", "size", "is set", "kind"],
            "additionalProperties": False,
        },
    }
)
CHECKED = [
    (GrammarKind.JSON_SCHEMA, SCHEMA),
    (GrammarKind.CHOICES, json.dumps(CHOICES)),
    (GrammarKind.REGEX, "[a-z]+"),
    (GrammarKind.REGEX, "(the total|the sum) is [0-9]{3}(, [a-z]{4}){2} isn't  it\\n\\n    x"),
    (GrammarKind.LARK, 'start: a " end of it"\na[max_tokens=5]: /[a-z ]+/'),
    (GrammarKind.LARK, 'start: a "the end"\na[stop="."]: /[a-z ]+/'),
    (GrammarKind.LARK, 'start: a "the end"\na[suffix="."]: /[a-z ]+/'),
    (GrammarKind.LARK, '%llguidance {"no_forcing": true}\nstart: "the total" /[ab]/ " and all"'),
    (GrammarKind.LARK, 'start: "ab" <|end|> "total" <|end|> /[a-z]+/'),
    (GrammarKind.LARK, f"start: /[xy]/ {json.dumps('isn t  def f(x): x ; ' * 5)} /[0-9]/"),
]


@pytest.fixture(scope="module", params=["words", "any text"])
def json_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """A small one whose tokens are parts of JSON: of words, or also of the text between them."""
    draw = random.Random(3)
    texts = [
        json.dumps(
            [
                {
                    "name": draw.choice(["total", "naïve", "東京 x"]),
                    "size": draw.randrange(1000),
                    "is set": draw.random() < 0.5,
                    "kind": "the total is 100",
                }
                for _ in range(4)
            ],
            ensure_ascii=False,
        )
        + " the end of it  \n\n   isn't "
        for _ in range(50)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=request.param == "words"
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<|stop|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_token_is_allowed_as_its_mask_says(json_tokenizer: Path) -> None:
    """Whatever is asked first, and wherever in a text that must come."""
    vocab_size = Tokenizer.from_file(str(json_tokenizer)).get_vocab_size()
    grammars = Grammars(json_tokenizer, vocab_size=vocab_size, end_token_ids=[END])
    draw = random.Random(6)
    num_ends = 0
    for kind, text in CHECKED * cases(1, 2):
        masked, asked = (state_of(grammars, kind, text) for _ in range(2))
        resumed = grammars.compile(Grammar(kind, text), is_drafted=False).result(timeout=60)
        output: list[int] = []
        for _ in range(50):
            for state in (masked, asked, resumed):
                state.take_in(output, 0)
            expected = tokens_of(masked.allowed([])[0])
            tried = {END, *draw.sample(range(vocab_size), cases(100, vocab_size))}
            for token_id in tried | set(sorted(expected)[:20]):
                # As after a resumption: nothing is known of a text that has begun.
                resumed._run, resumed._run_start, resumed._masks = [], -1, resumed._no_masks
                if resumed.allows([token_id]) != (token_id in expected):
                    # Once nothing but the end may come, only masks say so.
                    assert expected == {token_id} == {END}, (text, output, token_id)
                    num_ends += 1
            some = [*draw.sample(range(vocab_size), 5), *sorted(expected - {END})[:2]]
            assert [asked.allows([each]) for each in some] == [each in expected for each in some]
            assert masked.error is asked.error is resumed.error is None
            if expected == {END}:
                break
            output.append(draw.choice(sorted(expected - {END})))
    assert num_ends > 5
    grammars.close()


def test_a_sequence_without_drafts_has_one_matcher(grammars: Grammars) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    a, b, _ = drafts = [tokenizer.encode(each).ids[0] for each in "abc"]
    grammar = Grammar(GrammarKind.REGEX, "abc")
    alone = grammars.compile(grammar, is_drafted=False).result(timeout=60)
    other = grammars.compile(grammar).result(timeout=60)
    assert other.forced(2)
    assert alone.forced(2) == []
    assert alone.num_possible(drafts) == alone.num_verifiable(drafts) == 0
    for output in ([], [a], [a, b]):
        alone.take_in(output, 0)
        other.take_in(output, 0)
        assert np.array_equal(alone.allowed([]), other.allowed([]))


def test_output_that_a_client_has_already_counts(grammars: Grammars) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    given = tokenizer.encode("ab").ids
    grammar = Grammar(GrammarKind.REGEX, "ab?c", "field")
    state = grammars.compile(grammar, given).result(timeout=60)
    assert tokens_of(state.allowed([])[0]) == {tokenizer.encode("c").ids[0]}
    with pytest.raises(InvalidRequestError) as caught:
        grammars.compile(grammar, tokenizer.encode("xyz").ids).result(timeout=60)
    assert caught.value.field == "field"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.REGEX, "(" * 16_000),
        (GrammarKind.JSON_SCHEMA, "no json"),
        (GrammarKind.JSON_SCHEMA, "false"),
        (GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'),
        (GrammarKind.JSON_SCHEMA, "[" * 60_000),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "https://example.com/schema.json"}'),
        (GrammarKind.LARK, "start: missing_rule"),
        (GrammarKind.LARK, "no grammar at all"),
    ],
)
def test_a_wrong_grammar_is_refused_by_its_field(
    grammars: Grammars, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        state_of(grammars, kind, text)
    assert caught.value.field == "field"
    assert caught.value.message


HOSTILE = {
    "nested counts": (GrammarKind.REGEX, "((a|b|c|d){1,300}x){1,300}"),
    "nested counts of one": (GrammarKind.REGEX, "(a{1,1000}){1,1000}"),
    "far lookback": (GrammarKind.REGEX, ".*a.{500}"),
    "ambiguous": (GrammarKind.LARK, 'start: a\na: a a | "x" a | a "y" | "z" | "x"'),
    "recursive": (
        GrammarKind.JSON_SCHEMA,
        json.dumps(
            {
                "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 50}},
                "$ref": "#/$defs/a",
            }
        ),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_an_answer_or_an_error(grammars: Grammars, name: str) -> None:
    """Not in endless work: the library counts what it spends."""
    try:
        state = state_of(grammars, *HOSTILE[name])
    except InvalidRequestError:
        return
    output: list[int] = []
    draw = random.Random(3)
    for _ in range(60):
        state.take_in(output, 0)
        with contextlib.suppress(InvalidRequestError):
            allowed = tokens_of(state.allowed([])[0]) - {END}
        if state.error is not None or not allowed:
            return
        output.append(draw.choice(sorted(allowed)))


def test_sequences_of_one_grammar_share_nothing(grammars: Grammars) -> None:
    """The library's copies of a matcher share what they count: one would use up the others'."""
    text = "(?s:.*)error(?s:.{0,80})code [0-9]+(?s:.*)"
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    draw = random.Random(6)
    letters = [tokenizer.encode(each).ids[0] for each in "abcdefgh error code 1"]
    for _ in range(50):
        state = state_of(grammars, GrammarKind.REGEX, text)
        state.take_in([draw.choice(letters) for _ in range(120)], 0)
        state.allowed([])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            GrammarKind.LARK,
            "\n".join(["start: a0", *(f"a{n}: a{n + 1}" for n in range(4000)), 'a4000: "x"']),
        ),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps(
                {
                    "$defs": {
                        f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(1300)
                    }
                    | {"a1300": {}},
                    "$ref": "#/$defs/a0",
                }
            ),
        ),
    ],
    ids=["lark", "json_schema"],
)
def test_a_chain_of_thousands_of_rules_is_no_end_of_the_process(
    grammars: Grammars, kind: GrammarKind, text: str
) -> None:
    assert len(text) < 65_536
    with contextlib.suppress(InvalidRequestError):
        state_of(grammars, kind, text).allowed([])


def test_a_tokenizer_that_cannot_be_used_is_said_by_name(tmp_path: Path) -> None:
    for path, vocab_size in ((tmp_path / "none.json", VOCABULARY), (TOKENIZER, 100)):
        grammars = Grammars(path, vocab_size=vocab_size, end_token_ids=[END])
        with pytest.raises(UnsupportedFieldError) as caught:
            state_of(grammars, GrammarKind.REGEX, "a")
        assert caught.value.field == "field"
        grammars.close()


@pytest.mark.parametrize("operator", "&~")
def test_operators_that_compile_for_too_long_are_refused_by_name(
    grammars: Grammars, operator: str
) -> None:
    for text in (
        f"start: A\nA: /a+/ {operator} /b/",
        f"start: A\nA: {operator}/b/",
        f'start: A\nA: "\\\\" {operator} "b"',
        f"start: A\nA: /a\\\\/{operator}/b/",
        f'start: A // "\nA: /a/ {operator} /b/ // "',
        f"start: %lark {{ start: A\nA: /a/ {operator} /b/\n}}",
    ):
        with pytest.raises(InvalidRequestError, match=f"operator {operator} is not") as caught:
            state_of(grammars, GrammarKind.LARK, text)
        assert caught.value.field == "field"
    for text in (
        f'start: "{operator}"',
        f'start: "\\"{operator}"',
        f"start: /{operator}/",
        f"start: /\\/{operator}/",
        f'start: "a" // {operator}\n',
        f'start: "a" # {operator}\n',
        f'start: %json {{"const": "{operator}"}}',
        'start: "a"~3 "b" ~ 2..4',
    ):
        assert tokens_of(state_of(grammars, GrammarKind.LARK, text).allowed([])[0])
