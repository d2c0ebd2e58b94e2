"""Tokens to text and back: a stream gives the text of the whole, and no broken characters."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from gateway.text.detokenizer import REPLACEMENT, Detokenizer, WindowDetokenizer
from gateway.text.tokenizer import (
    Tokenizer,
    TokenizerLoadError,
    TooManyTokensError,
)

MODEL_FOLDER = Path(__file__).parents[3] / "examples" / "demo_model" / "model"
BUNDLED = Tokenizer.load(MODEL_FOLDER)


def sentencepiece_like() -> Tokenizer:
    """A tokenizer with leading spaces and byte fallback, as SentencePiece models have."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words += ["▁the", "▁cat", "s", "▁sat", "e", "h", "t", "a", "c"]
    vocab = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(tokenizer)


SENTENCEPIECE = sentencepiece_like()


def metaspace(prepend_scheme: str) -> Tokenizer:
    """A tokenizer whose pre-tokenizer and decoder are Metaspace, as newer SentencePiece models'."""
    words = ["<unk>", "▁", "▁the", "▁cat", "s", "▁sat", "e", "h", "t", "a", "c"]
    model = models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(tokenizer)


METASPACE = [metaspace("always"), metaspace("first"), metaspace("never")]


def byte_level() -> tokenizers.Tokenizer:
    """A tokenizer that makes a token of each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("others", [[], [decoders.Fuse()]])
def test_a_byte_level_decoder_may_stand_in_a_sequence(others: list[decoders.Decoder]) -> None:
    wrapped = byte_level()
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel(), *others])
    tokenizer = Tokenizer(wrapped)
    assert tokenizer.max_bytes(5) == Tokenizer(byte_level()).max_bytes(5) is not None
    ids = tokenizer.encode(" é")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " é".encode()
    assert "".join(streamed(tokenizer.detokenizer(), [[i] for i in ids])) == " é"


def byte_level_with_added_tokens() -> Tokenizer:
    """A byte-level tokenizer with added tokens that are ordinary text."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool call>", "naïve", "日本"])
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(tokenizer)


ADDED = byte_level_with_added_tokens()


def streamed(detokenizer: Detokenizer, pieces: list[list[int]]) -> list[str]:
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.finish()]


@given(ids=st.lists(st.integers(0, 2047), max_size=40), step=st.integers(1, 7))
def test_any_tokens_stream_to_the_text_of_the_whole(ids: list[int], step: int) -> None:
    pieces = [ids[start : start + step] for start in range(0, len(ids), step)]
    assert "".join(streamed(BUNDLED.detokenizer(), pieces)) == BUNDLED.decode(ids)


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, *METASPACE])
@given(data=st.data())
def test_the_text_is_the_same_however_many_tokens_a_step_brings(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Also of bytes that are no text, beside characters that are written as bytes."""
    size = tokenizer._tokenizer.get_vocab_size()
    ids: list[int] = []
    for part in data.draw(
        st.lists(st.integers(0, size - 1) | st.sampled_from("日é😀 "), max_size=20)
    ):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part)
    step = data.draw(st.integers(2, 70))
    pieces = [ids[start : start + step] for start in range(0, len(ids), step)]
    one_by_one = streamed(tokenizer.detokenizer(), [[token_id] for token_id in ids])
    assert "".join(streamed(tokenizer.detokenizer(), pieces)) == "".join(one_by_one)


@pytest.mark.parametrize("tokenizer", [BUNDLED, ADDED, SENTENCEPIECE])
@given(text=st.text(max_size=20))
def test_a_split_character_is_never_shown_broken(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    ids = tokenizer.encode(text)
    parts = streamed(tokenizer.detokenizer(), [[token_id] for token_id in ids])
    assert not any(REPLACEMENT in part for part in parts)
    assert "".join(parts) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BUNDLED, ADDED, SENTENCEPIECE, *METASPACE])
@given(
    prompt=st.text(alphabet="the cats at日é\n", min_size=1, max_size=20),
    text=st.text(alphabet="the cats at日é\n", max_size=20),
    step=st.integers(1, 200),
)
def test_prompt_text_and_output_text_make_the_text_of_both(
    tokenizer: Tokenizer, prompt: str, text: str, step: int
) -> None:
    context, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    pieces = [ids[start : start + step] for start in range(0, len(ids), step)]
    shown = "".join(streamed(tokenizer.detokenizer(context), pieces))
    assert tokenizer.decode(context) + shown == tokenizer.decode(context + ids)


def as_sentencepiece(tokens: Sequence[str]) -> str:
    """The text that SentencePiece makes of pieces: in a run of bytes, each that is part of no
    character becomes one U+FFFD.
    """
    text, run = "", b""
    for token in [*tokens, ""]:
        if token.startswith("<0x"):
            run += bytes.fromhex(token[3:5])
            continue
        while run:
            sizes = [n for n in range(1, 5) if is_character(run[:n])]
            text += run[: sizes[0]].decode() if sizes else REPLACEMENT
            run = run[sizes[0] if sizes else 1 :]
        text += token.replace("▁", " ")
    return text.removeprefix(" ") if tokens and tokens[0].startswith("▁") else text


def is_character(run: bytes) -> bool:
    try:
        return len(run.decode()) == 1
    except UnicodeDecodeError:
        return False


TOKENS = ["▁the", "a", "▁", *(f"<0x{byte:02X}>" for byte in (0x41, 0xE2, 0x82, 0xAC, 0xF0, 0xFF))]


@given(st.lists(st.sampled_from(TOKENS), max_size=12), st.integers(1, 13))
@example(["<0xE2>", "<0x82>", "▁the"], 1)
@example(["▁the", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>"], 1)
def test_a_byte_that_is_part_of_no_character_leaves_those_beside_it_alone(
    tokens: list[str], step: int
) -> None:
    vocabulary = SENTENCEPIECE._tokenizer.get_vocab()
    ids = [vocabulary[token] for token in tokens]
    pieces = [ids[first : first + step] for first in range(0, len(ids), step)]
    shown = streamed(SENTENCEPIECE.detokenizer(), pieces)
    assert "".join(shown) == SENTENCEPIECE.decode(ids) == as_sentencepiece(tokens)


@given(text=st.text(max_size=50))
@example(text="<tool call>" * 9)
# The sign for kelvin: three bytes, composed one.
@example(text="\u212a" * 9)
def test_a_text_has_no_more_bytes_than_its_tokens_can_hold(text: str) -> None:
    for tokenizer in (BUNDLED, ADDED, composing()):
        max_bytes = tokenizer.max_bytes(len(tokenizer.encode(text)))
        assert max_bytes is not None
        assert len(text.encode()) <= max_bytes


def composing() -> Tokenizer:
    """A byte-level tokenizer that composes characters first (NFC)."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return Tokenizer(tokenizer)


def test_a_tokenizer_that_drops_text_has_no_byte_limit() -> None:
    assert SENTENCEPIECE.max_bytes(1) is None
    for dropping in (
        {"normalizer": normalizers.Strip()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"model": models.BPE({"a": 0}, [])},
    ):
        tokenizer = byte_level_with_added_tokens()._tokenizer
        for part, value in dropping.items():
            setattr(tokenizer, part, value)
        assert Tokenizer(tokenizer).max_bytes(1) is None
    tokenizer = byte_level_with_added_tokens()._tokenizer
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(tokenizer).max_bytes(1) is None


def test_tokens_over_the_limit_are_counted_and_not_listed() -> None:
    num_tokens = len(BUNDLED.encode("x y z"))
    assert len(BUNDLED.encode("x y z", max_tokens=num_tokens)) == num_tokens
    with pytest.raises(TooManyTokensError) as caught:
        BUNDLED.encode("x y z", max_tokens=num_tokens - 1)
    assert caught.value.num_tokens == num_tokens


class CountedLibrary:
    """The library's tokenizer; knows how much it was given to encode."""

    def __init__(self, wrapped: tokenizers.Tokenizer) -> None:
        self._wrapped = wrapped
        self.num_bytes: list[int] = []

    def encode_batch_fast(
        self, texts: list[str], *, add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        self.num_bytes += [len(text.encode()) for text in texts]
        return self._wrapped.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def with_a_long_token() -> tuple[Tokenizer, CountedLibrary]:
    """The bundled model's with a token of 128 bytes, and what counts its work."""
    wrapped = tokenizers.Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    wrapped.add_tokens(["-" * 128])
    tokenizer, library = Tokenizer(wrapped), CountedLibrary(wrapped)
    tokenizer._tokenizer = library  # type: ignore[assignment]
    return tokenizer, library


@pytest.mark.parametrize("unit", ["\n.1", "a", "\N{GRINNING FACE}", "\u4e00\u4e01", "x = 1\n"])
@pytest.mark.parametrize("max_tokens", [100, 131_071])
def test_of_a_text_that_is_much_too_long_only_a_part_is_encoded(unit: str, max_tokens: int) -> None:
    tokenizer, library = with_a_long_token()
    assert tokenizer.max_bytes(1) == 128, "length alone refuses no text of 131,071 tokens"
    text = unit * (4_194_304 // len(unit.encode()))
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode(text, max_tokens=max_tokens)
    assert sum(library.num_bytes) <= 1_048_576
    assert max(library.num_bytes) <= 262_144
    # What is said of it is true.
    part = text.encode()[: sum(library.num_bytes)].decode()
    assert max_tokens < caught.value.num_tokens <= len(BUNDLED.encode(part))
    assert not caught.value.is_exact


@pytest.mark.parametrize("unit", ["-", " ", "#"])
def test_a_long_text_of_few_tokens_is_encoded(unit: str) -> None:
    text = unit * 1_100_000
    tokenizer, library = with_a_long_token()
    expected = tokenizer.encode(text)
    assert len(expected) < len(text) / 15
    library.num_bytes.clear()
    assert tokenizer.encode(text, max_tokens=len(expected)) == expected
    # In pieces first, then whole.
    *pieces, whole = library.num_bytes
    assert sum(pieces) == whole == len(text)


@pytest.mark.parametrize("token", ["</s>", "the"], ids=["without text", "with text"])
@pytest.mark.parametrize("step", [1, 100])
def test_the_work_per_token_does_not_grow_with_the_output(token: str, step: int) -> None:
    num_decoded: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        num_decoded.append(len(token_ids))
        return SENTENCEPIECE.decode(token_ids)

    (token_id,) = SENTENCEPIECE.encode(token)[-1:]
    detokenizer = WindowDetokenizer(decode)
    for _ in range(400 // step):
        detokenizer.feed([token_id] * step)
    assert max(num_decoded) <= 128 + 8


def test_special_tokens_of_a_prompt_are_recognised_and_none_are_added() -> None:
    assert BUNDLED.encode("<|code|>x<|out|>") == [1, *BUNDLED.encode("x"), 4]
    # A chat template writes the token with which a model wants its text to begin.
    beginning = byte_level_with_added_tokens()._tokenizer
    special = ("<eos>", beginning.token_to_id("<eos>"))
    beginning.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[special]
    )
    assert beginning.encode("x").tokens == ["<eos>", "x"]
    assert Tokenizer(beginning).encode("x") == ADDED.encode("x")


@pytest.mark.parametrize("normalized", [False, True])
def test_a_special_token_that_the_normalizer_changes_has_no_text(normalized: bool) -> None:
    wrapped = tokenizers.Tokenizer.from_str(sentencepiece_like()._tokenizer.to_str())
    wrapped.add_special_tokens([AddedToken("<end>", special=True, normalized=normalized)])
    # As a file is loaded.
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(wrapped.to_str()))
    vocabulary = wrapped.get_vocab()
    end, the = vocabulary["<end>"], vocabulary["▁the"]
    assert tokenizer.decode([the, end, the, end]) == "the the"
    detokenizer = tokenizer.detokenizer([the])
    assert [detokenizer.feed([token_id]) for token_id in (end, the, end)] == ["", " the", ""]
    assert tokenizer.token_bytes(end) == b"<end>"


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_what_a_training_left_in_the_file_does_not_change_prompts(
    tmp_path: Path, setting: str
) -> None:
    model = tokenizers.Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    if setting == "truncation":
        model.enable_truncation(2)
    else:
        model.enable_padding(length=64)
    assert len(model.encode("a b c d e f")) in (2, 64)
    model.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("a b c d e f") == BUNDLED.encode("a b c d e f")


def test_a_special_token_that_is_to_be_shown_has_a_text(tmp_path: Path) -> None:
    content = json.loads((MODEL_FOLDER / "tokenizer.json").read_text())
    tags = ["<tool_call>", "</tool_call>", "<other>"]
    # In the places of ids that the vocabulary has already, as its other added tokens.
    model = tokenizers.Tokenizer.from_str(json.dumps(content))
    model.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    model.save(str(tmp_path / "tokenizer.json"))
    hidden, shown = Tokenizer.load(tmp_path), Tokenizer.load(tmp_path, shown=tags[:2])
    text = "<tool_call>{}</tool_call><other>"
    ids = shown.encode(text)
    assert (len(ids), hidden.encode(text)) == (len(hidden.encode("{}")) + 3, ids)
    for tokenizer, expected in ((hidden, "{}"), (shown, "<tool_call>{}</tool_call>")):
        assert tokenizer.decode(ids) == expected
        assert tokenizer.detokenizer().feed(ids) == expected
    assert shown.digest == hidden.digest


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerLoadError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_changes_what_byte_level_makes_is_asked_for_the_text() -> None:
    wrapped = byte_level()
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(wrapped)
    ids = tokenizer.encode(" é")
    assert "".join(streamed(tokenizer.detokenizer(), [[i] for i in ids])) == "é"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    detokenizer = BUNDLED.detokenizer()
    x = BUNDLED.encode("x")
    assert detokenizer.feed([1, *x, 0, 151_000, *x]) == "xx"
