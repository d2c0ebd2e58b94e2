"""Well-formed requests, refusals that name their field, and the size of answers."""

import numpy as np
import pytest

from drafter.batch import wire
from drafter.ngram.params import (
    DEFAULT_PARAMS,
    MAX_POOL_ID_BYTES,
    Algorithm,
    NgramParams,
    Overlap,
    Tie,
)
from drafter.refusals import InvalidDeltaError
from servicekit.message_limits import MessageLimits
from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import limits_pb2


def test_all_fields_of_a_delta_are_read() -> None:
    delta = wire.delta_from_proto(
        pb.SequenceDelta(
            sequence_id="a",
            token_ids=[0, 5, 2**32 - 1],
            prompt_length=7,
            max_draft_tokens=24,
            max_length=4096,
            params=pb.NgramParams(
                min_ngram=1,
                max_ngram=32,
                overlap=pb.OVERLAP_ALLOWED,
                tie=pb.TIE_LATEST,
                algorithm=pb.ALGORITHM_KMP,
                tokens_per_match=0,
            ),
        )
    )
    assert delta.sequence_id == "a"
    assert delta.base_length == 0
    assert delta.token_ids.dtype == np.uint32
    assert delta.token_ids.tolist() == [0, 5, 2**32 - 1]
    assert (delta.prompt_length, delta.max_draft_tokens, delta.max_length) == (7, 24, 4096)
    assert delta.params == NgramParams(
        min_ngram=1,
        max_ngram=32,
        overlap=Overlap.ALLOWED,
        tie=Tie.LATEST,
        algorithm=Algorithm.KMP,
    )


@pytest.mark.parametrize(
    ("trace_parent", "is_valid"), [(f"00-{1:032x}-{2:016x}-01", True), ("00-1", False)]
)
def test_only_a_well_formed_trace_parent_is_read(trace_parent: str, is_valid: bool) -> None:
    delta = wire.delta_from_proto(pb.SequenceDelta(sequence_id="a", trace_parent=trace_parent))
    assert delta.trace_parent == (trace_parent if is_valid else "")


def test_absent_params_are_the_defaults() -> None:
    for params in (None, pb.NgramParams(), pb.NgramParams(algorithm=pb.ALGORITHM_INDEX)):
        delta = wire.delta_from_proto(pb.SequenceDelta(sequence_id="a", params=params))
        assert delta.params == DEFAULT_PARAMS


@pytest.mark.parametrize(("sent", "accepted"), [(None, 2), (0, 0), (3, 3)])
def test_tokens_per_match_is_two_under_the_longest_tie_unless_given(
    sent: int | None, accepted: int
) -> None:
    params = pb.NgramParams(tie=pb.TIE_LONGEST, tokens_per_match=sent)
    delta = wire.delta_from_proto(pb.SequenceDelta(sequence_id="a", params=params))
    assert delta.params == NgramParams(tie=Tie.LONGEST, tokens_per_match=accepted)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (pb.NgramParams(min_ngram=0), "params.min_ngram"),
        (pb.NgramParams(max_ngram=33), "params.max_ngram"),
        (pb.NgramParams(max_ngram=0), "params.max_ngram"),
        (pb.NgramParams(max_ngram=2**32 - 1), "params.max_ngram"),
        (pb.NgramParams(min_ngram=4, max_ngram=3), "params.max_ngram"),
        (pb.NgramParams(min_ngram=6), "params.max_ngram"),
        (pb.NgramParams(tokens_per_match=1), "params.tokens_per_match"),
        (pb.NgramParams(pool_id="ä" * 129), "params.pool_id"),
    ],
)
def test_params_out_of_range_or_not_offered_are_refused_by_name(
    params: pb.NgramParams, field: str
) -> None:
    with pytest.raises(InvalidDeltaError) as refusal:
        wire.delta_from_proto(pb.SequenceDelta(sequence_id="a", params=params))
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["overlap", "tie", "algorithm"])
def test_unknown_enum_values_are_refused_by_name(field: str) -> None:
    # 77 is in no enum; the Python API refuses to make one, the wire does not.
    number = pb.NgramParams.DESCRIPTOR.fields_by_name[field].number
    params = pb.NgramParams.FromString(bytes([number << 3, 77]))
    with pytest.raises(InvalidDeltaError, match=rf"^params\.{field}: .* 77$"):
        wire.delta_from_proto(pb.SequenceDelta(sequence_id="a", params=params))


def test_params_are_read_at_creation_only() -> None:
    delta = wire.delta_from_proto(
        pb.SequenceDelta(sequence_id="a", base_length=1, params=pb.NgramParams(tie=pb.TIE_LONGEST))
    )
    assert delta.params == DEFAULT_PARAMS


def delta(sequence_id: str, num_tokens: int = 0) -> pb.SequenceDelta:
    return pb.SequenceDelta(sequence_id=sequence_id, token_ids=range(num_tokens))


def test_a_batch_at_every_limit_is_accepted() -> None:
    deltas = [delta("a" * 64, 8192), delta("ä" * 32)]
    deltas += [delta(f"{i}") for i in range(4094)]
    request = pb.ProposeRequest(sequences=deltas)
    wire.checked_sequence_ids(request)


def test_limits_of_kernels_equal_the_contract_s() -> None:
    limits = MessageLimits(pb.SequenceDelta.DESCRIPTOR, limits_pb2)
    params = MessageLimits(pb.NgramParams.DESCRIPTOR, limits_pb2)
    assert limits.max_bytes("sequence_id") == wire.MAX_ID_BYTES
    assert params.max_bytes("pool_id") == MAX_POOL_ID_BYTES


@pytest.mark.parametrize("num_sequences", [1, 2, 64, 1000, 4096])
def test_no_answer_is_larger_than_a_message_may_be(num_sequences: int) -> None:
    max_tokens = wire.max_draft_tokens(num_sequences)
    assert max_tokens >= 24  # a usual hint fits into every batch
    draft = pb.Proposal(
        sequence_id="ä" * 32,
        status=pb.STATUS_OK,
        base_length=2**32 - 1,
        token_ids=[2**32 - 1] * max_tokens,
        matched_ngram_length=64,
        source=pb.SOURCE_POOL,
        known_length=2**32 - 1,
    )
    response = pb.ProposeResponse(batch_id=2**64 - 1, proposals=[draft] * num_sequences)
    assert response.ByteSize() <= wire.MAX_MESSAGE_BYTES


def test_no_refusal_makes_an_answer_too_large() -> None:
    refusal = pb.Proposal(
        sequence_id="ä" * 32, status=pb.STATUS_INVALID, message="params.max_ngram: " * 8
    )
    response = pb.ProposeResponse(proposals=[refusal] * wire.MAX_SEQUENCES_PER_BATCH)
    assert response.ByteSize() <= wire.MAX_MESSAGE_BYTES
