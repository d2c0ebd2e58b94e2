"""No request makes a message to a verifier larger than its limit."""

import dataclasses
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gateway.errors import InvalidRequestError
from gateway.messages.sizes import (
    MAX_DRAFTER_ADDRESS_BYTES,
    MAX_OPEN_BYTES,
    MAX_SESSION_REQUEST_BYTES,
)
from gateway.messages.verifier import CloseCommand, OpenCommand, Welcome
from gateway.metrics import GatewayMetrics
from gateway.peers.verifier_link import VerifierLink
from servicekit.logs import Logger
from tandem.v1 import verifier_pb2
from tandem.values import Keep, NgramParams, SamplingParams, StructuredOutput
from tests.gateway.factories import make_open

MAX_ID = (1 << 32) - 1
LONG_ADDRESS = "a" * MAX_DRAFTER_ADDRESS_BYTES


def sequence_id(index: int) -> str:
    return f"{index:032x}"


def opening(index: int, *, num_tokens: int = 3, num_biases: int = 0) -> OpenCommand:
    return make_open(
        [MAX_ID] * num_tokens,
        sequence_id=sequence_id(index),
        seed=(1 << 64) - 1,
        sampling=SamplingParams(
            temperature=0.5,
            logit_bias={MAX_ID - position: 1.5 for position in range(num_biases)},
        ),
        max_new_tokens=MAX_ID,
        stop_token_ids=[MAX_ID] * 64,
        ignore_eos=True,
        num_speculative_tokens=31,
        cache_salt="s" * 256,
        priority=-5,
        drafter=LONG_ADDRESS,
        ngram=NgramParams(min_ngram=2, max_ngram=5, tokens_per_match=MAX_ID, pool_id="p" * 256),
        pool_keep=Keep.ALL,
    )


class RefusalListener:
    """Records the Opens that cannot be sent; nothing else may happen."""

    def __init__(self) -> None:
        self.refused: dict[str, InvalidRequestError] = {}

    def on_unsendable(self, _link: object, sequence_id: str, error: InvalidRequestError) -> None:
        self.refused[sequence_id] = error

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not expected")


@pytest.fixture
async def link(logger: Logger) -> Any:
    """A link that takes itself for connected: the test reads its messages."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        link = VerifierLink(
            name="verifier",
            channel=channel,
            gateway_id="gateway",
            listener=RefusalListener(),
            greet_timeout_s=1.0,
            metrics=GatewayMetrics(CollectorRegistry()),
            logger=logger,
        )
        link.welcome = Welcome(
            model_id="",
            model_digest="",
            tokenizer_digest="",
            max_model_len=1,
            max_num_speculative_tokens=1,
            vocab_size=1,
        )
        yield link


def messages_of(link: VerifierLink) -> list[verifier_pb2.SessionRequest]:
    messages = []
    while (message := link.next_request()) is not None:
        messages.append(message)
    assert link._outbox.is_empty
    return messages


def sequences_of(messages: list[verifier_pb2.SessionRequest], kind: str) -> list[str]:
    return [
        getattr(command, kind).sequence_id
        for message in messages
        for command in message.commands
        if command.WhichOneof("command") == kind
    ]


async def test_messages_to_a_verifier_are_sized_by_their_bytes(link: VerifierLink) -> None:
    for index in range(1000):
        link.open(opening(index, num_biases=(0, 30, 1024, 3)[index % 4]))
    link.open(opening(1000, num_biases=100_000))
    link.open(opening(1001, num_tokens=600_000))
    for index in range(2000, 6000):
        link.update(sequence_id(index), drafter=LONG_ADDRESS)
        link.close(CloseCommand(sequence_id(index + 10_000), Keep.ALL, MAX_ID), has_ended=False)
    messages = messages_of(link)
    for message in messages:
        assert message.ByteSize() <= (
            MAX_OPEN_BYTES + 100 if len(message.commands) == 1 else MAX_SESSION_REQUEST_BYTES
        )
    assert sequences_of(messages, "open") == [sequence_id(index) for index in range(1002)]
    assert len(sequences_of(messages, "update")) == 4000
    assert len(sequences_of(messages, "close")) == 4000
    assert len(messages) < 100, "small ones share a message"


async def test_an_open_that_cannot_be_written_ends_alone(link: VerifierLink) -> None:
    """Its request should have been refused before."""
    good = opening(0)
    unwritable = dataclasses.replace(good.sampling, structured_output=StructuredOutput())
    link.open(dataclasses.replace(opening(1), sampling=unwritable))
    link.open(good)
    assert sequences_of(messages_of(link), "open") == [good.sequence_id]
    listener = link._listener
    assert isinstance(listener, RefusalListener)
    assert [(key, error.field) for key, error in listener.refused.items()] == [
        (sequence_id(1), "sampling.structured_output")
    ]


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"num_tokens": 900_000}, "prompt"), ({"num_biases": 300_000}, "sampling.logit_bias")],
)
async def test_an_open_that_is_too_large_is_refused_by_field_and_the_others_are_sent(
    link: VerifierLink, fields: dict[str, int], name: str
) -> None:
    for index in range(3):
        link.open(opening(index, **(fields if index == 1 else {})))
    messages = messages_of(link)
    assert sequences_of(messages, "open") == [sequence_id(0), sequence_id(2)]
    listener = link._listener
    assert isinstance(listener, RefusalListener)
    assert [(key, error.field) for key, error in listener.refused.items()] == [
        (sequence_id(1), name)
    ]
    assert set(link.load.prompts) == {sequence_id(0), sequence_id(2)}
    link.close(CloseCommand(sequence_id(0), Keep.NOTHING, 0), has_ended=False)
    assert set(link.load.prompts) == {sequence_id(2)}
