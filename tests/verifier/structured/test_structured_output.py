"""Structured output through the verifier's service, with the bundled model: every complete output
parses, tokens are the same with and without drafts, and nobody else notices.
"""

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from servicekit.errors import code_number
from tandem.v1 import sampling_pb2
from tandem.v1 import verifier_pb2 as pb
from tests.verifier.opens import PROMPT, make_open
from tests.verifier.running_verifier import (
    PATIENCE_S,
    ClientSession,
    RunningVerifier,
    StartVerifier,
)
from verifier.engine.messages import Command, Open
from verifier.structured.grammar import Grammar
from verifier.structured.grammar_state import GrammarState
from verifier.structured.grammars import Grammars

TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).parents[3] / "examples" / "demo_model" / "model" / "tokenizer.json")
)
INVALID = code_number(grpc.StatusCode.INVALID_ARGUMENT)
UNIMPLEMENTED = code_number(grpc.StatusCode.UNIMPLEMENTED)
STOP = sampling_pb2.FINISH_REASON_STOP
NAME = "sampling.structured_output"

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "values": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "maxItems": 4,
        },
        "is_total": {"type": "boolean"},
    },
    "required": ["name", "values", "is_total"],
    "additionalProperties": False,
}


def is_json(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "values", "is_total"}
        and isinstance(value["name"], str)
        and all(isinstance(each, int) for each in value["values"])
        and value["is_total"] in (True, False)
    )


GRAMMARS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json_schema": ({"json_schema": json.dumps(SCHEMA)}, is_json),
    "regex": (
        {"regex": "[a-z]{3,8}(, [a-z]{3,8}){2}\\."},
        re.compile("[a-z]{3,8}(, [a-z]{3,8}){2}\\.").fullmatch,
    ),
    "choices": (
        {"choices": {"values": ["values of the list", "totals of the list", "東京 tower"]}},
        lambda text: text in ("values of the list", "totals of the list", "東京 tower"),
    ),
    "lark": (
        {"lark": 'start: sum\nsum: NUMBER ("+" NUMBER)~2\nNUMBER: /[0-9]{1,3}/'},
        re.compile("[0-9]{1,3}(\\+[0-9]{1,3}){2}").fullmatch,
    ),
}


def constrained(sequence_id: str, grammar: Mapping[str, Any], **fields: Any) -> pb.Open:
    sampling = sampling_pb2.SamplingParams(
        structured_output=sampling_pb2.StructuredOutput(**grammar), **fields.pop("sampling", {})
    )
    defaults = {"ignore_eos": False, "max_new_tokens": 160, "sampling": sampling}
    return make_open(sequence_id, **(defaults | fields))


async def finish(session: ClientSession, sequence_id: str) -> list[int]:
    output = await session.wait_finished(sequence_id)
    assert session.decided(sequence_id)[-1].finish_reason == STOP
    return output


def text_of(output: list[int]) -> str:
    """Without the end token."""
    return TOKENIZER.decode(output[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 5}], ids=["greedy", "seed"])
async def test_output_follows_its_grammar_whatever_is_drafted(
    start_verifier: StartVerifier, kind: str, sampling: dict[str, object]
) -> None:
    grammar, matches = GRAMMARS[kind]
    running = await start_verifier(allow_structured_output=True)
    session = await running.greeted_session()
    await session.open(constrained("plain", grammar, sampling=dict(sampling)))
    expected = await finish(session, "plain")
    assert matches(text_of(expected)), text_of(expected)
    # The right drafts, wrong ones, forbidden ones, and both in one hint.
    draw = random.Random(4)
    await session.open(
        constrained(
            "drafted",
            grammar,
            sampling=dict(sampling),
            draft_wait=pb.DRAFT_WAIT_ALWAYS,
        )
    )
    known = 0
    while True:
        decided = await session.wait_decided("drafted", known + 1)
        known += 1
        if decided.finish_reason:
            break
        done = len(session.output("drafted"))
        right = expected[done : done + draw.randrange(6)]
        wrong = [draw.randrange(2048) for _ in range(draw.randrange(3))]
        await session.draft("drafted", len(PROMPT) + done, [*right, *wrong])
    assert session.output("drafted") == expected
    assert any(decided.num_accepted_tokens for decided in session.decided("drafted"))


async def test_text_that_must_come_is_drafted(start_verifier: StartVerifier) -> None:
    text = "the total of all values is one of these: "
    running = await start_verifier(allow_structured_output=True)
    session = await running.greeted_session()
    await session.open(constrained("a", {"regex": f"{text}[0-9]{{4}}"}))
    output = await finish(session, "a")
    assert re.fullmatch(f"{text}[0-9]{{4}}", text_of(output))
    decided = session.decided("a")
    assert len(decided) < len(TOKENIZER.encode(text).ids)
    assert all(each.num_accepted_tokens == each.num_draft_tokens for each in decided)
    # They are no hint's.
    assert not any(each.matched_ngram_length or each.source for each in decided)
    # A stop token amid such drafts ends the output, and no draft behind it counts.
    stop = output[len(decided[0].token_ids) + 2]
    await session.open(
        constrained("b", {"regex": f"{text}[0-9]{{4}}"}, stop_token_ids=[stop]),
    )
    assert await finish(session, "b") == output[: output.index(stop) + 1]
    last = session.decided("b")[-1]
    assert 0 < last.num_accepted_tokens <= len(last.token_ids)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"grammar": {}}, INVALID, NAME),
        ({"grammar": {"regex": "(a"}}, INVALID, f"{NAME}.regex"),
        ({"grammar": {"json_schema": "{"}}, INVALID, f"{NAME}.json_schema"),
        ({"grammar": {"choices": {}}}, INVALID, f"{NAME}.choices"),
        ({"grammar": {"lark": "x"}}, INVALID, f"{NAME}.lark"),
        ({"grammar": {"regex": "a" * 20_000}}, INVALID, f"{NAME}.regex"),
        ({"grammar": {"choices": {"values": ["a" * 4_000] * 20}}}, INVALID, f"{NAME}.choices"),
        ({"grammar": {"regex": "a"}, "ignore_eos": True}, INVALID, "ignore_eos"),
        (
            {"grammar": {"regex": "a"}, "sampling": {"min_new_tokens": 2}},
            INVALID,
            "sampling.min_new_tokens",
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_name(
    start_verifier: StartVerifier, fields: dict[str, Any], code: int, field: str
) -> None:
    running = await start_verifier(allow_structured_output=True)
    session = await running.greeted_session()
    await session.open(constrained("a", **fields), make_open("other"))
    rejected = await session.wait_rejected()
    assert (rejected.code, rejected.field) == (code, field), rejected
    assert rejected.sequence_id == "a"
    await session.wait_finished("other")


async def test_updates_before_the_grammar_is_compiled_become_part_of_the_open(
    start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, none of them waits."""
    held: Future[tuple[Grammars, Grammar]] = Future()
    compiled: Future[GrammarState] = Future()
    compile_grammar = Grammars.compile

    def hold(grammars: Grammars, grammar: Grammar, *_: Any, **__: Any) -> Future[GrammarState]:
        held.set_result((grammars, grammar))
        return compiled

    monkeypatch.setattr(Grammars, "compile", hold)
    running = await start_verifier(
        allow_structured_output=True, drafters=["127.0.0.1:1", "127.0.0.1:2"]
    )
    submitted: list[Command] = []
    submit = running.engine.submit

    def record(command: Command) -> None:
        submitted.append(command)
        submit(command)

    monkeypatch.setattr(running.engine, "submit", record)
    session = await running.greeted_session()
    await session.open(constrained("a", {"regex": "a"}, drafter_address="127.0.0.1:1"))
    moved = pb.Update(sequence_id="a", drafting=True, drafter_address="127.0.0.1:2")
    await session.send(
        pb.Command(update=moved),
        *[pb.Command(update=pb.Update(sequence_id="a", drafting=False))] * 5000,
        pb.Command(close=pb.Close(sequence_id="unknown")),
    )
    async with asyncio.timeout(PATIENCE_S):
        while not submitted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    compiled.set_result(await asyncio.wrap_future(compile_grammar(*held.result())))
    await finish(session, "a")
    _, opened = submitted
    assert isinstance(opened, Open)
    assert not opened.sequence.drafting
    assert opened.sequence.drafted_by is not None
    assert opened.sequence.drafted_by.address == "127.0.0.1:2"


async def test_what_waits_to_run_waits_without_a_compiled_grammar(
    start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for as many as run: a compiled one may hold megabytes."""
    counts = []
    counted = Grammars._counted

    def count(grammars: Grammars, state: GrammarState, priority: int) -> GrammarState:
        counted(grammars, state, priority)
        counts.append(len(grammars._priorities))
        return state

    monkeypatch.setattr(Grammars, "_counted", count)
    running = await start_verifier(allow_structured_output=True, max_num_seqs=1)
    session = await running.greeted_session()
    grammar, matches = GRAMMARS["regex"]
    # Without a hint it goes on for ever.
    await session.open(make_open("first", draft_wait=pb.DRAFT_WAIT_ALWAYS))
    names = [f"{n}" for n in range(6)]
    await session.open(*(constrained(name, grammar) for name in names))
    async with asyncio.timeout(PATIENCE_S):
        while (await running.load()).num_waiting != len(names) or len(counts) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # One that waits for room, and one whose grammar is compiled, are closed as any other.
    await session.send(
        pb.Command(close=pb.Close(sequence_id="5")),
        pb.Command(close=pb.Close(sequence_id="0")),
        pb.Command(close=pb.Close(sequence_id="first")),
    )
    for name in names[1:-1]:
        assert matches(text_of(await finish(session, name)))
    assert max(counts) == 2
    assert len(counts) == len(names) - 1
    await running.idle()
    grammars = running.verifier._grammars
    assert grammars is not None
    while grammars._priorities:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def until_one_waits(running: RunningVerifier) -> None:
    while (await running.load()).num_waiting != 1:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_session_that_ends_gives_up_the_grammars_that_wait(
    start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' grammars would wait behind them."""
    waiting: Future[GrammarState] = Future()
    monkeypatch.setattr(Grammars, "compile", lambda *_, **__: waiting)
    running = await start_verifier(allow_structured_output=True)
    session = await running.greeted_session()
    await session.open(constrained("a", {"regex": "a"}))
    async with asyncio.timeout(PATIENCE_S):
        await until_one_waits(running)
        session.call.cancel()
        while not waiting.cancelled():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_without_the_operators_leave_it_is_refused_by_name(
    start_verifier: StartVerifier,
) -> None:
    running = await start_verifier()
    session = await running.greeted_session()
    await session.open(constrained("a", {"regex": "a"}), make_open("other"))
    rejected = await session.wait_rejected()
    assert (rejected.code, rejected.field) == (UNIMPLEMENTED, f"{NAME}.regex")
    await session.wait_finished("other")


async def test_a_drain_waits_for_grammars(start_verifier: StartVerifier) -> None:
    running = await start_verifier(allow_structured_output=True)
    session = await running.greeted_session()
    await session.open(*(constrained(str(n), {"regex": f"a{{{n + 2}}}b"}) for n in range(20)))
    await session.read()
    async with asyncio.timeout(PATIENCE_S):
        await running.verifier.servicer.drain()
    assert await session.read_to_end() == grpc.StatusCode.OK
    ends = [event.decided.sequence_id for event in session.events if event.decided.finish_reason]
    refused = [event.rejected.sequence_id for event in session.events if event.HasField("rejected")]
    assert sorted(ends + refused, key=int) == [str(n) for n in range(20)]
