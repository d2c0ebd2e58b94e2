"""Answers are read as protobuf's own parser reads them, and nothing else is made of other bytes."""

import itertools

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.v1 import drafter_pb2 as pb
from tandem.values import DraftSource
from tests.volume import examples
from verifier.drafters import wire
from verifier.drafters.answer_scan import MALFORMED, NUM_COLUMNS, scan_answer
from verifier.drafters.batches import (
    DrafterProtocolError,
    Proposal,
    ProposalStatus,
)

VOCAB_SIZE = 300
_START_GROUP = 3
UINT32 = st.one_of(st.integers(0, 400), st.integers(0, 2**32 - 1))
INT32 = st.one_of(st.integers(0, 9), st.integers(-(2**31), 2**31 - 1))

PARTS = st.builds(
    pb.Proposal,
    sequence_id=st.text(max_size=4),
    base_length=UINT32,
    token_ids=st.lists(UINT32, max_size=5),
    matched_ngram_length=UINT32,
    source=INT32,
    status=INT32,
    known_length=UINT32,
    message=st.text(max_size=4),
).map(pb.Proposal.SerializeToString)
# Tokens one by one, and fields of each kind that a newer drafter may send.
UNUSUAL = st.sampled_from(
    [
        b"\x18\x07\x18\xac\x02",
        b"\x1a\x0b\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x05",
        b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x78\x05",
        b"\x7a\x02\x08\x01",
        b"\x79" + bytes(8),
        b"\x7d" + bytes(4),
        b"\x80\x01\x00",
    ]
)
PROPOSALS = st.lists(st.one_of(PARTS, UNUSUAL), max_size=4).map(b"".join)


def answer(batch_id: int, proposals: list[bytes], unusual: bytes = b"") -> bytes:
    fields = [b"\x12" + varint(len(each)) + each for each in proposals]
    return pb.ProposeResponse(batch_id=batch_id).SerializeToString() + unusual + b"".join(fields)


def varint(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def parsed(data: bytes) -> tuple[int, list[Proposal]]:
    """What protobuf makes of it."""
    response = pb.ProposeResponse.FromString(data)
    sources = {pb.SOURCE_SEQUENCE: DraftSource.SEQUENCE, pb.SOURCE_POOL: DraftSource.POOL}
    statuses = {int(each): each for each in ProposalStatus}
    return response.batch_id, [
        Proposal(
            each.sequence_id,
            each.base_length,
            list(itertools.takewhile(lambda token: token < VOCAB_SIZE, each.token_ids)),
            each.matched_ngram_length,
            sources.get(each.source),
            statuses.get(each.status, ProposalStatus.UNSPECIFIED),
            each.known_length,
            each.message,
        )
        for each in response.proposals
    ]


def has_group(response: pb.ProposeResponse) -> bool:
    """Whether there is a group among the unknown fields, which protobuf skips."""
    return any(
        field.wire_type == _START_GROUP
        for message in (response, *response.proposals)
        for field in UnknownFieldSet(message)  # type: ignore[attr-defined]
    )


def read(data: bytes, num_expected: int) -> tuple[int, list[Proposal]]:
    return wire.proposals(data, num_expected=num_expected, vocab_size=VOCAB_SIZE)


@settings(max_examples=examples(300))
@given(st.integers(0, 2**63 - 1), st.lists(PROPOSALS, max_size=4), UNUSUAL)
def test_an_answer_is_read_as_protobuf_reads_it(
    batch_id: int, proposals: list[bytes], unusual: bytes
) -> None:
    data = answer(batch_id, proposals, unusual.replace(b"\x18", b"\x38").replace(b"\x1a", b"\x3a"))
    assert read(data, len(proposals)) == parsed(data)


@settings(max_examples=examples(300))
@given(st.lists(PROPOSALS, min_size=1, max_size=3), st.data())
def test_of_damaged_bytes_nothing_is_made_but_what_protobuf_makes(
    proposals: list[bytes], drawn: st.DataObject
) -> None:
    data = bytearray(answer(1, proposals))
    for _ in range(drawn.draw(st.integers(1, 3))):
        data[drawn.draw(st.integers(0, len(data) - 1))] = drawn.draw(st.integers(0, 255))
    damaged = bytes(data[: drawn.draw(st.integers(0, len(data)))])
    rows = np.empty((len(damaged), NUM_COLUMNS), dtype=np.int64)
    tokens = np.empty(len(damaged), dtype=np.int64)
    count, _, _ = scan_answer(np.frombuffer(damaged, np.uint8), VOCAB_SIZE, rows, tokens)
    try:
        expected = parsed(damaged)
    except DecodeError:
        if count != MALFORMED:
            with pytest.raises(DrafterProtocolError):
                read(damaged, count)
        return
    if count == MALFORMED:
        assert has_group(pb.ProposeResponse.FromString(damaged))
    else:
        assert read(damaged, count) == expected


@pytest.mark.parametrize(
    ("data", "num_proposals"),
    [
        (b"\x12\x05\x0a\xff", 0),  # ends beyond the message
        (b"\x12\x04\x1a\x03\x80\x80\x80", 1),  # a number without an end
        (b"\x12" + b"\xff" * 9 + b"\x01", 0),  # a negative length
        (b"\x12\x03\x0a\x01\xff", 1),  # no UTF-8
        (b"\x13\x14", 0),  # a group
        (b"\x00\x00", 0),  # no field
        (b"\x79\x00", 0),  # cut
    ],
)
def test_what_is_no_answer_is_named_so(data: bytes, num_proposals: int) -> None:
    with pytest.raises(DrafterProtocolError, match="cannot be parsed"):
        read(data, num_proposals)
