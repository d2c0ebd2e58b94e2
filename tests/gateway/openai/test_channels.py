"""Messages in channels are told apart, however the text is cut in pieces."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from gateway.text.model_text import ModelText
from gateway.text.output.channel_reader import TAGS, ChannelReader
from gateway.text.output.parts import Piece, Read, Reading, ReasoningText
from gateway.text.output.stop_strings import StopStrings
from gateway.text.output.tool_call_reader import CallDelta
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai.clients import post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import ScriptedVerifier
from tests.gateway.text.output_pieces import merged, reads_of

READING = Reading(has_channels=True, tools={"add": {}, "now": {}})
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm <b> x."
FINAL = "<|start|>assistant<|channel|>final<|message|>"
HM = ReasoningText("Hm <b> x.")
TEXTS = [
    (f"{THOUGHT}<|end|>{FINAL}Yes.", [HM, "Yes."]),
    (f"{THOUGHT}<|end|>{FINAL}Yes <|en or <|.<|return|>", [HM, "Yes <|en or <|."]),
    # A call, and how else the recipient is told.
    (f'{CALL}{{"x": 1}}<|call|>', [CallDelta("add", '{"x": 1}')]),
    (f'{CALL}{{"x": "<|a <"}}', [CallDelta("add", '{"x": "<|a <"}')]),
    (
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"y": 2}<|call|>',
        [CallDelta("now", '{"y": 2}')],
    ),
    (' to=now<|channel|>commentary<|message|>{"y": 2}', [CallDelta("now", '{"y": 2}')]),
    (
        f'{THOUGHT}<|end|><|start|>assistant{CALL}{{"x": 1}}<|call|><|start|>assistant'
        f"{CALL}{{}}<|call|>",
        [HM, CallDelta("add", '{"x": 1}'), CallDelta("add", "{}")],
    ),
    # Words to the user before it.
    (
        f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{CALL}{{}}",
        ["I add.", CallDelta("add", "{}")],
    ),
    # A text that ends by another header.
    (f"{THOUGHT}<|channel|>final<|message|>Yes.", [HM, "Yes."]),
    (f"{THOUGHT}{FINAL}Yes.", [HM, "Yes."]),
    # Arguments with mistakes, none, and cut ones.
    (f'{CALL}{{"x": 1<|call|>', [CallDelta("add", '{"x": 1}')]),
    (f'{CALL}{{"x": "a', [CallDelta("add", '{"x": "a')]),
    (f"{CALL} <|call|>", [CallDelta("add", "{}")]),
    (f"{CALL}", []),
    # What is no call of a given tool is nothing for users either.
    (f"{CALL}import os", [ReasoningText("import os")]),
    (CALL.replace("add", "rm") + "{}<|call|>", [ReasoningText("{}")]),
    (f"<|channel|>analysis to=python<|message|>1<|call|>{FINAL}2", [ReasoningText("1"), "2"]),
    # No header at all.
    ('{"x": 1}', ['{"x": 1}']),
    ("to", ["to"]),
    ("today", ["today"]),
    ("<b>", ["<b>"]),
    ("", []),
    (THOUGHT[:12], []),
]


def read_all(
    pieces: Sequence[str], reading: Reading = READING, stops: Sequence[str] = ()
) -> tuple[ChannelReader, list[Read]]:
    reader = ChannelReader(reading, StopStrings(stops))
    return reader, reads_of(reader, pieces)


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_a_text_is_read_whole_and_character_by_character(text: str, expected: list[Piece]) -> None:
    for pieces in ([text], list(text)):
        reader, reads = read_all(pieces)
        assert merged(reads) == expected
        assert reader.num_held == 0


@given(
    st.lists(st.sampled_from([text for text, _ in TEXTS] + list(TAGS) + [" ", "a"]), max_size=4),
    st.lists(st.integers(0, 1000), max_size=12),
)
def test_pieces_are_read_as_the_whole_text_is(texts: list[str], cuts: list[int]) -> None:
    text = "".join(texts)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert merged(read_all(pieces)[1]) == merged(read_all([text])[1])


def test_stop_strings_count_in_the_answer_alone() -> None:
    text = f'{THOUGHT} STOP<|end|><|start|>assistant{CALL}{{"x": "STOP"}}<|call|>{FINAL}a STOP b'
    for pieces in ([text], list(text)):
        reader, reads = read_all(pieces, stops=["STOP"])
        assert reader.stopped
        assert merged(reads) == [
            ReasoningText("Hm <b> x. STOP"), CallDelta("add", '{"x": "STOP"}'), "a ",
        ]  # fmt: skip


def test_without_tools_calls_are_hidden() -> None:
    reading = Reading(has_channels=True)
    assert merged(read_all([f"{CALL}{{}}<|call|>"], reading)[1]) == [ReasoningText("{}")]


TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|> #}"
)
ALL_TAGS = [*TAGS, "<|return|>", "<|call|>"]


@pytest.fixture
async def verifier(start_verifier: StartVerifier) -> ScriptedVerifier:
    return await start_verifier(vocab_size=2060)


@pytest.mark.stand_in
async def test_channels_are_the_parts_of_an_answer_over_http(
    start_api: StartApi, verifier: ScriptedVerifier, chat_folder: Path
) -> None:
    file = chat_folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(ALL_TAGS)
    file.unlink()  # a link
    file.write_text(tokenizer.to_str())
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    text = f"{THOUGHT}<|end|>{FINAL}I add.<|end|><|start|>assistant{CALL}{{}}"
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    verifier.play(lambda opened: [*token_ids, 0])
    running = await start_api(stream_interval_s=0)
    given: dict[str, Any] = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Add."}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    answer = await post(running, "/v1/chat/completions", given)
    whole: Any = ChatCompletion.model_validate_json(answer.body)
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning_content, choice.message.content) == (HM.text, "I add.")
    assert [call.function.name for call in choice.message.tool_calls or []] == ["add"]
    tokens = [tokenizer.id_to_token(token_id) for token_id in token_ids]
    num_tokens = tokens.index("<|end|>") - tokens.index("<|message|>") + 1
    assert whole.usage.completion_tokens_details.reasoning_tokens == num_tokens


def test_only_templates_with_channels_teach_them(chat_folder: Path) -> None:
    assert not ModelText.load(chat_folder).has_channels
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert ModelText.load(chat_folder).has_channels
    assert not ModelText.load(chat_folder, reasoning="none").has_channels
