"""Single tokens as logprobs show them: text, bytes, and where the text of each begins."""

import json
from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from gateway.api.openai.writing.choices import CompletionChoice, Wants
from gateway.api.openai.writing.tokens import TextOffsets, TokenTexts
from gateway.messages.response import Chunk
from gateway.text.tokenizer import Tokenizer
from tandem.v1 import sampling_pb2
from tests.gateway.text.test_tokenizer import SENTENCEPIECE, byte_level, composing

THE, CAT, SAT = (
    SENTENCEPIECE._tokenizer.get_vocab()[f"\N{LOWER ONE EIGHTH BLOCK}{word}"]
    for word in ("the", "cat", "sat")
)
WITH_LOGPROBS = Wants(logprobs=True, token_ids=False, report=False)
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


def test_the_offset_of_a_token_within_a_character_is_the_characters(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT)
    offsets = TextOffsets(tokenizer.detokenizer()).next(token_ids, tokenizer.special_text)
    before = b""
    for token_id, offset in zip(token_ids, offsets, strict=True):
        assert offset == len(before.decode(errors="ignore"))
        before += tokenizer.token_bytes(token_id)


def chunk_of(
    token_ids: Sequence[int], text: str, prompt_token_ids: Sequence[int | None] = ()
) -> Chunk:
    """One with the logprobs of its tokens and of some of the prompt; None: the first has none."""
    return Chunk(
        choice_index=0,
        offset=0,
        token_ids=token_ids,
        text=text,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_steps=1,
        logprobs=[encoded(each) for each in token_ids],
        prompt_logprobs=[b"" if each is None else encoded(each) for each in prompt_token_ids],
    )


def test_an_echos_logprobs_go_on_where_the_last_chunk_ended() -> None:
    choice = CompletionChoice(WITH_LOGPROBS, echoes=True, prompt=None)
    choice.start(TokenTexts(SENTENCEPIECE), [THE, CAT, SAT], "the cat sat")
    parts = [
        choice.read(chunk_of([], "", [None, CAT])),
        choice.read(chunk_of([], "", [SAT])),
        choice.read(chunk_of([THE], " the")),
    ]
    assert [part.text for part in parts] == ["the cat sat", "", " the"]
    shown = [each for part in parts for each in part.logprobs or ()]
    texts = [json.loads(each.token) for each in shown]
    assert texts == [" the", " cat", " sat", " the"]
    assert [each.logprob for each in shown] == ["null", "-0.5", "-0.5", "-0.5"]
    assert [each.offset for each in shown] == ["0", "3", "7", "11"]


@pytest.mark.parametrize(
    ("prompt", "offsets"), [("<|code|>x<|out|>", ["0", "8", "9"]), (None, ["0", "0", "1"])]
)
def test_an_echo_of_a_text_counts_its_special_tokens(
    tokenizer: Tokenizer, prompt: str | None, offsets: list[str]
) -> None:
    token_ids = tokenizer.encode("<|code|>x<|out|>")
    choice = CompletionChoice(WITH_LOGPROBS, echoes=True, prompt=prompt)
    choice.start(TokenTexts(tokenizer), token_ids, "x")
    part = choice.read(chunk_of([], "", [None, *token_ids[1:]]))
    assert part.text == (prompt or "x")
    assert [each.offset for each in part.logprobs or ()] == offsets


def stripping() -> Tokenizer:
    """A byte-level tokenizer with a special token that takes the white space behind it."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<user>", special=True, rstrip=True)])
    return Tokenizer(tokenizer)


def lengthening() -> Tokenizer:
    """A byte-level tokenizer that makes letters of ligatures (NFKC)."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    return Tokenizer(tokenizer)


ENDS_IN_REPLACEMENT = "the \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "decoded"),
    [
        (composing(), "e\u0301e\u0301 a", "éé a"),
        (stripping(), "<user>\n\nthe", "the"),
        (SENTENCEPIECE, "the</s>cat", "the cat"),
        (lengthening(), "\ufb01\ufb01", "fifi"),
        # A window of tokens holds it back, and the output's text begins with it.
        (SENTENCEPIECE, ENDS_IN_REPLACEMENT, ENDS_IN_REPLACEMENT),
    ],
)
def test_the_outputs_offsets_begin_behind_the_echo_whatever_the_tokenizer_made_of_it(
    tokenizer: Tokenizer, prompt: str, decoded: str
) -> None:
    prompt_ids = tokenizer.encode(prompt)
    assert tokenizer.decode(prompt_ids).strip() == decoded
    token_ids = tokenizer.encode("s a t")
    echoing = CompletionChoice(WITH_LOGPROBS, echoes=True, prompt=prompt)
    echoing.start(TokenTexts(tokenizer), prompt_ids, "")
    plain = CompletionChoice(WITH_LOGPROBS, echoes=False, prompt=None)
    plain.start(TokenTexts(tokenizer), prompt_ids, "")
    text = tokenizer.detokenizer(prompt_ids).feed(token_ids)
    first = echoing.read(chunk_of([], "", [None, *prompt_ids[1:-1]]))
    second = echoing.read(chunk_of(token_ids, text, prompt_ids[-1:]))
    assert first.text + second.text == prompt + text
    offsets = [int(each.offset) for part in (first, second) for each in part.logprobs or ()]
    assert offsets == sorted(offsets)
    assert offsets[len(prompt_ids) - 1] <= len(prompt)
    expected = [int(each.offset) for each in plain.read(chunk_of(token_ids, text)).logprobs or ()]
    assert offsets[len(prompt_ids) :] == [len(prompt) + offset for offset in expected]
    # The last tokens are whole characters.
    assert (first.text + second.text)[offsets[-1] :] == tokenizer.token_bytes(
        token_ids[-1]
    ).decode()


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


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    assert TokenTexts(None).text(7) == '"token_id:7"'
