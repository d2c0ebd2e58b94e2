"""The gateway's own types agree with the wire."""

import pytest

from gateway.api.wire import generate_request_from_proto
from gateway.messages.drafter import Delta, DeltaBatch, NewHistory, ProposalStatus, Release
from gateway.messages.request import (
    GenerateRequest,
    Keep,
    NgramParams,
    Overlap,
    SamplingParams,
    SpeculationParams,
    Tie,
)
from gateway.messages.response import FinishReason
from gateway.messages.verifier import CommandBatch, DraftWait, Hint, Opened, UnreadableEvent
from gateway.peers import wire
from tandem.v1 import drafter_pb2, gateway_pb2, sampling_pb2, verifier_pb2
from tests.gateway.factories import make_open


def test_enums_have_the_wires_numbers() -> None:
    assert {f"FINISH_REASON_{r.name}": int(r) for r in FinishReason if r} == {
        name: number for name, number in sampling_pb2.FinishReason.items() if number
    }
    assert {f"OVERLAP_{o.name}": int(o) for o in Overlap if o} == {
        name: number for name, number in drafter_pb2.Overlap.items() if number
    }
    assert {f"TIE_{t.name}": int(t) for t in Tie if t} == {
        name: number for name, number in drafter_pb2.Tie.items() if number
    }
    assert {f"STATUS_{s.name}": int(s) for s in ProposalStatus if s} == {
        name: number for name, number in drafter_pb2.Status.items() if number
    }


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
        drafting=False,
        num_speculative_tokens=0,
        cache_salt="1:a/",
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
    renamed = {"tokens": "prompt_token_ids", "n": "num_choices", "media": "has_media"}
    assert {
        renamed.get(f.name, f.name) for f in gateway_pb2.GenerateRequest.DESCRIPTOR.fields
    } == set(GenerateRequest.__dataclass_fields__)


def test_updates_go_before_hints() -> None:
    sent = wire.commands_to_proto(
        CommandBatch(updates=[("one", True)], hints=[Hint("one", 5, [7, 8], 3)], closes=["two"])
    )
    assert [command.WhichOneof("command") for command in sent.commands] == [
        "update",
        "draft",
        "close",
    ]
    assert sent.commands[1].draft == verifier_pb2.Draft(
        sequence_id="one", base_length=5, token_ids=[7, 8], matched_ngram_length=3
    )
    assert sent.commands[2].close.sequence_id == "two"


def test_a_hint_says_that_the_drafter_is_still_indexing() -> None:
    hints = [Hint("one", 5, [], 0, is_indexing=True), Hint("two", 5, [], 0)]
    sent = wire.commands_to_proto(CommandBatch(updates=[], hints=hints, closes=[]))
    assert [command.draft.indexing for command in sent.commands] == [True, False]


def test_only_the_first_delta_creates_a_history() -> None:
    new = NewHistory(prompt_length=2, ngram=NgramParams(min_ngram=1, max_ngram=4, tie=Tie.LATEST))
    sent = wire.deltas_to_proto(
        DeltaBatch(
            batch_id=3,
            deltas=[Delta("a", 0, [1, 2], 0, 64, new), Delta("b", 5, [6], 24, 64, None)],
            releases=[Release("c"), Release("d", Keep.OUTPUT)],
        )
    )
    begun, continued = sent.sequences
    assert (begun.prompt_length, begun.params.min_ngram, begun.params.max_ngram) == (2, 1, 4)
    assert begun.params.tie == drafter_pb2.TIE_LATEST
    assert not continued.HasField("params")
    assert (continued.base_length, continued.max_draft_tokens) == (5, 24)
    assert [(r.sequence_id, r.keep, r.feed_id) for r in sent.releases] == [
        ("c", drafter_pb2.KEEP_UNSPECIFIED, ""),
        ("d", drafter_pb2.KEEP_OUTPUT, "d"),
    ]


@pytest.mark.parametrize(("verified", "asked"), [(0, 0), (2, 8), (2**32 - 1, 2**32 - 1)])
def test_drafters_get_a_multiple_of_tokens_per_match(verified: int, asked: int) -> None:
    ngram = NgramParams(min_ngram=1, max_ngram=4, tie=Tie.LONGEST, tokens_per_match=verified)
    new = NewHistory(prompt_length=2, ngram=ngram)
    sent = wire.deltas_to_proto(
        DeltaBatch(batch_id=3, deltas=[Delta("a", 0, [1, 2], 0, 64, new)], releases=[])
    )
    params = sent.sequences[0].params
    assert params.HasField("tokens_per_match")
    assert params.tokens_per_match == asked


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


def test_an_unknown_status_of_a_proposal_becomes_unspecified() -> None:
    message = drafter_pb2.ProposeResponse(
        proposals=[drafter_pb2.Proposal(sequence_id="a", status=number) for number in (0, 1, 77)]  # type: ignore[arg-type]
    )
    statuses = [proposal.status for proposal in wire.proposals_from_proto(message)]
    assert statuses == [ProposalStatus.UNSPECIFIED, ProposalStatus.OK, ProposalStatus.UNSPECIFIED]


def test_an_event_that_cannot_be_read_leaves_the_others_as_they_are() -> None:
    message = verifier_pb2.SessionResponse(
        events=[
            verifier_pb2.Event(decided=verifier_pb2.Decided(sequence_id="a", finish_reason=77)),  # type: ignore[arg-type]
            verifier_pb2.Event(),
            verifier_pb2.Event(opened=verifier_pb2.Opened(sequence_id="b", num_cached_tokens=3)),
        ]
    )
    unreadable, unknown, opened = wire.events_from_proto(message)
    assert unreadable == UnreadableEvent("a", "finish_reason has no value 77")
    assert isinstance(unknown, UnreadableEvent)
    assert unknown.sequence_id == ""
    assert opened == Opened(sequence_id="b", num_cached_tokens=3)
