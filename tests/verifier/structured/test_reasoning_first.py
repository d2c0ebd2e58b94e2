"""A grammar whose text comes behind a model's reasoning."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tandem.values import ReasoningTags
from verifier.errors import InvalidRequestError
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind

TOKENIZER = Path(__file__).parents[3] / "examples" / "demo_model" / "model" / "tokenizer.json"
END_TOKEN = 0
OPEN, OPTIONAL = ReasoningTags(end="</think>"), ReasoningTags(begin="<think>", end="</think>")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANSWERS = {
    GrammarKind.JSON_SCHEMA: (json.dumps(SCHEMA), '{"a": 12}'),
    GrammarKind.REGEX: ("ab+", "abb"),
    GrammarKind.CHOICES: ('["x", "yz"]', "yz"),
    GrammarKind.LARK: ('start: "x" rest\nrest: "z"', "xz"),
}


class Accepting:
    """Which texts the outputs of a tokenizer may be."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._grammars = Grammars(
            path, vocab_size=self._tokenizer.get_vocab_size(), end_token_ids=[END_TOKEN]
        )

    def accepts(self, kind: GrammarKind, reasoning: ReasoningTags, text: str) -> bool:
        grammar = Grammar(kind, ANSWERS[kind][0], "field", reasoning)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._grammars.compile(grammar).result(timeout=60)
        try:
            # An output that a client has already: any tokens of its text will do.
            state = self._grammars.compile(grammar, token_ids).result(timeout=60)
        except InvalidRequestError:
            return False
        return bool(state.allowed(())[0, END_TOKEN // 32] >> END_TOKEN % 32 & 1)

    def close(self) -> None:
        self._grammars.close()


@pytest.fixture(scope="module", params=[(), ("</think>",), ("<think>", "</think>")])
def accepting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Accepting]:
    """With tags that are text, or tokens of their own."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_tokens(list(request.param))
    path = tmp_path_factory.mktemp("tags") / "tokenizer.json"
    tokenizer.save(str(path))
    accepting = Accepting(path)
    yield accepting
    accepting.close()


@pytest.mark.parametrize("kind", GrammarKind)
@pytest.mark.parametrize("thought", ["", "Hm.\n", 'é { "a" < </th', "< think> x"])
@pytest.mark.parametrize("space", ["", "\n\n"])
def test_the_text_comes_behind_the_reasoning(
    accepting: Accepting, kind: GrammarKind, thought: str, space: str
) -> None:
    answer = ANSWERS[kind][1]
    text = f"{thought}</think>{space}{answer}"
    assert accepting.accepts(kind, OPEN, text)
    assert not accepting.accepts(kind, OPEN, f"{text}x")
    assert not accepting.accepts(kind, OPEN, f"{thought}</think>{space}")
    assert not accepting.accepts(kind, OPEN, f"{thought}</think>{space}</think>{answer}")
    assert accepting.accepts(kind, OPTIONAL, f"<think>{text}")


@pytest.mark.parametrize("kind", GrammarKind)
def test_reasoning_that_has_begun_must_end_and_other_may_be_left_out(
    accepting: Accepting, kind: GrammarKind
) -> None:
    answer = ANSWERS[kind][1]
    assert accepting.accepts(kind, OPTIONAL, answer)
    assert not accepting.accepts(kind, OPEN, answer)
    assert not accepting.accepts(kind, OPTIONAL, f"<think>{answer}")
    assert not accepting.accepts(kind, OPTIONAL, f"Hm.</think>{answer}")
