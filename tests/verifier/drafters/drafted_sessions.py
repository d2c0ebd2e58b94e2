"""Sessions of a real verifier whose sequences are drafted for by drafters on real sockets."""

from typing import Any

from tandem.v1 import drafter_pb2, sampling_pb2
from tandem.v1 import verifier_pb2 as pb
from tests.verifier.opens import PROMPT
from tests.verifier.running_verifier import ClientSession, RunningVerifier

# The output repeats most of the prompt.
NUM_NEW_TOKENS = 48
SEEDED = sampling_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=7)


def make_open(sequence_id: str, address: str = "", **fields: Any) -> pb.Open:
    defaults: dict[str, Any] = {
        "token_ids": PROMPT,
        "max_new_tokens": NUM_NEW_TOKENS,
        "ignore_eos": True,
        "ngram": drafter_pb2.NgramParams(min_ngram=2, max_ngram=5),
        "drafter_address": address,
    }
    return pb.Open(sequence_id=sequence_id, **(defaults | fields))


async def output_of(session: ClientSession, opened: pb.Open) -> list[int]:
    """Opens a sequence; its whole output."""
    await session.open(opened)
    return await session.wait_finished(opened.sequence_id)


async def plain(session: ClientSession, **fields: Any) -> list[int]:
    """The output without drafts."""
    sequence_id = f"plain {len(session.events)}"
    return await output_of(
        session, make_open(sequence_id, num_speculative_tokens=0, ngram=None, **fields)
    )


def statuses(session: ClientSession) -> list[tuple[str, int]]:
    """What a session was told of drafters, in order."""
    return list(session.drafter_statuses)


async def wait_status(session: ClientSession, address: str, state: int) -> None:
    while (address, state) not in statuses(session):
        await session.read()


def num_faults(running: RunningVerifier, reason: str | None = None) -> float:
    """Faults of drafters, of one kind or of all."""
    return sum(
        sample.value
        for metric in running.registry.collect()
        for sample in metric.samples
        if sample.name == "tandem_verifier_drafter_faults_total"
        and reason in (None, sample.labels["reason"])
    )


def drafts_of(session: ClientSession, sequence_id: str) -> tuple[int, int]:
    """Drafts verified and accepted."""
    decided = session.decided(sequence_id)
    return (
        sum(each.num_draft_tokens for each in decided),
        sum(each.num_accepted_tokens for each in decided),
    )
