"""Sequences that leave their text in a pool or draft from one, over a real connection."""

from typing import Any

from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import RunningDrafter


def pool_delta(
    sequence_id: str, token_ids: list[int], *, pool_id: str = "p", **options: Any
) -> pb.SequenceDelta:
    prompt_length = options.pop("prompt_length", 0)
    return pb.SequenceDelta(
        sequence_id=sequence_id,
        token_ids=token_ids,
        prompt_length=prompt_length,
        max_draft_tokens=8,
        params=pb.NgramParams(pool_id=pool_id, **options),
    )


async def keep_in_pool(
    running: RunningDrafter,
    token_ids: list[int],
    *,
    pool_id: str = "p",
    keep: "pb.Keep.ValueType" = pb.KEEP_ALL,
    prompt_length: int = 0,
) -> None:
    """Creates a sequence of this text, and releases it into its pool."""
    created = pool_delta("fed", token_ids, pool_id=pool_id, prompt_length=prompt_length)
    await running.propose(created)
    release = pb.Release(sequence_id="fed", keep=keep)
    await running.stub.Release(pb.ReleaseRequest(releases=[release]))
    await running.drafter.pool_keeper.settle()


async def draft_of(
    running: RunningDrafter, token_ids: list[int], **options: Any
) -> tuple[list[int], int, int]:
    [proposal] = await running.propose(pool_delta("asking", token_ids, **options))
    return list(proposal.token_ids), proposal.matched_ngram_length, proposal.source


NOTHING: tuple[list[int], int, int] = ([], 0, pb.SOURCE_UNSPECIFIED)
