"""A drafter that lies in any way costs its sequences their drafts, and nobody anything else."""

import asyncio

import pytest

from tandem.v1 import verifier_pb2 as pb
from tests.verifier.drafters.conftest import StartDrafter, StartScripted
from tests.verifier.drafters.drafted_sessions import drafts_of, make_open, num_faults, plain
from tests.verifier.drafters.feeding import num_unanswered
from tests.verifier.drafters.lies import HONEST_KINDS, LIES
from tests.verifier.running_verifier import StartVerifier

pytestmark = pytest.mark.stand_in


@pytest.mark.parametrize("kind", LIES)
async def test_the_output_is_plain_and_other_sequences_are_drafted_for(
    start_verifier: StartVerifier,
    start_scripted: StartScripted,
    start_drafter: StartDrafter,
    kind: str,
) -> None:
    liar = await start_scripted(LIES[kind])
    liar.ends_streams = kind == "end"
    honest = await start_drafter()
    running = await start_verifier(
        drafters=[liar.address, honest], draft_deadline_s=0.1 if kind == "silence" else 5.0
    )
    session = await running.greeted_session()
    expected = await plain(session)
    opens = [
        *(
            make_open(f"lied to {wait}", liar.address, draft_wait=wait, num_speculative_tokens=7)
            for wait in (pb.DRAFT_WAIT_ADAPTIVE, pb.DRAFT_WAIT_ALWAYS, pb.DRAFT_WAIT_NEVER)
        ),
        make_open("honest", honest, draft_wait=pb.DRAFT_WAIT_ALWAYS),
    ]
    await session.open(*opens)
    for opened in opens:
        assert await session.wait_finished(opened.sequence_id) == expected
    assert drafts_of(session, "honest")[1] > 0
    if kind not in HONEST_KINDS:
        assert num_faults(running) > 0 or any(
            event.drafter_status.state == pb.DrafterStatus.STATE_DOWN for event in session.events
        )
    else:
        assert num_faults(running) == 0
    # What it may leave behind is bounded by what is in flight.
    drafters = {each.address: each for each in running.engine._drafters.in_use}
    assert num_unanswered(drafters[liar.address].feed) <= 8
    async with asyncio.timeout(60):
        await running.sync()
