"""A verifier that was killed and comes back takes over what waits at the other one.

All services are processes. Each verifier runs one sequence at a time.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.drills.fleet import Member
from tests.drills.requests import Losses, Record, generate, mixed_requests
from tests.drills.run import until
from tests.integration.stack import MODEL

RUNNING, WAITING = "tandem_verifier_sequences_running", "tandem_verifier_sequences_waiting"
NUM_TOKENS = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A gateway and its two verifiers."""

    gateway: Member
    verifiers: list[Member]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as exits:
        flags = ("--model", str(MODEL), "--threads", "1", "--max-num-seqs", "1")
        verifiers = [Member(f"verifier-{i}", "verifier", flags, tmp_path) for i in range(2)]
        addresses = ",".join(each.address for each in verifiers)
        gateway = Member(
            "gateway",
            "gateway",
            ("--tokenizer", str(MODEL), "--http-listen", "", "--verifiers", addresses),
            tmp_path,
        )
        for member in (*verifiers, gateway):
            exits.callback(member.stop)
            member.start()
        yield Pair(gateway=gateway, verifiers=verifiers)


async def until_total(member: Member, metric: str, is_reached: Callable[[float], bool]) -> None:
    """Waits until what the process exports of a metric is as expected."""

    def check() -> bool:
        return is_reached(member.metrics().total(metric))

    assert await until(lambda: asyncio.to_thread(check)), metric


@pytest.mark.long
async def test_a_verifier_that_comes_back_runs_what_waits_elsewhere(pair: Pair) -> None:
    staying, killed = pair.verifiers
    requests = mixed_requests(20, num_tokens=NUM_TOKENS, num_choices=1)
    async with grpc.aio.insecure_channel(pair.gateway.address) as channel:
        undisturbed = [Record(request=request) for request in requests]
        await asyncio.gather(*(generate(channel, record) for record in undisturbed))
        before = pair.gateway.metrics()

        records = [Record(request=request) for request in requests]
        calls = [asyncio.ensure_future(generate(channel, record)) for record in records]
        await until_total(killed, WAITING, lambda total: total > 0)
        killed.kill()
        await asyncio.to_thread(killed.wait)
        # All wait at the other one before there is another to wait at.
        await until_total(staying, WAITING, lambda total: total > len(requests) / 2)
        await asyncio.to_thread(killed.start)
        await until_total(killed, RUNNING, lambda total: total == 1)
        await asyncio.gather(*calls)

    assert all(record.codes == [grpc.StatusCode.OK] for record in records)
    losses = Losses()
    for record, expected in zip(records, undisturbed, strict=True):
        losses += record.compare(expected)
        assert [usage.output_tokens for usage in record.usages.values()] == [NUM_TOKENS]
    assert losses == Losses()
    after = pair.gateway.metrics()

    def counted(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert counted("tandem_generation_tokens_total") == len(requests) * NUM_TOKENS
    assert counted("tandem_request_success_total") == len(requests)
    assert counted("tandem_request_retries_total", reason="waiting") > 0
    # What moved before it ran was not resumed.
    resumes = sum(record.num_resumes for record in records)
    assert counted("tandem_request_resumes_total") == resumes < len(requests)
    for gauge in ("tandem_num_requests_running", "tandem_num_requests_waiting"):
        assert after.total(gauge) == 0
    for verifier in pair.verifiers:
        await until_total(verifier, "tandem_kv_blocks_used", lambda total: total == 0)
