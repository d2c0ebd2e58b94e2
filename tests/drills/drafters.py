"""Drills of the drafter: it dies, freezes, is cut off, shuts down, or lies. It costs no token."""

import asyncio
from collections.abc import Callable

from tandem.v1 import gateway_pb2
from tests.drills.requests import Record, mixed_requests
from tests.drills.run import Run, until

_NUM_REQUESTS, _NUM_TOKENS = 8, 300
# Of requests that only look whether there are drafts; both verifiers get some.
_NUM_SHORT, _NUM_SHORT_TOKENS = 4, 48


async def killed(run: Run) -> None:
    """The drafter is killed, and started again."""
    drafter = run.fleet.drafter
    await _lose(run, drafter.kill, _lost_streams)
    await asyncio.to_thread(drafter.stop)
    await asyncio.to_thread(drafter.start)
    await _expect_drafts(run)


async def frozen(run: Run) -> None:
    """The drafter stops answering, and wakes up."""
    await _lose(run, run.fleet.drafter.freeze, _late_answers)
    run.fleet.drafter.thaw()
    await _expect_drafts(run)


async def cut_off(run: Run) -> None:
    """Nothing passes between the verifiers and the drafter, and nobody is told."""
    await _lose(run, run.fleet.link_to_drafter.cut, _late_answers)
    run.fleet.link_to_drafter.mend()
    await _expect_drafts(run)


async def reset(run: Run) -> None:
    """The connections to the drafter are reset."""
    await _lose(run, run.fleet.link_to_drafter.reset, _lost_streams)
    await _expect_drafts(run)


async def shut_down(run: Run) -> None:
    """The drafter gets SIGTERM."""
    drafter = run.fleet.drafter
    await _lose(run, drafter.terminate, _lost_streams)
    status = await asyncio.to_thread(drafter.wait)
    run.expect(status == 0, f"{drafter.name} ended with status {status}")
    await asyncio.to_thread(drafter.start)
    await _expect_drafts(run)


async def lying(run: Run) -> None:
    """A drafter answers with drafts that are random, stale, ahead, too long or out of range."""
    drafter = run.fleet.drafter
    await asyncio.to_thread(drafter.stop)
    await asyncio.to_thread(drafter.start, module="tests.drills.lying_drafter")

    async def lies_arrive() -> bool:
        records = await run.start(_requests())
        await run.finish(records)
        run.expect_not_resumed(records)
        # Verifiers soon learn that its drafts do not stand, and verify hardly any.
        return sum(_num_faults(run, reason="odd_proposal")) > 0

    run.expect(await until(lies_arrive), "no lie reached a verifier")
    await asyncio.to_thread(drafter.stop)
    await asyncio.to_thread(drafter.start)
    await _expect_drafts(run)


def _requests() -> list[gateway_pb2.GenerateRequest]:
    return mixed_requests(_NUM_REQUESTS, num_tokens=_NUM_TOKENS)


async def _lose(
    run: Run, lose: Callable[[], object], find_signs: Callable[[Run], list[float]]
) -> None:
    """Requests lose their drafter on the way.

    Args:
        find_signs: what each verifier has noticed of it.
    """
    # One that is put aside is asked nothing, and not missed.
    await _expect_drafts(run)
    records = await run.start(_requests())
    await run.underway(records)
    run.disturb(lose)
    await run.finish(records)
    run.expect_not_resumed(records)

    async def is_noticed() -> bool:
        return all(find_signs(run))

    run.expect(await until(is_noticed), "a verifier did not notice that the drafter was lost")


async def _expect_drafts(run: Run) -> None:
    """The drafter drafts for every verifier again, soon."""

    async def drafts() -> bool:
        records = await run.start(mixed_requests(_NUM_SHORT, num_tokens=_NUM_SHORT_TOKENS))
        await run.finish(records)
        up = [
            verifier.metrics().total("tandem_verifier_drafters", state="up")
            for verifier in run.fleet.verifiers
        ]
        return all(up) and _num_drafts(records) > 0

    run.expect(await until(drafts), "the drafter is not used again")


def _num_drafts(records: list[Record]) -> int:
    return sum(usage.num_drafts for record in records for usage in record.usages.values())


def _late_answers(run: Run) -> list[float]:
    return _num_faults(run, reason="late_answer")


def _lost_streams(run: Run) -> list[float]:
    """How many of its streams to the drafter each verifier has lost."""
    return [
        sum(line["event"] == "peer_down" and "drafter" in line for line in run.log_lines(verifier))
        for verifier in run.fleet.verifiers
    ]


def _num_faults(run: Run, *, reason: str) -> list[float]:
    return [
        run.moved(verifier, "tandem_verifier_drafter_faults_total", reason=reason)
        for verifier in run.fleet.verifiers
    ]
