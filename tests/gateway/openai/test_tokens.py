"""Single tokens as logprobs show them: text, bytes, and where the text of each begins."""

import json
import math

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from gateway.api.openai.tokens import TextOffsets, TokenTexts
from gateway.text.tokenizer import Tokenizer
from tandem.v1 import sampling_pb2

TEXT = "naïve 日本 🙂<|end|>x"


def encoded(token_id: int, *top: int, logprob: float = -0.5) -> bytes:
    return sampling_pb2.TokenLogprob(
        token_id=token_id,
        logprob=logprob,
        top=[sampling_pb2.TokenLogprob(token_id=each, logprob=-0.25) for each in top],
    ).SerializeToString()


def test_the_bytes_of_all_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    token_ids = tokenizer.encode(TEXT)
    entries = [json.loads(texts.chat_logprob(encoded(token_id))) for token_id in token_ids]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == TEXT.encode()
    for entry in entries:
        assert "\N{REPLACEMENT CHARACTER}" not in entry["token"]
        if entry["token"].startswith("bytes:"):
            escaped = "".join(f"\\x{byte:02x}" for byte in entry["bytes"])
            assert entry["token"] == f"bytes:{escaped}"
        else:
            assert entry["token"].encode() == bytes(entry["bytes"])
    assert any(entry["token"].startswith("bytes:") for entry in entries)
    assert "<|end|>" in [entry["token"] for entry in entries]


def test_a_vocabulary_with_byte_fallback_shows_spaces_and_bytes() -> None:
    vocabulary = [("<unk>", 0.0), ("\N{LOWER ONE EIGHTH BLOCK}a", -1.0), ("<0xE2>", -2.0)]
    wrapped = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    wrapped.normalizer = normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}")
    wrapped.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(wrapped)
    assert tokenizer.token_bytes(1) == b" a"
    assert tokenizer.token_bytes(2) == b"\xe2"
    assert tokenizer.token_bytes(99) == b""
    assert TokenTexts(tokenizer).text(2) == '"bytes:\\\\xe2"'


def test_the_offset_of_a_token_within_a_character_is_the_characters(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT)
    offsets = TextOffsets(tokenizer.detokenizer()).next(token_ids, tokenizer.special_text)
    before = b""
    for token_id, offset in zip(token_ids, offsets, strict=True):
        assert offset == len(before.decode(errors="ignore"))
        before += tokenizer.token_bytes(token_id)


def test_the_token_itself_is_always_among_a_completions_alternatives(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    shown = texts.completion_logprob(encoded(300, 301, 302), 7)
    assert json.loads(shown.top) == {
        json.loads(texts.text(301)): -0.25,
        json.loads(texts.text(302)): -0.25,
        json.loads(texts.text(300)): -0.5,
    }
    assert (shown.logprob, shown.offset) == ("-0.5", "7")


def test_of_tokens_with_one_text_the_own_logprob_counts_and_then_the_likeliest() -> None:
    vocabulary = [("<unk>", 0.0), ("A", -1.0), ("<0x41>", -2.0), ("B", -3.0), ("<0x42>", -4.0)]
    wrapped = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    wrapped.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    message = sampling_pb2.TokenLogprob(token_id=1, logprob=-0.01)
    for token_id, logprob in ((1, -0.01), (3, -3.0), (2, -5.0), (4, -7.0)):
        message.top.add(token_id=token_id, logprob=logprob)
    shown = TokenTexts(Tokenizer(wrapped)).completion_logprob(message.SerializeToString(), 0)
    top = json.loads(shown.top)
    assert top == {"A": pytest.approx(-0.01), "B": pytest.approx(-3.0)}
    assert float(shown.logprob) == pytest.approx(top["A"])


def test_an_impossible_token_has_a_number_that_json_knows(tokenizer: Tokenizer) -> None:
    shown = TokenTexts(tokenizer).chat_logprob(encoded(300, logprob=-math.inf))
    assert json.loads(shown)["logprob"] == -9999.0


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    assert TokenTexts(None).text(7) == '"token_id:7"'
