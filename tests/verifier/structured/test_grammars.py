"""Grammars: which tokens they allow, against brute force; what is refused; what is bounded."""

import contextlib
import gc
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.volume import cases
from verifier.errors import InvalidRequestError, OverloadedError, UnsupportedFieldError
from verifier.structured import grammars as module
from verifier.structured import library_grammar, waiting_jobs
from verifier.structured.grammar import Grammar
from verifier.structured.grammar_state import GrammarState
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind

TOKENIZER = Path(__file__).parents[3] / "examples" / "demo_model" / "model" / "tokenizer.json"
VOCABULARY = 2048
END = 0
CHOICES = ["yes", "yesterday", "no", "not at all", "naïve", "東京", ""]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[END])


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


def state_of(grammars: Grammars, kind: GrammarKind, text: str) -> GrammarState:
    return grammars.compile(Grammar(kind, text, "field")).result(timeout=60)


def tokens_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


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


def test_drafts_are_cut_before_the_first_that_is_forbidden(grammars: Grammars) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    state = state_of(grammars, GrammarKind.REGEX, "ab*c")
    a, b, c = (tokenizer.encode(each).ids[0] for each in "abc")
    assert state.num_possible([a, b, b, a, c]) == 3
    assert state.num_possible([c]) == 0
    assert state.num_possible([]) == 0
    masks = state.allowed([a, b, b, a, c])
    assert c in tokens_of(masks[3])
    assert not masks[4:].any(), "rows after a forbidden draft have no meaning"
    state.take_in([a, b, c], 0)
    assert tokens_of(state.allowed([])[0]) == {END}


def test_text_without_a_choice_is_forced(grammars: Grammars) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    text = '{"total": '
    state = state_of(grammars, GrammarKind.REGEX, '\\{"total": (1|2)\\}')
    forced = state.forced(32)
    assert forced
    assert text.startswith(tokenizer.decode(forced))
    assert state.num_possible(forced) == len(forced)
    assert state.forced(1) == forced[:1]
    assert state.forced(0) == []
    free = state_of(grammars, GrammarKind.REGEX, "[a-z]+")
    assert free.forced(32) == []


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


def test_what_the_library_says_in_its_own_names_is_told_in_words(grammars: Grammars) -> None:
    for text, reason in (
        ("start: /[^\\s\\S]/", "it allows none of the model's tokens here"),
        ("start: <nonsense>", 'at 1(8): unknown special token: "<nonsense>"'),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            state_of(grammars, GrammarKind.LARK, text)
        assert caught.value.message == reason


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


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grammars, Tokenizer]:
    """A tokenizer that splits texts as Llama 3's and Qwen's, and writes `"'ts` as `" ' ts`, but
    `'ts`, the rest of it, as `' t s`: alone, that begins with a contraction.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: i for i, each in enumerate(["<end>", *alphabet, "ts"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "s")]))
    tokenizer.add_special_tokens(["<end>"])
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("uneven") / "tokenizer.json"
    tokenizer.save(str(path))
    return Grammars(path, vocab_size=len(vocabulary), end_token_ids=[END]), tokenizer


UNEVEN = Grammar(GrammarKind.LARK, """start: /[ab]/ "x\\"'ts." /[0-9]/""", "field")


@pytest.mark.parametrize("way", ["masks", "drafts", "likeliest", "resumed"])
def test_a_text_is_the_same_tokens_however_the_output_comes_to_it(
    uneven: tuple[Grammars, Tokenizer], way: str
) -> None:
    """Also where the tokenizer writes the rest of a text otherwise than in the whole text."""
    grammars, tokenizer = uneven
    ids = tokenizer.get_vocab()
    assert tokenizer.encode("x\"'ts.").tokens == ["x", '"', "'", "ts", "."]
    assert tokenizer.encode("'ts.").tokens == ["'", "t", "s", "."]
    output = [ids[each] for each in ("a", "x", '"', "'", "ts", ".")]
    for length in range(1, len(output)):
        given = output[:length] if way == "resumed" else []
        state = grammars.compile(UNEVEN, given).result(timeout=60)
        if way == "drafts":
            assert state.num_verifiable(output[:length]) == length
            assert tokens_of(state.allowed(output[:length])[-1]) == {output[length]}
            state.take_in(output[:length], 0)
        elif way != "resumed":
            for end in range(1, length + 1):
                if way == "masks":
                    assert output[end - 1] in tokens_of(state.allowed([])[0])
                else:
                    state._masks = state._no_masks
                    assert state.allows([output[end - 1]])
                state.take_in(output[:end], 0)
        if way == "likeliest":
            assert not state.allows([ids["t"]])
            assert state.allows([output[length]])
        assert tokens_of(state.allowed([])[0]) == {output[length]}


def test_a_client_may_resume_with_tokens_of_its_own_for_a_text(
    uneven: tuple[Grammars, Tokenizer],
) -> None:
    grammars, tokenizer = uneven
    ids = tokenizer.get_vocab()
    given = [ids[each] for each in ("a", "x", '"', "'", "t")]
    state = grammars.compile(UNEVEN, given).result(timeout=60)
    assert tokens_of(state.allowed([])[0]) == {ids["s"]}


def test_drafts_are_cut_where_the_grammar_is_too_complex_after_them(grammars: Grammars) -> None:
    """The output itself may never come to that place."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    draw = random.Random(8)
    grammar = 'start: "x" /(.*[ab].{50}c){2}/ | /[a-w]+/'
    state = state_of(grammars, GrammarKind.LARK, grammar)
    drafts = tokenizer.encode("x" + "".join(draw.choices("abcd ", k=1500))).ids
    assert 0 < state.num_verifiable(drafts) < len(drafts)
    # Nothing is drafted any more, and the output goes on.
    output: list[int] = []
    for letter in "abc":
        token_id = tokenizer.encode(letter).ids[0]
        assert token_id in tokens_of(state.allowed([])[0])
        output.append(token_id)
        state.take_in(output, 0)
        assert state.forced(8) == []
        assert state.num_possible([token_id]) == state.num_verifiable([token_id]) == 0
    assert state.error is None
    # Where the output itself comes to that place, it cannot go on.
    state = state_of(grammars, GrammarKind.LARK, grammar)
    for end in range(len(drafts)):
        state.take_in(drafts[:end], 0)
        with contextlib.suppress(InvalidRequestError):
            state.allowed([])
        if state.error is not None:
            break
    assert state.error is not None
    assert state.error.field == "field"


TOO_LONG = "(a{1000}){100}"


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_text_that_must_come_and_is_too_long_is_refused(
    grammars: Grammars, is_drafted: bool
) -> None:
    grammar = Grammar(GrammarKind.REGEX, TOO_LONG, "field")
    with pytest.raises(InvalidRequestError, match="more than 65536 bytes must come") as caught:
        grammars.compile(grammar, is_drafted=is_drafted).result(timeout=60)
    assert caught.value.field == "field"


def test_drafts_into_a_text_that_is_too_long_cost_no_token(grammars: Grammars) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    b, x = (tokenizer.encode(each).ids[0] for each in "bx")
    text = f'start: /b+/ ("x" long | /[yz]/)\nlong: a{{100}}\na: {json.dumps("a" * 1000)}'
    state = state_of(grammars, GrammarKind.LARK, text)
    assert state.num_verifiable([b, b, x]) == 2
    assert x in tokens_of(state.allowed([b, b])[2])
    # Nothing is drafted any more, and the output goes on.
    assert state.num_verifiable([b]) == state.num_possible([b]) == 0
    output = [b, b]
    state.take_in(output, 0)
    assert state.forced(8) == []
    assert x in tokens_of(state.allowed([])[0])
    state.take_in([*output, x], 0)
    for ask in (lambda: state.allowed([]), lambda: state.allows([b]), lambda: state.error):
        with pytest.raises(InvalidRequestError, match="must come"):
            ask()


def test_a_tokenizer_that_cannot_be_used_is_said_by_name(tmp_path: Path) -> None:
    for path, vocab_size in ((tmp_path / "none.json", VOCABULARY), (TOKENIZER, 100)):
        grammars = Grammars(path, vocab_size=vocab_size, end_token_ids=[END])
        with pytest.raises(UnsupportedFieldError) as caught:
            state_of(grammars, GrammarKind.REGEX, "a")
        assert caught.value.field == "field"
        grammars.close()


@contextlib.contextmanager
def held_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Grammars, threading.Event]]:
    """Its thread compiles the regex "held" until the event, or the end."""
    began, end = threading.Event(), threading.Event()
    compile_as_before = Grammars._compile

    def compile_held(self: Grammars, tokenizer: Any, job: Any) -> GrammarState:
        if job.grammar.text == "held":
            began.set()
            assert end.wait(60)
        return compile_as_before(self, tokenizer, job)

    monkeypatch.setattr(Grammars, "_compile", compile_held)
    grammars = Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[END])
    held = grammars.compile(Grammar(GrammarKind.REGEX, "held", "held field"))
    try:
        assert began.wait(60)
        yield grammars, end
    finally:
        end.set()
        with contextlib.suppress(InvalidRequestError):
            held.result(timeout=60)
        grammars.close()
        grammars._thread.join(60)


def test_only_so_many_grammars_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_jobs, "MAX_WAITING", 2)
    with held_thread(monkeypatch) as (grammars, end):
        waiting = [grammars.compile(Grammar(GrammarKind.REGEX, "a")) for _ in range(2)]
        with pytest.raises(OverloadedError) as caught:
            grammars.compile(Grammar(GrammarKind.REGEX, "a"))
        assert caught.value.retry_after_ms
        # One that is cancelled leaves its place.
        waiting[0].cancel()
        last = grammars.compile(Grammar(GrammarKind.REGEX, "b"))
        assert not last.done()
        end.set()
        last.result(timeout=60)
        waiting[1].result(timeout=60)


def test_no_more_is_compiled_than_may_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for room is not late, however long that takes."""
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.2)
    grammars = Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[END], max_num_states=2)
    states = [state_of(grammars, GrammarKind.REGEX, "a") for _ in range(2)]
    waiting = [grammars.compile(Grammar(GrammarKind.REGEX, "b"), tenant=t) for t in "xy"]
    # One more that could be compiled would be there by now.
    time.sleep(0.5)
    assert not any(each.running() or each.done() for each in waiting)
    states.pop()
    states.append(waiting.pop(0).result(timeout=60))
    time.sleep(0.2)
    assert not waiting[0].running()
    gc.disable()
    try:
        del states[0]
        states.append(waiting.pop(0).result(timeout=60))
        states.clear()
        while grammars._priorities:
            time.sleep(0.001)
    finally:
        gc.enable()
    grammars.close()


def test_tenants_take_turns_and_higher_priorities_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with held_thread(monkeypatch) as (grammars, end):
        done: list[str] = []

        def compile_for(tenant: str, name: str, priority: int = 0) -> "Future[GrammarState]":
            future = grammars.compile(
                Grammar(GrammarKind.REGEX, "a"), tenant=tenant, priority=priority
            )
            future.add_done_callback(lambda _: done.append(name))
            return future

        futures = [compile_for("a", f"a{n}") for n in range(4)]
        futures += [compile_for("b", "b0"), compile_for("b", "b1"), compile_for("c", "c0")]
        futures += [compile_for("c", "urgent", 1), compile_for("d", "low", -1)]
        end.set()
        for each in futures:
            each.result(timeout=60)
    # "c" had its turn with what is urgent.
    assert done == ["urgent", "a0", "b0", "c0", "a1", "b1", "a2", "a3", "low"]


def test_a_grammar_that_waits_for_others_for_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.1)
    with held_thread(monkeypatch) as (grammars, end):
        late = [grammars.compile(Grammar(GrammarKind.REGEX, "a", "late")) for _ in range(3)]
        time.sleep(0.2)
        end.set()
        for each in late:
            with pytest.raises(OverloadedError, match="grammars that came before") as caught:
                each.result(timeout=60)
            assert caught.value.field == "late"
            assert caught.value.retry_after_ms
        grammars.compile(Grammar(GrammarKind.REGEX, "a")).result(timeout=60)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_grammar_that_compiles_while_the_interpreter_ends_crashes_nothing(
    is_closed: bool,
) -> None:
    script = f"""
import json, time
from pathlib import Path
from verifier.structured import grammars as module
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind
# After which the end comes and crashes: on a busy machine, the compilation may take as long.
module._LAST_COMPILE_S = 50.0
class SlowEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)
slow_end = SlowEnd()
grammars = Grammars(Path({str(TOKENIZER)!r}), vocab_size={VOCABULARY}, end_token_ids=[{END}])
# A part of a second, most of it in the library.
text = json.dumps([f"{{i:015}}" for i in range(20_000)])
compiling = grammars.compile(Grammar(GrammarKind.CHOICES, text))
while not compiling.running():
    time.sleep(0.001)
time.sleep(0.05)
assert not compiling.done()
if {is_closed}:
    grammars.close()
    assert compiling.done()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


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


@pytest.mark.parametrize("text", ['\\"' * 32_000 + "\\", "/" + "\\/" * 32_000 + "\\"])
def test_a_text_that_ends_in_a_backslash_is_read_once(text: str) -> None:
    """What is not closed is taken as a whole: else a search begins at each quote."""
    text = f"start: {text}"
    found = list(library_grammar._LARK_TOKEN.finditer(text))
    assert len(found) == 1
    assert found[0].end() == len(text)


def test_it_reports_what_was_compiled_and_what_was_refused() -> None:
    reported: list[tuple[GrammarKind, bool]] = []
    started_at_s = time.monotonic()

    def report(kind: GrammarKind, can_be_used: bool, duration_s: float) -> None:
        assert 0 < duration_s < time.monotonic() - started_at_s
        reported.append((kind, can_be_used))

    grammars = Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[END], on_compiled=report)
    grammars.compile(Grammar(GrammarKind.REGEX, "a")).result(timeout=60)
    with pytest.raises(InvalidRequestError):
        grammars.compile(Grammar(GrammarKind.LARK, "start: (")).result(timeout=60)
    assert reported == [(GrammarKind.REGEX, True), (GrammarKind.LARK, False)]
    grammars.close()
