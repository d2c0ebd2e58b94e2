"""What a message may hold is read from its descriptor and enforced, field by field."""

import sys
from types import FrameType
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from servicekit.errors import MessageLimitError
from servicekit.message_limits import MessageLimits, UnlimitedFieldError
from tandem.v1 import gateway_pb2, limits_pb2, sampling_pb2, verifier_pb2

Field = descriptor_pb2.FieldDescriptorProto


def limits_of(kind: type[Message]) -> MessageLimits:
    descriptor: Any = kind.DESCRIPTOR
    return MessageLimits(descriptor, limits_pb2)


GENERATE = limits_of(gateway_pb2.GenerateRequest)
Generate = gateway_pb2.GenerateRequest


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Generate(request_id="x" * 257), "request_id: 257 bytes are over the limit of 256"),
        (Generate(request_id="é" * 129), "request_id: 258 bytes are over the limit of 256"),
        (
            Generate(stop_sequences=["x"] * 17),
            "stop_sequences: 17 items are over the limit of 16",
        ),
        (
            Generate(stop_sequences=["x", "é" * 129]),
            "stop_sequences[1]: 258 bytes are over the limit of 256",
        ),
        (
            Generate(
                sampling=sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1025), 0.5))
            ),
            "sampling.logit_bias: 1025 items are over the limit of 1024",
        ),
        (
            Generate(
                sampling=sampling_pb2.SamplingParams(
                    structured_output=sampling_pb2.StructuredOutput(
                        choices=sampling_pb2.Choices(values=["x" * 4093] * 16 + ["x"])
                    )
                )
            ),
            "sampling.structured_output.choices: 65539 bytes are over the limit of 65536",
        ),
    ],
)
def test_what_is_over_a_limit_is_refused_by_its_path_and_the_limit(
    request_: Generate, message: str
) -> None:
    with pytest.raises(MessageLimitError) as refusal:
        GENERATE.check(request_)
    assert refusal.value.message == message
    assert refusal.value.field == message.partition(":")[0]


def test_a_path_leads_through_repeated_messages_and_oneofs() -> None:
    close, draft = verifier_pb2.Command(), verifier_pb2.Command()
    close.close.sequence_id = "x"
    draft.draft.sequence_id = "x" * 65
    with pytest.raises(MessageLimitError) as refusal:
        limits_of(verifier_pb2.SessionRequest).check(
            verifier_pb2.SessionRequest(commands=[close, draft])
        )
    assert refusal.value.field == "commands[1].draft.sequence_id"


def test_counts_alone_look_at_no_element() -> None:
    limits = limits_of(verifier_pb2.SessionRequest)
    bad = verifier_pb2.Command(close=verifier_pb2.Close(sequence_id="x" * 65))
    limits.check_counts(verifier_pb2.SessionRequest(commands=[bad]))
    with pytest.raises(MessageLimitError):
        limits.check_counts(verifier_pb2.SessionRequest(commands=[bad] * 16_385))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Generate(text="x" * (1 << 22)), "text"),
        (Generate(tokens=gateway_pb2.TokenIds(token_ids=[1] * (1 << 22))), "tokens.token_ids"),
        (Generate(text="x", output_token_ids=[1 << 31] * (1 << 20)), "output_token_ids"),
    ],
)
def test_a_message_that_is_too_large_is_refused_by_its_largest_field(
    request_: Generate, field: str
) -> None:
    serialized = request_.SerializeToString()
    with pytest.raises(MessageLimitError) as refusal:
        GENERATE.check_size(serialized)
    assert refusal.value.field == field
    assert f"{len(serialized)} bytes, over the limit of 4194304" in refusal.value.message


@pytest.mark.parametrize(
    "serialized",
    [
        b"\xff" * (1 << 23),
        b"\x0b" * (1 << 23),
        b"\x00" * (1 << 23),
        b"\x22" * (1 << 23),
        bytes([Generate.SAMPLING_FIELD_NUMBER << 3, 1]) * (1 << 22),
    ],
    ids=["endless number", "a group", "zeros", "lengths", "numbers in place of a message"],
)
def test_bytes_that_are_no_message_and_too_large_are_refused_at_once(serialized: bytes) -> None:
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(MessageLimitError):
            GENERATE.check_size(serialized)
    finally:
        sys.settrace(former)
    # On the event loop, beside the streams of others.
    assert 0 < num_lines < 100_000, "it reads a part of them"


def make_message(field: Field) -> type[Message]:
    """A message type with this one field."""
    file = descriptor_pb2.FileDescriptorProto(name="made.proto", package="made", syntax="proto3")
    field.name, field.number = "field", 1
    file.message_type.add(name="Made").field.append(field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("made.Made"))


@pytest.mark.parametrize(
    "field",
    [
        Field(type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL),
        Field(type=Field.TYPE_BYTES, label=Field.LABEL_OPTIONAL),
        Field(type=Field.TYPE_UINT32, label=Field.LABEL_REPEATED),
    ],
    ids=["string", "bytes", "repeated"],
)
def test_a_field_without_a_limit_is_found_when_the_limits_are_read(field: Field) -> None:
    with pytest.raises(UnlimitedFieldError, match=r"made\.Made\.field has no max_"):
        limits_of(make_message(field))
