"""Text that must come is that of the grammar, whatever the tokenizer makes of such a text."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tests.verifier.structured.compiled import END, TOKENIZER, state_of, tokens_of
from verifier.structured.grammar_state import GrammarState
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind

ID = 2048
VOCABULARY = ID + 8


def changed(folder: Path, **fields: Any) -> Path:
    """The bundled model's tokenizer with other fields."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(TOKENIZER.read_text()) | fields))
    return path


def with_token(folder: Path, content: str, *, is_special: bool) -> Path:
    tokens = json.loads(TOKENIZER.read_text())["added_tokens"]
    token = {"id": ID, "content": content, "special": is_special, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return changed(folder, added_tokens=[*tokens, token])


def output_of(path: Path, kind: GrammarKind, text: str, *, drafts: bool) -> list[int]:
    """The last allowed token again and again, or all that must come as drafts."""
    grammars = Grammars(path, vocab_size=VOCABULARY, end_token_ids=[END])
    state = state_of(grammars, kind, text)
    output: list[int] = []
    while True:
        forced = state.forced(8) if drafts else []
        assert state.num_verifiable(forced) == len(forced)
        token_id = max(tokens_of(state.allowed(forced)[len(forced)]))
        output += forced
        if token_id == END:
            grammars.close()
            return output
        output.append(token_id)
        state.take_in(output, 0)


def text_of(path: Path, token_ids: list[int]) -> str:
    text: str = Tokenizer.from_file(str(path)).decode(token_ids, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("content", ["<td>", "</s>", "<tool_call>", "[x]", "\n\n", "hello"])
def test_text_that_is_an_added_token_comes(
    tmp_path: Path, content: str, is_special: bool, drafts: bool
) -> None:
    path = with_token(tmp_path, content, is_special=is_special)
    whole = f"a{content}b"
    output = output_of(path, GrammarKind.CHOICES, json.dumps([whole]), drafts=drafts)
    assert text_of(path, output) == whole
    schema = json.dumps({"const": whole})
    output = output_of(path, GrammarKind.JSON_SCHEMA, schema, drafts=drafts)
    assert json.loads(text_of(path, output)) == whole


@pytest.mark.parametrize("drafts", [False, True])
def test_text_that_is_a_special_token_of_the_bundled_model_comes(drafts: bool) -> None:
    choices = json.dumps(["a<|out|>b"])
    output = output_of(TOKENIZER, GrammarKind.CHOICES, choices, drafts=drafts)
    assert text_of(TOKENIZER, output) == "a<|out|>b"
    special = Tokenizer.from_file(str(TOKENIZER)).token_to_id("<|out|>")
    assert special not in output


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    "normalizer",
    [{"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}],
)
def test_text_whose_characters_are_not_composed_comes(
    tmp_path: Path, normalizer: Any, drafts: bool
) -> None:
    path = changed(tmp_path, normalizer=normalizer)
    text = "cafe\u0301 x"
    output = output_of(path, GrammarKind.CHOICES, json.dumps([text]), drafts=drafts)
    assert text_of(path, output) == text


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
def test_text_comes_where_the_tokenizer_puts_a_space_before_it(
    tmp_path: Path, is_nested: bool, drafts: bool
) -> None:
    spacing: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    if is_nested:
        spacing = {"type": "Sequence", "pretokenizers": [spacing]}
    path = changed(tmp_path, pre_tokenizer=spacing)
    assert text_of(path, Tokenizer.from_file(str(path)).encode("hello").ids) == " hello"
    output = output_of(path, GrammarKind.CHOICES, json.dumps(["hello world"]), drafts=drafts)
    assert text_of(path, output) == "hello world"


def test_text_that_is_an_added_token_of_unigram_comes(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("<end>", 0.0), ("<td>", 0.0), ("\u2581", -1.0)]
    pieces += [(each, -2.0) for each in "abcdt<>"]
    path = tmp_path / "tokenizer.json"
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 2, "content": "<td>", **token}],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }
    path.write_text(json.dumps(tokenizer))
    grammars = Grammars(path, vocab_size=len(pieces), end_token_ids=[1])
    state = state_of(grammars, GrammarKind.CHOICES, json.dumps(["a<td>b"]))
    output: list[int] = []
    while (token_id := max(tokens_of(state.allowed([])[0]))) != 1:
        output.append(token_id)
        state.take_in(output, 0)
    assert [pieces[each][0] for each in output] == ["a", "<", "t", "d", ">", "b"]
    grammars.close()


class Refusing:
    """Stands in for a matcher that forces token 2 and does not take it."""

    def is_error(self) -> bool:
        return False

    def compute_ff_bytes(self) -> bytes:
        return b"text"

    def compute_ff_tokens(self) -> list[int]:
        return [2]

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        return 0


@pytest.mark.stand_in
@pytest.mark.parametrize("end_token_id", [1, 2])
def test_a_draft_that_is_forced_and_refused_is_not_verified(end_token_id: int) -> None:
    """Else the row after it would allow nothing, and the first token of all would come."""
    state = GrammarState(
        *(cast(LLMatcher, Refusing()) for _ in range(2)),
        may_begin=lambda *_: True,
        vocab_size=32,
        end_token_ids=[end_token_id],
        field="field",
    )
    # After an end token nothing may come, and nothing does.
    assert state.num_verifiable([2]) == int(end_token_id == 2)
    assert np.array_equal(state.allowed([]), [[1 << 2]])
