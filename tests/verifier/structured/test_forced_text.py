"""Text that must come: the same tokens in every way, and no more than is bounded."""

import contextlib
import json
import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.verifier.structured.compiled import END, TOKENIZER, state_of, tokens_of
from verifier.errors import InvalidRequestError
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind


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
