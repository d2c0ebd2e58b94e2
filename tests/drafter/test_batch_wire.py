"""The kernels' wire format against protobuf's own."""

import itertools
import random

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafter.batch import scan as batch_wire
from drafter.batch import wire
from drafter.batch.scan import FIELDS, IRREGULAR, scan_request
from drafter.batch.write import write_response
from drafter.history.id_table import MAX_ID_BYTES
from drafter.history.messages import Proposal, ProposalStatus, Source
from tandem.v1 import drafter_pb2 as pb
from tests.volume import examples

SEED = np.uint64(12345)
NUMBERS = st.one_of(st.integers(0, 200), st.sampled_from([0, 127, 128, 2**21, 2**32 - 1]))
IDS = st.text(st.characters(min_codepoint=0, max_codepoint=200), max_size=70)

DELTAS = st.builds(
    pb.SequenceDelta,
    sequence_id=st.one_of(st.sampled_from(["a", "b", "c" * 32, "d" * 64]), IDS),
    base_length=NUMBERS,
    token_ids=st.lists(NUMBERS, max_size=12),
    prompt_length=NUMBERS,
    max_draft_tokens=NUMBERS,
    max_length=NUMBERS,
    params=st.one_of(st.none(), st.builds(pb.NgramParams, pool_id=st.text(max_size=3))),
)
REQUESTS = st.builds(
    pb.ProposeRequest,
    batch_id=st.one_of(NUMBERS, st.sampled_from([2**32, 2**64 - 1])),
    sequences=st.lists(DELTAS, max_size=5),
    releases=st.lists(st.builds(pb.Release, sequence_id=IDS), max_size=2),
)


def scan(payload: bytes, most_rows: int = 8) -> tuple[list[list[int]], int, int] | None:
    """The rows, the batch id and the number of releases; None: irregular."""
    rows = np.zeros((most_rows, FIELDS), dtype=np.int64)
    heads = np.zeros(2, dtype=np.int64)
    data = np.frombuffer(payload, dtype=np.uint8)
    count = scan_request(data, SEED, 10, 5, rows, heads)
    return None if count == IRREGULAR else (rows[:count].tolist(), *heads.tolist())


def check(payload: bytes) -> bool:
    """Whatever a scan makes of a message, protobuf's parser makes of it too."""
    found = scan(payload)
    if found is None:
        return False
    rows, batch_id, num_releases = found
    plain_spans = [
        (row[batch_wire.START], row[batch_wire.END]) for row in rows if row[batch_wire.IS_PLAIN]
    ]
    rest, at = [], 0
    for start, end in plain_spans:
        rest.append(payload[at:start])
        at = end
    try:
        pb.ProposeRequest.FromString(b"".join([*rest, payload[at:]]))
        parsed = pb.ProposeRequest.FromString(payload)
    except DecodeError:
        # The server parses what is not plain: that is where the fault must be.
        for start, end in plain_spans:
            pb.ProposeRequest.FromString(payload[start:end])
        return False
    assert (parsed.batch_id, len(parsed.releases)) == (batch_id, num_releases)
    assert len({delta.sequence_id for delta in parsed.sequences}) == len(parsed.sequences)
    for row, delta in zip(rows, parsed.sequences, strict=True):
        start = row[batch_wire.ID_START]
        assert payload[start : start + row[batch_wire.ID_BYTES]].decode() == delta.sequence_id
        assert 0 < len(delta.sequence_id) <= MAX_ID_BYTES
        assert row[batch_wire.BASE] == delta.base_length
        assert row[batch_wire.NUM_TOKENS] == len(delta.token_ids) <= 10
        assert row[batch_wire.MOST_DRAFT_TOKENS] == delta.max_draft_tokens
        assert row[batch_wire.LENGTH_LIMIT] == delta.max_length
        is_plain = (
            delta.base_length > 0 and len(delta.token_ids) <= 5 and not delta.HasField("params")
        )
        assert row[batch_wire.IS_PLAIN] == is_plain
        tokens = payload[row[batch_wire.TOKENS_START] : row[batch_wire.TOKENS_END]]
        assert list(
            pb.SequenceDelta.FromString(b"\x1a" + bytes_of(len(tokens)) + tokens).token_ids
        ) == list(delta.token_ids)
        [alone] = pb.ProposeRequest.FromString(
            payload[row[batch_wire.START] : row[batch_wire.END]]
        ).sequences
        assert alone == delta
    return True


def bytes_of(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


@settings(max_examples=examples(60), deadline=None)
@given(request=REQUESTS)
@example(pb.ProposeRequest())
def test_what_protobuf_writes_is_read_as_protobuf_reads_it(request: pb.ProposeRequest) -> None:
    is_regular = check(request.SerializeToString())
    ids = [delta.sequence_id for delta in request.sequences]
    is_usual = (
        request.batch_id < 2**32
        and all(id_.isascii() and 0 < len(id_) <= 64 for id_ in ids)
        and len(set(ids)) == len(ids)
        and all(len(delta.token_ids) <= 10 for delta in request.sequences)
    )
    assert is_regular == is_usual, "what is usual takes the short way"


def test_bytes_that_are_damaged_are_read_as_protobuf_reads_them_or_not_at_all() -> None:
    rng = random.Random(1)
    num_regular = num_irregular = 0
    for case in range(20_000):
        request = pb.ProposeRequest(batch_id=rng.randrange(300))
        for i in range(rng.randrange(4)):
            request.sequences.add(
                sequence_id=f"{case}-{i}",
                base_length=rng.choice([0, 1, 300]),
                token_ids=[
                    rng.randrange(2 ** rng.randrange(1, 33)) for _ in range(rng.randrange(7))
                ],
                max_draft_tokens=rng.choice([0, 24]),
                max_length=rng.choice([0, 4096]),
                params=pb.NgramParams(min_ngram=1) if rng.random() < 0.1 else None,
            )
        payload = bytearray(request.SerializeToString())
        for _ in range(rng.randrange(4)):
            kind = rng.randrange(4)
            at = rng.randrange(len(payload) + 1)
            if kind == 0:
                payload[at : at + 1] = [rng.randrange(256)]
            elif kind == 1:
                del payload[at : at + rng.randrange(4)]
            elif kind == 2:
                payload[at:at] = bytes(rng.choices([0, 1, 0x0A, 0x12, 0x1A, 0x80, 0xFF], k=2))
            else:
                del payload[at:]
        if check(bytes(payload)):
            num_regular += 1
        else:
            num_irregular += 1
    assert num_regular > 5000
    assert num_irregular > 5000


def test_the_field_numbers_are_the_contract_s() -> None:
    def numbers(message: type, *names: str) -> list[int]:
        fields = message.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]
        return [fields[name].number for name in names]

    assert numbers(pb.ProposeRequest, "batch_id", "sequences", "releases") == [
        batch_wire.BATCH_ID,
        batch_wire.SEQUENCES,
        batch_wire.RELEASES,
    ]
    assert numbers(pb.ProposeResponse, "batch_id", "proposals") == [
        batch_wire.BATCH_ID,
        batch_wire.PROPOSALS,
    ]
    delta = [field.name for field in pb.SequenceDelta.DESCRIPTOR.fields]
    assert {
        name.upper(): number
        for name, number in zip(delta, numbers(pb.SequenceDelta, *delta), strict=True)
    } == {name.upper(): getattr(batch_wire, name.upper()) for name in delta}
    for name in (
        "sequence_id",
        "base_length",
        "token_ids",
        "matched_ngram_length",
        "source",
        "status",
    ):
        assert numbers(pb.Proposal, name) == [getattr(batch_wire, name.upper())]
    for name in (
        "SOURCE_SEQUENCE",
        "SOURCE_POOL",
        "STATUS_OK",
        "STATUS_NO_MATCH",
        "STATUS_INDEXING",
    ):
        assert getattr(pb, name) == getattr(batch_wire, name)


def test_what_is_written_is_what_protobuf_writes() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        rows = [
            (
                rng.randint(batch_wire.APPENDED, batch_wire.REFUSED),
                number(rng),
                rng.randrange(65),
                [number(rng) for _ in range(rng.randint(1, 60))],
                rng.randint(1, MAX_ID_BYTES),
            )
            for _ in range(rng.randrange(6))
        ]
        assert_written_as_by_protobuf(rows, number(rng))


def number(rng: random.Random) -> int:
    return rng.choice(
        [0, 127, 128, 2**21, 2**28, 2**32 - 1, rng.randrange(2 ** rng.randint(1, 32))]
    )


def assert_written_as_by_protobuf(
    rows: list[tuple[int, int, int, list[int], int]], batch_id: int
) -> None:
    scanned = np.zeros((len(rows), FIELDS), dtype=np.int64)
    payload, expected, refusals = b"", [], []
    for i, (outcome, length, reach, tokens, num_id_bytes) in enumerate(rows):
        sequence_id = (f"{i}" * MAX_ID_BYTES)[:num_id_bytes]
        scanned[i, batch_wire.ID_START] = len(payload)
        scanned[i, batch_wire.ID_BYTES] = num_id_bytes
        payload += sequence_id.encode()
        is_draft = outcome in (batch_wire.DRAFT, batch_wire.POOL_DRAFT)
        if outcome == batch_wire.REFUSED:
            refusal = Proposal(
                sequence_id=sequence_id,
                status=ProposalStatus.INVALID,
                message="x" * length if length < 300 else "",
            )
            expected.append(refusal)
            refusals.append(wire.response_to_proto(0, [refusal]).SerializeToString())
            continue
        expected.append(
            Proposal(
                sequence_id=sequence_id,
                status={
                    batch_wire.NO_MATCH: ProposalStatus.NO_MATCH,
                    batch_wire.INDEXING: ProposalStatus.INDEXING,
                }.get(outcome, ProposalStatus.OK),
                base_length=length,
                token_ids=tokens if is_draft else None,
                matched_ngram_length=reach if is_draft else 0,
                source=Source.POOL if outcome == batch_wire.POOL_DRAFT else Source.SEQUENCE,
            )
        )
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), (), ()]
    lengths = [len(tokens) for tokens in columns[3]]
    found = write_response(
        np.frombuffer(payload, dtype=np.uint8),
        scanned,
        batch_id,
        np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=np.int64),
        np.array(columns[2], dtype=np.int64),
        np.array([0, *itertools.accumulate(lengths)][: len(rows)], dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        np.array([t for tokens in columns[3] for t in tokens], dtype=np.uint32),
        np.frombuffer(b"".join(refusals), dtype=np.uint8),
        np.array([len(refusal) for refusal in refusals], dtype=np.int64),
    )
    assert found.tobytes() == wire.response_to_proto(batch_id, expected).SerializeToString()
