"""Drills of a rollout: every process restarts, replicas come and go, under steady load."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from tandem.free_ports import free_port
from tests.drills.fleet import Member
from tests.drills.link import running_link
from tests.drills.requests import Record, mixed_requests
from tests.drills.run import Run, until
from tests.drills.whole_file import write_whole

_NUM_STREAMS, _NUM_TOKENS = 6, 200


async def rolling_restart(run: Run) -> None:
    """Each process gets SIGTERM and is started again before the next one."""
    # Clients prefer different gateways.
    async with _steady_load(run, [run.channels, run.channels[::-1]]) as records:
        for member in run.fleet.members:
            await _streaming(records)
            member.terminate()
            status = await asyncio.to_thread(member.wait)
            run.expect(status == 0, f"{member.name} ended with status {status}")
            await asyncio.to_thread(member.start)
            await run.connected()


async def scaled(run: Run) -> None:
    """A name stands for one verifier, for two, and for the other one."""
    hosts = ("127.0.0.2", "127.0.0.3")
    port = free_port()
    hosts_file = run.fleet.folder / "hosts"
    hosts_file.write_text(hosts[0])
    first, second = run.fleet.verifiers
    with (
        running_link(first.address, listen=f"{hosts[0]}:{port}"),
        running_link(second.address, listen=f"{hosts[1]}:{port}"),
        run.fleet.another_gateway(
            *("--hosts-file", str(hosts_file)),
            "--peer-allow-plaintext",
            verifiers=f"verifiers.test:{port}",
            module="tests.drills.named_gateway",
        ) as gateway,
    ):
        await _expect(run, _has_verifiers(gateway, 1), "the name's one verifier is not used")
        async with (
            grpc.aio.insecure_channel(gateway.address) as channel,
            _steady_load(run, [[channel]]) as records,
        ):
            await _streaming(records)
            write_whole(hosts_file, " ".join(hosts).encode())
            await _expect(run, _has_verifiers(gateway, 2), "a verifier that came is not used")
            await _expect(run, _is_busy(run, second), "a verifier that came gets no request")
            write_whole(hosts_file, hosts[1].encode())
            await _expect(run, _has_verifiers(gateway, 1), "a verifier that went is kept")
            await _streaming(records)


@asynccontextmanager
async def _steady_load(
    run: Run, channels: Sequence[Sequence[grpc.aio.Channel]]
) -> AsyncIterator[list[Record]]:
    """Streams of one request after the other, with pauses; yields the records, the latest last.

    Args:
        channels: those that each stream goes through, in turn.
    """
    requests = mixed_requests(_NUM_STREAMS, num_tokens=_NUM_TOKENS, num_choices=1)
    await run.learn(requests)
    is_over = asyncio.Event()
    records: list[Record] = []

    async def stream(index: int) -> None:
        while not is_over.is_set():
            through = channels[index % len(channels)]
            (record,) = await run.start([requests[index]], through=through)
            records.append(record)
            begun_s = record.started_at_s
            await run.finish([record])
            # As long as the request took: what starts meanwhile needs the processor, too.
            await asyncio.sleep(max(0.0, time.time() - begun_s))

    async with asyncio.TaskGroup() as streams:
        for index in range(_NUM_STREAMS):
            streams.create_task(stream(index))
        # Each has begun its first request.
        await until(lambda: _are_many(records))
        yield records
        is_over.set()


async def _streaming(records: Sequence[Record]) -> None:
    """Waits until half of the streams are amid a request."""

    async def are_amid() -> bool:
        latest = records[-_NUM_STREAMS:]
        return 2 * sum(bool(each.pieces) and not each.codes for each in latest) >= _NUM_STREAMS

    assert await until(are_amid), "the streams end as soon as they begin"


async def _are_many(records: Sequence[Record]) -> bool:
    return len(records) >= _NUM_STREAMS


async def _expect(run: Run, condition: Callable[[], Awaitable[bool]], problem: str) -> None:
    run.expect(await until(condition), problem)


def _has_verifiers(gateway: Member, count: int) -> Callable[[], Awaitable[bool]]:
    async def has() -> bool:
        metrics = await asyncio.to_thread(gateway.metrics)
        return metrics.total("tandem_peers_connected", kind="verifier") == count

    return has


def _is_busy(run: Run, verifier: Member) -> Callable[[], Awaitable[bool]]:
    async def is_busy() -> bool:
        return await run.num_running(verifier) > 0

    return is_busy
