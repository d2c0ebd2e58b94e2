"""The gateway's own types agree with the wire."""

from collections.abc import Iterable
from typing import Any

import pytest

from gateway.api.wire import generate_request_from_proto
from gateway.messages.request import GenerateRequest
from gateway.messages.verifier import (
    CloseCommand,
    CommandBatch,
    DrafterState,
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


def declared_choices(name: str) -> tuple[str, ...]:
    [found] = [
        each.choices
        for kind in (SamplingParams, SpeculationParams)
        for each in declared(kind)
        if each.name == name
    ]
    return found


WORDS = [
    (sampling_pb2.FinishReason, FinishReason),
    (drafter_pb2.Source, DraftSource),
    (drafter_pb2.Keep, Keep),
    (drafter_pb2.Keep, declared_choices("pool_keep")),
    (drafter_pb2.Overlap, declared_choices("overlap")),
    (drafter_pb2.Tie, declared_choices("tie")),
    (drafter_pb2.Algorithm, declared_choices("algorithm")),
    (sampling_pb2.Preset, declared_choices("preset")),
    (sampling_pb2.LogprobsMode, declared_choices("logprobs_mode")),
]


@pytest.mark.parametrize(("enumeration", "words"), WORDS)
def test_words_are_those_of_the_wire(enumeration: Any, words: Iterable[str]) -> None:
    numbers = [number for _, number in enumeration.items() if number]
    assert sorted(words) == sorted(
        word_of(enumeration.DESCRIPTOR, number) or "" for number in numbers
    )


def test_fields_absent_from_a_request_are_none() -> None:
    request = generate_request_from_proto(gateway_pb2.GenerateRequest())
    assert request.text is None
    assert request.prompt_token_ids is None
    assert request.max_new_tokens is None
    assert request.num_choices is None
    assert request.sampling == SamplingParams()
    assert request.speculation.enabled is None


def test_a_given_zero_is_not_absent() -> None:
    request = generate_request_from_proto(
        gateway_pb2.GenerateRequest(
            text="",
            max_new_tokens=0,
            n=0,
            sampling=sampling_pb2.SamplingParams(top_p=0, seed=0, logprobs=0),
            speculation=sampling_pb2.SpeculationParams(
                enabled=False, num_speculative_tokens=0, prompt_lookup_min=0
            ),
        )
    )
    assert request.text == ""
    assert request.max_new_tokens == 0
    assert request.num_choices == 0
    assert (request.sampling.top_p, request.sampling.seed, request.sampling.logprobs) == (0, 0, 0)
    assert request.speculation.enabled is False
    assert request.speculation.num_speculative_tokens == 0
    assert request.speculation.prompt_lookup_min == 0


def test_every_sampling_field_reaches_the_verifier() -> None:
    asked = sampling_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        logit_bias={5: 1.5},
        seed=9,
        min_new_tokens=4,
    )
    request = generate_request_from_proto(gateway_pb2.GenerateRequest(sampling=asked))
    command = make_open(
        [1, 2],
        output_token_ids=[3],
        sequence_id="s",
        sampling=request.sampling,
        seed=9,
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
    assert opened.sampling == asked
    assert opened == verifier_pb2.Open(
        sequence_id="s",
        token_ids=[1, 2, 3],
        prompt_length=2,
        sampling=asked,
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
    ("pool", "kept", "keep"),
    [
        ("", Keep.OUTPUT, drafter_pb2.KEEP_UNSPECIFIED),
        ("p", Keep.OUTPUT, drafter_pb2.KEEP_OUTPUT),
        ("p", Keep.ALL, drafter_pb2.KEEP_ALL),
        ("p", Keep.NOTHING, drafter_pb2.KEEP_NOTHING),
    ],
)
def test_an_open_says_what_its_pool_keeps(pool: str, kept: Keep, keep: int) -> None:
    ngram = NgramParams(min_ngram=1, max_ngram=4, pool_id=pool)
    command = make_open(ngram=ngram, pool_keep=kept)
    assert wire.open_to_proto(command).keep == keep


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


def test_events_that_come_with_a_welcome_are_read() -> None:
    status = verifier_pb2.DrafterStatus(
        drafter_address="a:1", state=verifier_pb2.DrafterStatus.STATE_UP
    )
    message = verifier_pb2.SessionResponse(
        events=[
            verifier_pb2.Event(welcome=verifier_pb2.Welcome(protocol_version=1, model_id="m")),
            verifier_pb2.Event(drafter_status=status),
        ]
    )
    read = wire.welcome_from_proto(message)
    assert read is not None
    welcome, events = read
    assert welcome.model_id == "m"
    assert events == [DrafterStatus("a:1", DrafterState.UP)]


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
