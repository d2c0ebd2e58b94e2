"""Unknown fields are found wherever they are, and cheaply however many they are."""

import pytest
from google.protobuf import unknown_fields as library
from google.protobuf.message import Message

from servicekit import unknown_fields
from servicekit.unknown_fields import find_unknown_field
from tandem.v1 import drafter_pb2, gateway_pb2, sampling_pb2

UNKNOWN = b"\xa0\x3f\x01"  # field 1012: 1


def newer_sampling(num_fields: int = 1) -> sampling_pb2.SamplingParams:
    sampling = sampling_pb2.SamplingParams(temperature=1.0)
    sampling.MergeFromString(UNKNOWN * num_fields)
    return sampling


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (sampling_pb2.SamplingParams(temperature=1.0), ""),
        (newer_sampling(), "1012"),
        (gateway_pb2.GenerateRequest(sampling=newer_sampling()), "sampling.1012"),
        (
            drafter_pb2.ProposeRequest(
                sequences=[drafter_pb2.SequenceDelta.FromString(b"\x0a\x01a" + UNKNOWN)]
            ),
            "unknown",
        ),
    ],
)
def test_its_path_and_number_are_told(message: Message, path: str) -> None:
    assert find_unknown_field(message) == path


def test_very_many_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of 4 MiB can have a million: to list them takes a second and 150 MB."""

    def fail(message: Message) -> library.UnknownFieldSet:
        raise AssertionError("they were listed")

    monkeypatch.setattr(unknown_fields, "UnknownFieldSet", fail)
    request = gateway_pb2.GenerateRequest(sampling=newer_sampling(10_000))
    assert find_unknown_field(request) == "sampling.unknown"
