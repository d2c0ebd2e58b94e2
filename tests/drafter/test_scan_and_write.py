"""The kernels' wire format against protobuf's own."""

import random

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafter.batch import scan as columns
from drafter.batch import wire
from drafter.batch.scan import FIELDS, IRREGULAR, ODD, UNKNOWN, scan_request
from drafter.batch.write import write_response
from drafter.history.id_table import MAX_ID_BYTES
from drafter.ngram.params import NgramParams
from drafter.ngram.text import IndexedText
from servicekit.kernels.memory import address_of
from servicekit.kernels.varints import read_varint
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
    trace_parent=st.sampled_from(["", "00-1"]),
)
REQUESTS = st.builds(
    pb.ProposeRequest,
    batch_id=st.one_of(NUMBERS, st.sampled_from([2**32, 2**64 - 1])),
    sequences=st.lists(DELTAS, max_size=5),
    releases=st.lists(st.builds(pb.Release, sequence_id=IDS), max_size=2),
)


def scan(payload: bytes) -> tuple[list[list[int]], int, int] | None:
    """The rows, the batch id and the number of releases; None: irregular."""
    rows = np.zeros((8, FIELDS), dtype=np.int64)
    odd = np.zeros((12, 3), dtype=np.int64)
    head = np.zeros(3, dtype=np.int64)
    data = np.frombuffer(payload, dtype=np.uint8)
    count = scan_request(data, SEED, 5, False, rows, odd, head)
    if count == IRREGULAR:
        return None
    num_releases = 0
    odd_rows = []
    for row, start, end in odd[: head[1]].tolist():
        assert end <= len(payload)
        if row < 0:
            assert payload[start] == columns.RELEASES << 3 | columns.BYTES
            num_releases += 1
        else:
            assert rows[row, [columns.START, columns.END]].tolist() == [start, end]
            odd_rows.append(row)
    assert odd_rows == np.flatnonzero(rows[:count, columns.SLOT] == ODD).tolist()
    assert head[2] == rows[:count, columns.NUM_TOKENS].max(initial=0)
    return rows[:count].tolist(), int(head[0].view(np.uint64)), num_releases


def check(payload: bytes) -> bool:
    """Asserts that a scan reads a message as protobuf does; returns whether it is regular."""
    found = scan(payload)
    if found is None:
        return False
    rows, batch_id, num_releases = found
    plain_spans = [
        (row[columns.START], row[columns.END]) for row in rows if row[columns.SLOT] != ODD
    ]
    odd_parts, at = [], 0
    for start, end in plain_spans:
        odd_parts.append(payload[at:start])
        at = end
    try:
        pb.ProposeRequest.FromString(b"".join([*odd_parts, payload[at:]]))
        parsed = pb.ProposeRequest.FromString(payload)
    except DecodeError:
        # The fault must be in an odd field, which the server parses.
        for start, end in plain_spans:
            pb.ProposeRequest.FromString(payload[start:end])
        return False
    assert (parsed.batch_id, len(parsed.releases)) == (batch_id, num_releases)
    assert len({delta.sequence_id for delta in parsed.sequences}) == len(parsed.sequences)
    for row, delta in zip(rows, parsed.sequences, strict=True):
        start = row[columns.ID_START]
        assert payload[start : start + row[columns.ID_BYTES]].decode() == delta.sequence_id
        assert 0 < len(delta.sequence_id) <= MAX_ID_BYTES
        assert row[columns.BASE] == delta.base_length
        assert row[columns.NUM_TOKENS] == len(delta.token_ids)
        assert row[columns.DRAFT_LIMIT] == delta.max_draft_tokens
        assert row[columns.LENGTH_LIMIT] == delta.max_length
        is_plain = (
            delta.base_length > 0
            and len(delta.token_ids) <= 5
            and not (delta.HasField("params") or delta.trace_parent)
        )
        assert (row[columns.SLOT] == UNKNOWN) == is_plain
        at, tokens = row[columns.TOKENS_START], []
        for _ in delta.token_ids:
            token, at = read_varint(address_of(np.frombuffer(payload, np.uint8)), at, len(payload))
            tokens.append(token)
        assert tokens == list(delta.token_ids)
        [alone] = pb.ProposeRequest.FromString(
            payload[row[columns.START] : row[columns.END]]
        ).sequences
        assert alone == delta
    return True


@settings(max_examples=examples(60), deadline=None)
@given(request=REQUESTS)
@example(pb.ProposeRequest())
def test_messages_that_protobuf_writes_are_scanned_as_protobuf_parses_them(
    request: pb.ProposeRequest,
) -> None:
    is_regular = check(request.SerializeToString())
    ids = [delta.sequence_id for delta in request.sequences]
    is_usual = all(id_.isascii() and 0 < len(id_) <= 64 for id_ in ids) and len(set(ids)) == len(
        ids
    )
    assert is_regular == is_usual


def test_damaged_messages_are_scanned_as_protobuf_parses_them_or_are_irregular() -> None:
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


def test_field_numbers_equal_the_contract_s() -> None:
    def numbers(message: type, *names: str) -> list[int]:
        fields = message.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]
        return [fields[name].number for name in names]

    assert numbers(pb.ProposeRequest, "batch_id", "sequences", "releases") == [
        columns.BATCH_ID,
        columns.SEQUENCES,
        columns.RELEASES,
    ]
    assert numbers(pb.ProposeResponse, "batch_id", "proposals") == [
        columns.BATCH_ID,
        columns.PROPOSALS,
    ]
    delta = [field.name for field in pb.SequenceDelta.DESCRIPTOR.fields]
    assert {
        name.upper(): number
        for name, number in zip(delta, numbers(pb.SequenceDelta, *delta), strict=True)
    } == {name.upper(): getattr(columns, name.upper()) for name in delta}
    for name in (
        "sequence_id",
        "base_length",
        "token_ids",
        "matched_ngram_length",
        "source",
        "status",
    ):
        assert numbers(pb.Proposal, name) == [getattr(columns, name.upper())]
    for name in (
        "SOURCE_SEQUENCE",
        "SOURCE_POOL",
        "STATUS_OK",
        "STATUS_NO_MATCH",
        "STATUS_INDEXING",
    ):
        assert getattr(pb, name) == getattr(columns, name)


def test_responses_equal_protobuf_s_bytes() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        assert_written_as_by_protobuf(rng, rng.randrange(6))


def number(rng: random.Random) -> int:
    return rng.choice(
        [0, 127, 128, 2**21, 2**28, 2**32 - 1, rng.randrange(2 ** rng.randint(1, 32))]
    )


STATUSES = {columns.NO_MATCH: pb.STATUS_NO_MATCH, columns.INDEXING: pb.STATUS_INDEXING}


def assert_written_as_by_protobuf(rng: random.Random, num_rows: int) -> None:
    rows = np.zeros((num_rows, FIELDS), dtype=np.int64)
    text = IndexedText(params=NgramParams(), max_tokens=1 << 10)
    expected = pb.ProposeResponse(batch_id=rng.choice([number(rng), 2**64 - 1]))
    payload, refusals = b"", b""
    drafts: list[int] = []
    for i, row in enumerate(rows):
        outcome = rng.randint(columns.APPENDED, columns.INVALID)
        sequence_id = (f"{i}" * MAX_ID_BYTES)[: rng.randint(1, MAX_ID_BYTES)]
        row[[columns.ID_START, columns.ID_BYTES]] = len(payload), len(sequence_id)
        row[[columns.TEXT, columns.OUTCOME]] = text.address, outcome
        payload += sequence_id.encode()
        if outcome in (columns.OUT_OF_SYNC, columns.INVALID):
            refusal = wire.refusal(sequence_id, outcome, number(rng), "x" * rng.randrange(200))
            expected.MergeFromString(refusal)
            row[[columns.TEXT, columns.TEXT_LENGTH]] = len(refusals), len(refusal)
            refusals += refusal
            continue
        row[columns.TEXT_LENGTH] = number(rng)
        proposal = expected.proposals.add(
            sequence_id=sequence_id,
            base_length=int(row[columns.TEXT_LENGTH]),
            status=STATUSES.get(outcome, pb.STATUS_OK),
        )
        if outcome in (columns.DRAFT, columns.POOL_DRAFT):
            tokens = [number(rng) for _ in range(rng.randint(1, 60))]
            row[[columns.DRAFT_START, columns.DRAFT_LENGTH]] = len(drafts), len(tokens)
            row[columns.MATCH_LENGTH] = rng.randrange(65)
            drafts += tokens
            proposal.token_ids.extend(tokens)
            proposal.matched_ngram_length = int(row[columns.MATCH_LENGTH])
            is_pool = outcome == columns.POOL_DRAFT
            proposal.source = pb.SOURCE_POOL if is_pool else pb.SOURCE_SEQUENCE
    response = np.empty(10_000, dtype=np.uint8)
    tally = np.empty(columns.NUM_OUTCOMES, dtype=np.int64)
    num_bytes, num_backlog = write_response(
        np.frombuffer(payload, dtype=np.uint8),
        rows,
        num_rows,
        int(np.uint64(expected.batch_id).view(np.int64)),
        np.array(drafts, dtype=np.uint32),
        np.frombuffer(refusals, dtype=np.uint8),
        response,
        tally,
        np.empty((num_rows, 2), dtype=np.int64),
        32,
        256,
    )
    assert num_backlog == 0, "the text is empty"
    assert response[:num_bytes].tobytes() == expected.SerializeToString()
    assert tally.tolist() == np.bincount(rows[:, columns.OUTCOME], minlength=8).tolist()


def test_a_normalized_message_is_regular() -> None:
    """All that protobuf accepts may come: unknown fields, ids of any letters, split lists."""
    delta = pb.SequenceDelta(sequence_id="ä", base_length=3, token_ids=[1, 2])
    request = pb.ProposeRequest(batch_id=2**64 - 1, sequences=[delta])
    split = pb.SequenceDelta(sequence_id="b", base_length=1, token_ids=[3]).SerializeToString()
    split += pb.SequenceDelta(token_ids=[4]).SerializeToString()
    payload = request.SerializeToString() + b"\x12" + bytes([len(split)]) + split
    payload += b"\x98\x01\x05"  # a field 19
    assert scan(payload) is None
    rows = np.zeros((8, FIELDS), dtype=np.int64)
    head = np.zeros(3, dtype=np.int64)
    normal = np.frombuffer(wire.normalize(payload), dtype=np.uint8)
    count = scan_request(normal, SEED, 5, True, rows, np.zeros((4, 3), dtype=np.int64), head)
    assert count == 2
    assert rows[:2, columns.NUM_TOKENS].tolist() == [2, 2]
    assert head[0].view(np.uint64) == 2**64 - 1
