"""Which replicas DNS names stand for, while their answers change."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import structlog

from servicekit.channels import discovery as discovery_module
from servicekit.channels.discovery import (
    MAX_REPLICAS,
    Discovery,
    Replica,
    Resolve,
    resolve_host,
)
from tests.scripted_dns import ScriptedDns

NAME = "verifier.example:50052"
HOST = "verifier.example"


class Found:
    """A discovery, every change that it has reported, and its log."""

    def __init__(self, entries: Sequence[str], dns: Resolve, interval_s: float) -> None:
        self.changes: list[Sequence[Replica]] = []
        self.log = structlog.testing.LogCapture()
        self.discovery = Discovery(
            entries,
            interval_s=interval_s,
            on_change=self.changes.append,
            resolve=dns,
            logger=structlog.wrap_logger(None, processors=[self.log]),
        )

    @property
    def addresses(self) -> list[str]:
        return [replica.address for replica in self.discovery.replicas]


@contextlib.asynccontextmanager
async def running(
    entries: Sequence[str], dns: ScriptedDns, *, interval_s: float = 0.001
) -> AsyncIterator[Found]:
    found = Found(entries, dns, interval_s)
    task = asyncio.ensure_future(found.discovery.run())
    before = asyncio.all_tasks() - {task}
    try:
        yield found
    finally:
        assert not task.done(), "it runs for ever"
        task.cancel()
        await asyncio.wait([task])
        assert asyncio.all_tasks() <= before, "no task is left"


async def test_addresses_stand_as_they_are_and_need_no_resolver() -> None:
    dns = ScriptedDns()
    entries = ["127.0.0.1:1", "localhost:2", "[::1]:3"]
    found = Found(entries, dns, 1.0)
    assert found.discovery.replicas == [Replica(address=entry) for entry in entries]
    await found.discovery.resolve()
    assert (dns.asked, found.changes) == ([], [])


async def test_each_address_of_a_name_is_a_replica_with_the_names_certificate() -> None:
    dns = ScriptedDns(**{HOST: ["10.0.0.10", "10.0.0.9", "10.0.0.10"], "other.example.": ["::2"]})
    found = Found([NAME, "10.0.0.9:50052", "10.0.0.9:1", "other.example.:7"], dns, 1.0)
    assert found.addresses == ["10.0.0.9:50052", "10.0.0.9:1"]
    await found.discovery.resolve()
    assert found.discovery.replicas == [
        Replica(address="10.0.0.9:50052", server_name=HOST),
        Replica(address="10.0.0.10:50052", server_name=HOST),
        Replica(address="10.0.0.9:1"),
        Replica(address="[::2]:7", server_name="other.example"),
    ]
    assert found.changes[-1] == found.discovery.replicas


async def test_replicas_come_and_go_and_only_changes_are_reported() -> None:
    dns = ScriptedDns(**{HOST: ["10.0.0.1"]})
    async with running([NAME], dns) as found:
        expected = []
        for answer in (["10.0.0.1"], ["10.0.0.2", "10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]):
            dns.answers[HOST] = answer
            await dns.applied(HOST)
            expected.append([f"{ip}:50052" for ip in sorted(answer)])
            await dns.applied(HOST)
        assert [[replica.address for replica in change] for change in found.changes] == expected
        # In another order it is the same.
        dns.answers[HOST] = ["10.0.0.4", "10.0.0.3"]
        await dns.applied(HOST)
        dns.answers[HOST] = ["10.0.0.3", "10.0.0.4"]
        await dns.applied(HOST)
        assert len(found.changes) == len(expected) + 1


@pytest.mark.parametrize("answer", [None, [], ["nonsense"]])
async def test_a_name_that_does_not_resolve_keeps_its_addresses(answer: list[str] | None) -> None:
    dns = ScriptedDns(**{HOST: ["10.0.0.1"], "other.example": ["10.0.0.2"]})
    async with running([NAME, "other.example:1"], dns) as found:
        await dns.applied(HOST)
        if answer is None:
            del dns.answers[HOST]
        else:
            dns.answers[HOST] = answer
        dns.answers["other.example"] = ["10.0.0.3"]
        for _ in range(3):
            await dns.applied(HOST)
        await dns.applied("other.example")
        assert found.addresses == ["10.0.0.1:50052", "10.0.0.3:1"]
        warnings = [e["name"] for e in found.log.entries if e["log_level"] == "warning"]
        assert warnings == [NAME], "one per outage"
        dns.answers[HOST] = ["10.0.0.4"]
        await dns.applied(HOST)
        assert found.addresses == ["10.0.0.4:50052", "10.0.0.3:1"]
        del dns.answers[HOST]
        await dns.applied(HOST)
        warnings = [e["name"] for e in found.log.entries if e["log_level"] == "warning"]
        assert warnings == [NAME] * 2, "nor for the next one"


async def test_a_slow_name_holds_up_no_other() -> None:
    dns = ScriptedDns(**{HOST: ["10.0.0.1"], "other.example": ["10.0.0.2"]})
    dns.slow.add(HOST)
    async with running([NAME, "other.example:1"], dns) as found:
        await dns.applied("other.example")
        dns.answers["other.example"] = ["10.0.0.3"]
        await dns.applied("other.example")
        assert found.addresses == ["10.0.0.3:1"]
        assert dns.asked.count(HOST) == 1, "it is not asked for again meanwhile"
        dns.may_answer.set()
        await dns.applied(HOST)
        assert found.addresses == ["10.0.0.1:50052", "10.0.0.3:1"]


async def test_the_number_of_replicas_is_bounded() -> None:
    dns = ScriptedDns(**{HOST: [f"10.0.{i // 256}.{i % 256}" for i in range(MAX_REPLICAS + 100)]})
    found = Found([NAME], dns, 1.0)
    await found.discovery.resolve()
    assert len(found.addresses) == MAX_REPLICAS
    assert found.addresses[0] == "10.0.0.0:50052"


async def test_a_process_with_addresses_of_both_families_is_one_replica() -> None:
    dns = ScriptedDns(**{HOST: ["fd00::1", "10.0.0.1"]})
    found = Found([NAME], dns, 1.0)
    await found.discovery.resolve()
    assert found.addresses == ["10.0.0.1:50052"]


async def test_a_refresh_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "_MIN_INTERVAL_S", 0.001)
    dns = ScriptedDns(**{HOST: ["10.0.0.1"]})
    async with running([NAME], dns, interval_s=3600.0) as found:
        for number in range(2, 5):
            dns.answers[HOST] = [f"10.0.0.{number}"]
            applied = asyncio.ensure_future(dns.applied(HOST))
            while not applied.done():
                found.discovery.refresh()
                await asyncio.sleep(0.001)
            await applied
            assert found.addresses == [f"10.0.0.{number}:50052"]


async def test_names_are_asked_for_no_more_often_than_refreshes_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery_module, "_MIN_INTERVAL_S", 3600.0)
    dns = ScriptedDns(**{HOST: ["10.0.0.1"]})
    async with running([NAME], dns, interval_s=7200.0) as found:
        for _ in range(100):
            found.discovery.refresh()
            await asyncio.sleep(0.001)
        assert dns.asked == [HOST]


def answer_by_family(
    monkeypatch: pytest.MonkeyPatch, answers: dict[int, Sequence[str] | int]
) -> list[int]:
    """Replaces the machine's resolver: addresses, or the number of an error, of each family.

    As glibc, it gives what it has if it is asked for both. Returns which families are asked for.
    """
    asked: list[int] = []

    def look_up(host: str, port: int, family: int = 0, *_: object, **__: object) -> list[object]:
        asked.append(family)
        families = [family] if family else list(answers)
        given = [answers[each] for each in families]
        found = [ip for each in given if not isinstance(each, int) for ip in each]
        if not found:
            number = next(each for each in given if isinstance(each, int))
            raise socket.gaierror(number, "no answer")
        return [(family, 1, 6, "", (ip, port)) for ip in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


@pytest.mark.parametrize("number", [socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM])
async def test_a_name_whose_ipv4_addresses_are_not_known_keeps_those_that_it_had(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    answers: dict[int, Sequence[str] | int] = {
        socket.AF_INET: ["10.0.0.1"],
        socket.AF_INET6: ["fd00::1"],
    }
    asked = answer_by_family(monkeypatch, answers)
    found = Found([NAME], resolve_host, 1.0)
    await found.discovery.resolve()
    assert found.addresses == ["10.0.0.1:50052"]
    answers[socket.AF_INET] = number
    await found.discovery.resolve()
    assert found.addresses == ["10.0.0.1:50052"]
    assert [each["event"] for each in found.log.entries][-1] == "name_not_resolved"
    assert asked == [socket.AF_INET] * 2, "an outage is waited for once per look-up"


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY])
async def test_a_name_without_ipv4_addresses_has_its_ipv6_addresses(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    answer_by_family(monkeypatch, {socket.AF_INET: number, socket.AF_INET6: ["fd00::2", "fd00::1"]})
    found = Found([NAME], resolve_host, 1.0)
    await found.discovery.resolve()
    assert found.addresses == ["[fd00::1]:50052", "[fd00::2]:50052"]


async def test_the_machines_resolver_knows_localhost_and_no_invalid_names() -> None:
    assert "127.0.0.1" in await resolve_host("localhost", 1)
    assert await resolve_host("::1", 1) == ["::1"]
    assert await resolve_host("127.0.0.1", 1) == ["127.0.0.1"]
    with pytest.raises(socket.gaierror):
        await resolve_host("no-such-host.invalid", 1)
    found = Found(
        ["no-such-host.invalid:1", f"{'x' * 70}.example:1", "127.0.0.1:1"], resolve_host, 1.0
    )
    await found.discovery.resolve()
    assert found.addresses == ["127.0.0.1:1"]


def test_a_resolver_that_hangs_does_not_hold_up_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait(30) and [])

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await resolve_host("name.example", 1)

    began_s = time.monotonic()
    asyncio.run(main())
    answers.set()
    assert time.monotonic() - began_s < 15
