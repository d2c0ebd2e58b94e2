"""The gateway's own types agree with the wire."""

from collections.abc import Iterable
from typing import Any

import pytest

from gateway.api.wire import generate_request_from_proto
from gateway.messages.request import GenerateRequest
from gateway.messages.verifier import (
    CloseCommand,
    CommandBatch,
    DrafterStatus,
    Opened,
    UnreadableEvent,
)
from gateway.peers import wire
from tandem.declared import declared
from tandem.messages import word_of
from tandem.v1 import drafter_pb2, gateway_pb2, sampling_pb2, verifier_pb2
from tandem.values import (
    DraftSource,
    DraftWait,
    FinishReason,
    Keep,
    NgramParams,
    SamplingParams,
    SpeculationParams,
)
from tests.gateway.factories import make_open

PARAMETERS = [
    (message, each)
    for message, kind in (
        (sampling_pb2.SamplingParams, SamplingParams),
        (sampling_pb2.SpeculationParams, SpeculationParams),
    )
    for each in declared(kind)
]
WORDS = [
    (sampling_pb2.FinishReason.DESCRIPTOR, FinishReason),
    (drafter_pb2.Source.DESCRIPTOR, DraftSource),
    (drafter_pb2.Keep.DESCRIPTOR, Keep),
    *[
        (message.DESCRIPTOR.fields_by_name[each.name].enum_type, each.choices)
        for message, each in PARAMETERS
        if each.choices
    ],
]


@pytest.mark.parametrize(("enumeration", "words"), WORDS)
def test_words_are_those_of_the_wire(enumeration: Any, words: Iterable[str]) -> None:
    numbers = [number for number in enumeration.values_by_number if number]
    assert sorted(words) == sorted(word_of(enumeration, number) or "" for number in numbers)


def test_a_given_zero_is_not_absent() -> None:
    asked = gateway_pb2.GenerateRequest(text="", max_new_tokens=0, n=0)
    optional = [
        (message, each.name)
        for message, each in PARAMETERS
        if message.DESCRIPTOR.fields_by_name[each.name].has_presence
    ]
    for message, name in optional:
        params = asked.sampling if message is sampling_pb2.SamplingParams else asked.speculation
        setattr(params, name, 0)
    request = generate_request_from_proto(asked)
    assert (request.text, request.max_new_tokens, request.num_choices) == ("", 0, 0)
    for message, name in optional:
        of_sampling = message is sampling_pb2.SamplingParams
        assert getattr(request.sampling if of_sampling else request.speculation, name) == 0, name


def test_an_open_says_what_its_command_says() -> None:
    command = make_open(
        [1, 2],
        output_token_ids=[3],
        sequence_id="s",
        max_new_tokens=8,
        stop_token_ids=[4],
        ignore_eos=True,
        draft_wait=DraftWait.ALWAYS,
        drafter="",
        num_speculative_tokens=0,
        cache_salt="1:a/",
        tenant_weight=5,
        priority=-3,
        ngram=NgramParams(min_ngram=2, max_ngram=5, tokens_per_match=3),
    )
    opened = wire.open_to_proto(command)
    assert opened == verifier_pb2.Open(
        sequence_id="s",
        token_ids=[1, 2, 3],
        prompt_length=2,
        sampling=sampling_pb2.SamplingParams(seed=7),
        max_new_tokens=8,
        stop_token_ids=[4],
        ignore_eos=True,
        draft_wait=verifier_pb2.DRAFT_WAIT_ALWAYS,
        drafting=False,
        num_speculative_tokens=0,
        cache_salt="1:a/",
        tenant_weight=5,
        priority=-3,
        expected_model_digest="digest",
        tokens_per_match=3,
    )
    assert opened.HasField("drafting")
    assert opened.HasField("num_speculative_tokens")


def test_no_field_of_sampling_or_speculation_is_overlooked() -> None:
    """A field that is added to the contract must be honoured or refused, never ignored."""
    assert {f.name for f in sampling_pb2.SamplingParams.DESCRIPTOR.fields} == set(
        SamplingParams.__dataclass_fields__
    )
    assert {f.name for f in sampling_pb2.SpeculationParams.DESCRIPTOR.fields} == set(
        SpeculationParams.__dataclass_fields__
    )
    renamed = {"tokens": "prompt_token_ids", "n": "num_choices"}
    assert {
        renamed.get(f.name, f.name) for f in gateway_pb2.GenerateRequest.DESCRIPTOR.fields
    } == GenerateRequest.__dataclass_fields__.keys() - {"conversation", "unknown_field"}


def test_updates_name_the_drafter_and_closes_say_what_is_kept() -> None:
    sent = wire.commands_to_proto(
        CommandBatch(
            updates=[("one", "a:1"), ("two", "")],
            closes=[
                CloseCommand("three", Keep.NOTHING, 7),
                CloseCommand("four", Keep.OUTPUT, 7),
            ],
        )
    )
    assert [command.update for command in sent.commands[:2]] == [
        verifier_pb2.Update(sequence_id="one", drafter_address="a:1"),
        verifier_pb2.Update(sequence_id="two", drafter_address=""),
    ]
    assert [command.close for command in sent.commands[2:]] == [
        verifier_pb2.Close(sequence_id="three", keep=drafter_pb2.KEEP_NOTHING),
        verifier_pb2.Close(sequence_id="four", keep=drafter_pb2.KEEP_OUTPUT, keep_length=7),
    ]


@pytest.mark.parametrize(("verified", "asked"), [(0, 0), (2, 8), (2**32 - 1, 2**32 - 1)])
def test_drafters_get_a_multiple_of_tokens_per_match(verified: int, asked: int) -> None:
    ngram = NgramParams(min_ngram=1, max_ngram=4, tie="longest", tokens_per_match=verified)
    opened = wire.open_to_proto(make_open(ngram=ngram, drafter="a:1", hint_tokens=9))
    assert opened.ngram.HasField("tokens_per_match")
    assert opened.ngram.tokens_per_match == asked
    assert opened.tokens_per_match == verified
    assert (opened.drafter_address, opened.drafting, opened.hint_tokens) == ("a:1", True, 9)


@pytest.mark.parametrize(
    "message",
    [
        verifier_pb2.SessionResponse(),
        verifier_pb2.SessionResponse(
            events=[verifier_pb2.Event(opened=verifier_pb2.Opened(sequence_id="a"))]
        ),
        verifier_pb2.SessionResponse(
            events=[verifier_pb2.Event(welcome=verifier_pb2.Welcome(protocol_version=2))]
        ),
    ],
)
def test_a_welcome_of_another_version_is_none(message: verifier_pb2.SessionResponse) -> None:
    assert wire.welcome_from_proto(message) is None


def test_every_state_of_a_drafter_is_read_and_no_other() -> None:
    states = verifier_pb2.DrafterStatus.State
    message = [
        verifier_pb2.Event(
            drafter_status=verifier_pb2.DrafterStatus(drafter_address="a:1", state=number)  # type: ignore[arg-type]
        )
        for number in [*states.values(), 77]
    ]
    unspecified, *known, unknown = wire.events_from_proto(message)
    assert [each.state.name for each in known if isinstance(each, DrafterStatus)] == [
        name.removeprefix("STATE_") for name, number in states.items() if number
    ]
    assert unspecified == UnreadableEvent("", "drafter_status.state has no value 0")
    assert unknown == UnreadableEvent("", "drafter_status.state has no value 77")


def test_an_event_that_cannot_be_read_leaves_the_others_as_they_are() -> None:
    message = verifier_pb2.SessionResponse(
        events=[
            verifier_pb2.Event(decided=verifier_pb2.Decided(sequence_id="a", finish_reason=77)),  # type: ignore[arg-type]
            verifier_pb2.Event(),
            verifier_pb2.Event(opened=verifier_pb2.Opened(sequence_id="b", num_cached_tokens=3)),
        ]
    )
    unreadable, unknown, opened = wire.events_from_proto(message.events)
    assert unreadable == UnreadableEvent("a", "finish_reason has no value 77")
    assert isinstance(unknown, UnreadableEvent)
    assert unknown.sequence_id == ""
    assert opened == Opened(sequence_id="b", num_cached_tokens=3)
