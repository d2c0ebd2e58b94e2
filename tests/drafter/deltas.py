"""Deltas as a gateway sends them."""

from collections.abc import Sequence
from typing import Any

from drafter.batch.wire import MAX_TOKENS_PER_DELTA
from tandem.v1 import drafter_pb2 as pb

INDEXED = pb.NgramParams(tie=pb.TIE_LONGEST, tokens_per_match=0)
"""The options with an index; texts with others are scanned."""


def delta(
    sequence_id: str,
    base_length: int,
    token_ids: Sequence[int],
    max_draft_tokens: int = 4,
    **fields: Any,
) -> pb.SequenceDelta:
    return pb.SequenceDelta(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=token_ids,
        max_draft_tokens=max_draft_tokens,
        **fields,
    )


def replay(
    sequence_id: str, token_ids: Sequence[int], *, max_draft_tokens: int = 0, **fields: Any
) -> list[pb.SequenceDelta]:
    """A whole history in the longest deltas."""
    return [
        delta(
            sequence_id,
            start,
            token_ids[start : start + MAX_TOKENS_PER_DELTA],
            max_draft_tokens,
            **fields,
        )
        for start in range(0, len(token_ids), MAX_TOKENS_PER_DELTA)
    ]


def live_batch(step: int) -> pb.ProposeRequest:
    """A verifier's step: eight sequences with a few new tokens each, and a draft for each."""
    return pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=f"live{i}",
                base_length=3 * step,
                token_ids=[1, 2, 3],
                max_draft_tokens=8,
            )
            for i in range(8)
        ]
    )
