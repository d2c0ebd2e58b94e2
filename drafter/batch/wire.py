"""The wire's messages as the drafter's own types.

Owns what a well-formed request is, and which fields this server does not offer (those are refused
by name). `drafter.proto` says how much a request may hold. A batch is refused as a whole if it has
too many deltas or releases, or a delta without a proper id; a delta with too many tokens, and a
release that holds too much, are refused alone. Unary requests over their limits do not come here.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

import numpy as np
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import DecodeError as DecodeError

from drafter.errors import MalformedBatchError
from drafter.history.history import SequenceDelta
from drafter.ngram.params import (
    DEFAULT_PARAMS,
    DEFAULT_TOKENS_PER_MATCH,
    Algorithm,
    Keep,
    NgramParams,
    Overlap,
    Tie,
)
from drafter.refusals import InvalidDeltaError
from servicekit.message_limits import MessageLimits
from servicekit.telemetry.trace_context import is_trace_parent
from tandem.v1 import drafter_pb2, limits_pb2

_BATCH_LIMITS = MessageLimits(drafter_pb2.ProposeRequest.DESCRIPTOR, limits_pb2)
_DELTA_LIMITS = MessageLimits(drafter_pb2.SequenceDelta.DESCRIPTOR, limits_pb2)
_RELEASE_LIMITS = MessageLimits(drafter_pb2.Release.DESCRIPTOR, limits_pb2)

MAX_MESSAGE_BYTES = _BATCH_LIMITS.max_message_bytes
MAX_SEQUENCES_PER_BATCH = _BATCH_LIMITS.max_items("sequences")
MAX_RELEASES_PER_BATCH = _BATCH_LIMITS.max_items("releases")
MAX_ID_BYTES = _DELTA_LIMITS.max_bytes("sequence_id")
MAX_TOKENS_PER_DELTA = _DELTA_LIMITS.max_items("token_ids")

MAX_TOKEN_BYTES = 5
"""The longest varint that a uint32 takes."""

# A proposal without its tokens: an id of the longest kind and every number at its longest.
_PROPOSAL_OVERHEAD_BYTES = 112

E = TypeVar("E", bound=Enum)


def _by_number(wire: EnumDescriptor, own: type[E], *, unset: E) -> dict[int, E]:
    """Returns the drafter's own value of each number of a wire enum: `Tie.LATEST`, `TIE_LATEST`."""
    named = {value.number: value.name.split("_", 1)[1] for value in wire.values}
    return {number: own[name] if number else unset for number, name in named.items()}


_OVERLAPS = _by_number(drafter_pb2.Overlap.DESCRIPTOR, Overlap, unset=Overlap.DISJOINT)
_TIES = _by_number(drafter_pb2.Tie.DESCRIPTOR, Tie, unset=Tie.EARLIEST)
_ALGORITHMS = _by_number(drafter_pb2.Algorithm.DESCRIPTOR, Algorithm, unset=Algorithm.INDEX)
_KEEPS = _by_number(drafter_pb2.Keep.DESCRIPTOR, Keep, unset=Keep.NOTHING)
_ENUM_FIELDS: dict[str, tuple[EnumDescriptor, Mapping[int, Enum]]] = {
    "algorithm": (drafter_pb2.Algorithm.DESCRIPTOR, _ALGORITHMS),
    "overlap": (drafter_pb2.Overlap.DESCRIPTOR, _OVERLAPS),
    "tie": (drafter_pb2.Tie.DESCRIPTOR, _TIES),
}

check_counts = _BATCH_LIMITS.check_counts
"""Raises MessageLimitError if a batch's releases, or its deltas, are too many."""


def checked_sequence_ids(request: drafter_pb2.ProposeRequest) -> list[str]:
    """Returns the ids of the deltas in order, if the batch as a whole may be applied.

    So may its releases, except those that `named_releases` leaves out.

    Raises:
        MessageLimitError: there are too many of them, or of its releases.
        MalformedBatchError: a sequence is there twice or has no proper id.
    """
    check_counts(request)
    sequence_ids = [delta.sequence_id for delta in request.sequences]
    _check_ids(sequence_ids, "sequences")
    if len(set(sequence_ids)) < len(sequence_ids):
        _raise_duplicate(sequence_ids)
    return sequence_ids


def check_releases(releases: Sequence[drafter_pb2.Release]) -> None:
    """Returns if every release names a sequence.

    Raises:
        MalformedBatchError: one has no id.
    """
    _check_ids([release.sequence_id for release in releases], "releases")


def named_releases(releases: Sequence[drafter_pb2.Release]) -> list[drafter_pb2.Release]:
    """Returns the releases that name a sequence, and hold no more than they may.

    On a stream the others are left out: they have no answer that could refuse them, and must not
    end the stream of all sequences.
    """
    return [
        release
        for release in releases
        if _is_id(release.sequence_id)
        and len(release.feed_id.encode()) <= _RELEASE_LIMITS.max_bytes("feed_id")
    ]


def find_unsupported_keep(releases: Iterable[drafter_pb2.Release]) -> tuple[str, str] | None:
    """Returns the path and the value of the first `keep` that only newer clients know."""
    for i, release in enumerate(releases):
        if release.keep not in _KEEPS:
            return f"releases[{i}].keep", _name(drafter_pb2.Keep.DESCRIPTOR, release.keep)
    return None


def keep_from_proto(keep: "drafter_pb2.Keep.ValueType") -> Keep:
    """Returns what becomes of a released text; of one that is unknown here, nothing is kept."""
    return _KEEPS.get(keep, Keep.NOTHING)


def delta_from_proto(message: drafter_pb2.SequenceDelta) -> SequenceDelta:
    """Returns the delta as the drafter's own type.

    Raises:
        InvalidDeltaError: it brings too many tokens, or its params, where they count, are wrong or
            not offered.
    """
    base_length = message.base_length
    # Slicing a repeated field makes a list at once, which numpy takes faster than an iterator.
    numbers = message.token_ids[:]
    if len(numbers) > MAX_TOKENS_PER_DELTA:
        raise InvalidDeltaError(
            "token_ids", f"{len(numbers)} items are over the limit of {MAX_TOKENS_PER_DELTA}"
        )
    token_ids = np.array(numbers, dtype=np.uint32)
    if base_length > 0:
        return SequenceDelta(
            sequence_id=message.sequence_id,
            base_length=base_length,
            token_ids=token_ids,
            max_draft_tokens=message.max_draft_tokens,
            max_length=message.max_length,
        )
    return SequenceDelta(
        sequence_id=message.sequence_id,
        base_length=base_length,
        token_ids=token_ids,
        prompt_length=message.prompt_length,
        max_draft_tokens=message.max_draft_tokens,
        max_length=message.max_length,
        params=_params_from_proto(message.params),
        trace_parent=message.trace_parent if is_trace_parent(message.trace_parent) else "",
    )


def max_draft_tokens(num_sequences: int) -> int:
    """Returns how long each draft of a batch may be so that no response passes the size limit."""
    per_proposal_bytes = MAX_MESSAGE_BYTES // max(num_sequences, 1)
    return (per_proposal_bytes - _PROPOSAL_OVERHEAD_BYTES) // MAX_TOKEN_BYTES


def _params_from_proto(message: drafter_pb2.NgramParams) -> NgramParams:
    for field, (wire, known) in _ENUM_FIELDS.items():
        number = getattr(message, field)
        if number not in known:
            name = _name(wire, number)
            raise InvalidDeltaError(f"params.{field}", f"this server does not offer {name}")
    default = DEFAULT_PARAMS
    tie = _TIES[message.tie]
    tokens_per_match = DEFAULT_TOKENS_PER_MATCH if tie is Tie.LONGEST else 0
    if message.HasField("tokens_per_match"):
        tokens_per_match = message.tokens_per_match
    return NgramParams(
        min_ngram=message.min_ngram if message.HasField("min_ngram") else default.min_ngram,
        max_ngram=message.max_ngram if message.HasField("max_ngram") else default.max_ngram,
        overlap=_OVERLAPS[message.overlap],
        tie=tie,
        tokens_per_match=tokens_per_match,
        algorithm=_ALGORITHMS[message.algorithm],
        pool_id=message.pool_id,
        pool_min_ngram=message.pool_min_ngram,
    )


def _name(enum: EnumDescriptor, number: int) -> str:
    # A number that only a newer client knows has no name here.
    value = enum.values_by_number.get(number)
    return str(number) if value is None else value.name


def _is_id(sequence_id: str) -> bool:
    return 0 < len(sequence_id.encode()) <= _RELEASE_LIMITS.max_bytes("sequence_id")


def _check_ids(sequence_ids: list[str], field: str) -> None:
    for i, sequence_id in enumerate(sequence_ids):
        num_bytes = len(sequence_id.encode())
        if not 0 < num_bytes <= MAX_ID_BYTES:
            reason = f"{num_bytes} bytes are over {MAX_ID_BYTES}" if num_bytes else "it is empty"
            raise MalformedBatchError(f"{field}[{i}].sequence_id", reason)


def _raise_duplicate(sequence_ids: list[str]) -> None:
    seen: set[str] = set()
    for i, sequence_id in enumerate(sequence_ids):
        if sequence_id in seen:
            raise MalformedBatchError(
                f"sequences[{i}].sequence_id", f"{sequence_id!r} is in the batch twice"
            )
        seen.add(sequence_id)
