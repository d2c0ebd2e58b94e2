"""A drafter process that is paused, killed or restarted costs no token, and drafts again."""

import asyncio
import contextlib
import signal
import threading

import pytest

from tandem.v1 import verifier_pb2 as pb
from tests.module_process import drafter_at
from tests.verifier.drafters.drafted_sessions import (
    make_open,
    num_faults,
    plain,
    statuses,
    wait_status,
)
from tests.verifier.running_verifier import ClientSession, RunningVerifier, StartVerifier
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import ComputesLogits
from verifier.batch.target_model import FloatArray
from verifier.build import LoadedModel

pytestmark = pytest.mark.slow

UP, SLOW, DOWN = (
    pb.DrafterStatus.STATE_UP,
    pb.DrafterStatus.STATE_SLOW,
    pb.DrafterStatus.STATE_DOWN,
)
# Of which the first test needs some 50, since it holds the steps while a drafter starts; the second
# one decodes for the second after which a drafter is tried again.
SOME_NEW_TOKENS, NUM_NEW_TOKENS = 800, 1900


async def accept_drafts(session: ClientSession, after: int) -> int:
    """Reads on until drafts were accepted after so many decisions; how many decisions by then."""
    while True:
        decided = session.decided("a")
        assert not any(each.finish_reason for each in decided[after:]), "the text is over"
        if any(each.num_accepted_tokens for each in decided[after:]):
            return len(decided)
        after = max(after, len(decided))
        await session.read()


@pytest.mark.timeout(400)
async def test_a_drafter_that_is_killed_and_restarted_drafts_again_for_the_same_sequence(
    start_verifier: StartVerifier, bundled_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run = threading.Event()
    may_run.set()
    assert isinstance(bundled_model.model, ComputesLogits)
    forward = bundled_model.model.forward

    def pausable(layout: BatchLayout) -> FloatArray:
        may_run.wait()
        return forward(layout)

    monkeypatch.setattr(bundled_model.model, "forward", pausable)
    async with contextlib.AsyncExitStack() as exits:
        first, address = await exits.enter_async_context(drafter_at("127.0.0.1:0"))
        running = await start_verifier(drafters=[address], draft_deadline_s=5.0)
        session = await running.greeted_session()
        expected = await plain(session, max_new_tokens=SOME_NEW_TOKENS)
        # Steps of one draft, so that the text lasts; it waits for hints, where there are any.
        await session.open(
            make_open(
                "a",
                address,
                max_new_tokens=SOME_NEW_TOKENS,
                num_speculative_tokens=1,
                draft_wait=pb.DRAFT_WAIT_ALWAYS,
            )
        )
        await accept_drafts(session, 0)
        first.kill()
        await first.wait()
        await wait_status(session, address, DOWN)
        num_decided = len(session.decided("a"))
        await session.wait_decided("a", num_decided + 10)
        may_run.clear()
        try:
            await exits.enter_async_context(drafter_at(address))
            # Connected meanwhile, which the engine hears after its step.
            await until_up_again(running)
        finally:
            may_run.set()
        while statuses(session)[-1] != (address, UP):
            await session.read()
        await accept_drafts(session, len(session.decided("a")))
        assert await session.wait_finished("a") == expected
        assert num_faults(running) == 0, "to be gone is none"


async def until_up_again(running: RunningVerifier) -> None:
    while sum(entry["event"] == "peer_up" for entry in running.log) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.timeout(400)
async def test_a_paused_drafter_is_put_aside_and_comes_back_with_its_histories(
    start_verifier: StartVerifier,
) -> None:
    async with drafter_at("127.0.0.1:0") as (process, address):
        running = await start_verifier(drafters=[address], draft_deadline_s=0.25)
        session = await running.greeted_session()
        expected = await plain(session, max_new_tokens=NUM_NEW_TOKENS)
        await session.open(
            make_open(
                "a",
                address,
                max_new_tokens=NUM_NEW_TOKENS,
                num_speculative_tokens=1,
                draft_wait=pb.DRAFT_WAIT_ALWAYS,
            )
        )
        await accept_drafts(session, 0)
        process.send_signal(signal.SIGSTOP)
        try:
            await wait_status(session, address, SLOW)
            num_decided = len(session.decided("a"))
            await session.wait_decided("a", num_decided + 10)
        finally:
            process.send_signal(signal.SIGCONT)
        while statuses(session)[-1] != (address, UP):
            await session.read()
        assert (address, DOWN) not in statuses(session), "it keeps its stream and its histories"
        assert await session.wait_finished("a") == expected
        assert num_faults(running, "late_answer") >= 3
        await session.open(
            make_open("b", address, max_new_tokens=200, draft_wait=pb.DRAFT_WAIT_ALWAYS)
        )
        assert await session.wait_finished("b") == expected[:200]
        assert sum(each.num_accepted_tokens for each in session.decided("b")) > 20
