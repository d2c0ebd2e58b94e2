"""Drills of verifiers: they die, freeze, stall, are cut off, shut down, and run out of K/V."""

import asyncio

from tests.drills.requests import Record, mixed_requests
from tests.drills.run import Run

# Enough that both verifiers have some, and long enough to be hit in the middle.
_NUM_REQUESTS, _NUM_TOKENS = 8, 300


async def killed(run: Run) -> None:
    """A verifier is killed; the other goes on with its requests."""
    records = await _underway(run)
    victim = run.fleet.verifiers[await run.busiest_verifier()]
    run.disturb(victim.kill)
    await run.finish(records)
    run.expect_resumed(records, "verifier_gone")
    await asyncio.to_thread(victim.stop)
    await asyncio.to_thread(victim.start)


async def frozen(run: Run) -> None:
    """A verifier stops answering, and wakes up when its requests are elsewhere."""
    records = await _underway(run)
    victim = run.fleet.verifiers[await run.busiest_verifier()]
    run.disturb(victim.freeze)
    await run.finish(records)
    victim.thaw()
    run.expect_resumed(records, "verifier_gone")


async def stalled(run: Run) -> None:
    """A verifier's engine makes no step, while its process answers."""
    records = await _underway(run)
    # A verifier that the last drill froze gets no requests until it has answered for a while.
    while not await run.num_running(run.fleet.verifiers[-1]):
        await run.finish(records)
        records = await _underway(run)
    run.disturb(run.fleet.stall_file.touch)
    await run.finish(records)
    run.fleet.stall_file.unlink()
    run.expect_resumed(records, "verifier_gone")


async def cut_off(run: Run) -> None:
    """Nothing passes between the gateways and a verifier, and nobody is told."""
    records = await _underway(run)
    link = run.fleet.links_to_verifiers[await run.busiest_verifier()]
    run.disturb(link.cut)
    await run.finish(records)
    link.mend()
    run.expect_resumed(records, "verifier_gone")


async def reset(run: Run) -> None:
    """The connections to a verifier are reset; it goes on, for nobody."""
    records = await _underway(run)
    link = run.fleet.links_to_verifiers[await run.busiest_verifier()]
    run.disturb(link.reset)
    await run.finish(records)
    run.expect_resumed(records, "verifier_gone")


async def shut_down(run: Run) -> None:
    """A verifier gets SIGTERM; what it cannot finish in time goes on elsewhere."""
    records = await _underway(run)
    victim = run.fleet.verifiers[await run.busiest_verifier()]
    run.disturb(victim.terminate)
    await run.finish(records)
    run.expect_resumed(records, "verifier_draining")
    status = await asyncio.to_thread(victim.wait)
    run.expect(status == 0, f"{victim.name} ended with status {status}")
    await asyncio.to_thread(victim.start)


async def out_of_blocks(run: Run) -> None:
    """Long requests need more K/V than there is: sequences wait and are computed again."""
    records = await run.start(mixed_requests(24, num_tokens=400))
    await run.finish(records)
    run.expect_not_resumed(records)
    num_preemptions = sum(
        run.moved(verifier, "tandem_preemptions_total") for verifier in run.fleet.verifiers
    )
    run.expect(num_preemptions > 0, "no sequence was preempted: there was enough K/V")


async def _underway(run: Run) -> list[Record]:
    """Requests of every kind, with some tokens each and more to come."""
    records = await run.start(mixed_requests(_NUM_REQUESTS, num_tokens=_NUM_TOKENS))
    await run.underway(records)
    return records
