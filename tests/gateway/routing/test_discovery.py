"""Verifiers and drafters come and go by DNS: new ones are used, others are left in peace.

The replicas of one name are stand-ins on 127.0.0.2, 127.0.0.3, ... at one port.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
import trustme

from gateway import server
from gateway.messages.verifier import DrafterState
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.drafters import Drafters
from gateway.routing.router import choose_drafter
from servicekit.config import ChannelOptions
from tandem.v1 import verifier_pb2
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import (
    GenerateCall,
    RunningGateway,
    StartGateway,
    collect,
    until,
)
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier
from tests.scripted_dns import ScriptedDns

pytestmark = pytest.mark.stand_in

HOST = "verifier.example"
PLAINTEXT = ChannelOptions(peer_allow_plaintext=True, resolve_interval_s=0.01)
UP = verifier_pb2.DrafterStatus.STATE_UP
DOWN = verifier_pb2.DrafterStatus.STATE_DOWN


@pytest.fixture(autouse=True)
def _links_are_checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.routing.membership._CHECK_INTERVAL_S", 0.001)


def ips(*verifiers: ScriptedVerifier) -> list[str]:
    return [verifier.address.rpartition(":")[0] for verifier in verifiers]


def port_of(verifier: ScriptedVerifier) -> str:
    return verifier.address.rpartition(":")[2]


async def start_replicas(
    start_verifier: StartVerifier,
    number: int,
    credentials: Sequence[grpc.ServerCredentials | None] = (),
) -> list[ScriptedVerifier]:
    """Stand-ins at one port of several addresses."""
    replicas: list[ScriptedVerifier] = []
    for index in range(number):
        port = port_of(replicas[0]) if replicas else 0
        replica = await start_verifier(
            listen=f"127.0.0.{2 + index}:{port}",
            credentials=credentials[index] if credentials else None,
        )
        replicas.append(replica)
    return replicas


async def start(
    start_gateway: StartGateway,
    replicas: Sequence[ScriptedVerifier],
    dns: ScriptedDns,
    **options: object,
) -> RunningGateway:
    return await start_gateway(
        verifiers=[f"{HOST}:{port_of(replicas[0])}"],
        resolve=dns,
        **{"peers": PLAINTEXT, **options},
    )


def names(running: RunningGateway) -> list[str]:
    """The verifiers that have a link."""
    return [link.name for link in running.gateway.fleet.verifiers]


def num_connected(running: RunningGateway, kind: str = "verifier") -> float:
    return running.sample("tandem_peers_connected", kind=kind)


async def open_at(running: RunningGateway, verifier: ScriptedVerifier) -> tuple[GenerateCall, str]:
    """A call whose sequence is open at this verifier, and the sequence's id."""
    for index in range(200):
        num_before = len(verifier.commands("open"))
        total = running.gateway.coordinator._sequences._by_id
        num_live = len(total)
        call = running.call(1, affinity_key=f"key {index}")
        await until(lambda: len(total) > num_live)  # noqa: B023
        sequence = list(total.values())[-1]
        if sequence.verifier.name == verifier.address:
            opened = await verifier.nth("open", num_before)
            return call, opened.sequence_id
        call.cancel()
        await until(lambda: len(total) == num_live)  # noqa: B023
    raise AssertionError("no key leads there")


async def finish(call: GenerateCall, verifier: ScriptedVerifier, sequence_id: str) -> list[int]:
    """Lets the verifier finish a call of `open_at`; its output."""
    verifier.send(
        verifier.opened(sequence_id), verifier.decided(sequence_id, 1, [5, 6], finish=STOP)
    )
    return (await collect(call)).token_ids


def num_open_channels() -> int:
    gc.collect()
    # Not isinstance: some objects of other libraries warn when they are asked for their class.
    channels = (each for each in gc.get_objects() if issubclass(type(each), grpc.aio.Channel))
    return sum(not channel._channel.closed() for channel in channels)


# Verifiers


async def test_a_verifier_that_is_gone_finishes_its_sequences_and_gets_no_others(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    kept, left = await start_replicas(start_verifier, 2)
    dns = ScriptedDns(**{HOST: ips(kept, left)})
    running = await start(start_gateway, [kept], dns)
    await until(lambda: num_connected(running) == 2)
    call, sequence_id = await open_at(running, left)
    dns.answers[HOST] = ips(kept)
    await dns.applied(HOST)
    kept.play(lambda opened: [7, 0])
    num_opens = len(left.commands("open"))
    for index in range(20):
        assert (await running.generate(1, affinity_key=f"key {index}")).token_ids == [7, 0]
    assert len(left.commands("open")) == num_opens
    assert (left.num_ended_sessions, num_connected(running)) == (0, 2)
    assert await finish(call, left, sequence_id) == [5, 6]
    await until(lambda: left.num_ended_sessions == 1)
    await until(lambda: names(running) == [kept.address])
    assert num_connected(running) == 1


async def test_a_verifier_that_is_found_again_while_its_link_ends_gets_another_one(
    start_gateway: StartGateway, start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_link, may_end = server._run_link, asyncio.Event()

    async def end_slowly(link: VerifierLink, channel: grpc.aio.Channel) -> None:
        try:
            await run_link(link, channel)
        finally:
            await may_end.wait()

    monkeypatch.setattr(server, "_run_link", end_slowly)
    kept, flapping = await start_replicas(start_verifier, 2)
    dns = ScriptedDns(**{HOST: ips(kept, flapping)})
    running = await start(start_gateway, [kept], dns)
    await until(lambda: num_connected(running) == 2)
    try:
        dns.answers[HOST] = ips(kept)
        await until(lambda: flapping.num_ended_sessions == 1)
        dns.answers[HOST] = ips(kept, flapping)
        await dns.applied(HOST)
        assert [link.is_leaving for link in running.gateway.fleet.verifiers] == [False, True]
        assert flapping.num_sessions == 1
    finally:
        may_end.set()
    await until(lambda: num_connected(running) == 2)
    call, sequence_id = await open_at(running, flapping)
    assert await finish(call, flapping, sequence_id) == [5, 6]


async def test_flaps_leave_no_link_task_or_channel(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    kept, flapping = await start_replicas(start_verifier, 2)
    dns = ScriptedDns(**{HOST: ips(kept)})
    running = await start(start_gateway, [kept], dns)
    call, sequence_id = await open_at(running, kept)
    num_channels, num_tasks = num_open_channels(), len(running.gateway._tasks)
    for number in range(12):
        dns.answers[HOST] = ips(kept, flapping)
        await dns.applied(HOST)
        if number % 2:
            await until(lambda: num_connected(running) == 2)
        dns.answers[HOST] = ips(kept)
        await dns.applied(HOST)
    await until(lambda: names(running) == [kept.address])
    await until(lambda: flapping.num_ended_sessions == flapping.num_sessions > 0)
    assert num_open_channels() == num_channels
    assert len(running.gateway._tasks) == num_tasks
    # The verifier that stayed was not disturbed, and the one that flapped can be used.
    assert await finish(call, kept, sequence_id) == [5, 6]
    assert kept.num_sessions == 1
    dns.answers[HOST] = ips(kept, flapping)
    await until(lambda: num_connected(running) == 2)
    call, sequence_id = await open_at(running, flapping)
    assert await finish(call, flapping, sequence_id) == [5, 6]


def credentials_for(authority: trustme.CA, name: str) -> grpc.ServerCredentials:
    issued = authority.issue_cert(name)
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    return grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])


async def test_certificates_are_checked_for_the_name_that_led_to_an_address(
    start_gateway: StartGateway, start_verifier: StartVerifier, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    right, wrong, later = await start_replicas(
        start_verifier,
        3,
        [credentials_for(authority, name) for name in (HOST, "other.example", HOST)],
    )
    dns = ScriptedDns(**{HOST: ips(right, wrong)})
    peers = ChannelOptions(peer_tls_ca=tmp_path / "ca.pem", resolve_interval_s=0.01)
    running = await start(start_gateway, [right], dns, peers=peers, connect_timeout_s=2.0)
    await until(lambda: any(entry["event"] == "peer_unreachable" for entry in running.log))
    assert {e["verifier"] for e in running.log if e["event"] == "peer_unreachable"} == {
        wrong.address
    }
    assert (right.num_sessions, wrong.num_sessions) == (1, 0)
    # The files of a renewal, replaced one by one.
    ca = (tmp_path / "ca.pem").read_bytes()
    (tmp_path / "ca.pem").unlink()
    dns.answers[HOST] = ips(right, wrong, later)
    await until(lambda: any(entry["event"] == "no_link" for entry in running.log))
    (tmp_path / "ca.pem").write_bytes(ca)
    await until(lambda: later.num_sessions == 1)


# Drafters


def drafters_now(verifier: ScriptedVerifier) -> dict[str, str]:
    """The drafter of every sequence."""
    now = {each.sequence_id: each.drafter_address for each in verifier.commands("open")}
    return now | {each.sequence_id: each.drafter_address for each in verifier.commands("update")}


def ips_of(*addresses: str) -> list[str]:
    return [address.partition(":")[0] for address in addresses]


async def test_drafters_come_and_go_and_sequences_move_away_from_those_that_are_gone(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    dns = ScriptedDns(**{"drafter.example": ["10.0.0.1"]})
    one = "10.0.0.1:50051"
    # Preferred by the verifier, once it is there.
    two = next(
        address
        for address in (f"10.0.0.{number}:50051" for number in range(2, 200))
        if choose_drafter(verifier.address, [one, address]) == address
    )
    running = await start_gateway(
        verifiers=[verifier.address],
        drafters=["drafter.example:50051"],
        resolve=dns,
        peers=PLAINTEXT,
    )
    await dns.applied("drafter.example")
    first_call = running.call(1, n=16)
    await verifier.nth("open", 15)
    assert set(drafters_now(verifier).values()) == {one}
    dns.answers["drafter.example"] = ips_of(one, two)
    await dns.applied("drafter.example")
    verifier.send(verifier.drafter_status(one, UP), verifier.drafter_status(two, UP))
    await until(lambda: num_connected(running, "drafter") == 2)
    second_call = running.call(2, n=16)
    await verifier.nth("open", 31)
    spread = Counter(drafters_now(verifier).values())
    assert spread == {one: 16, two: 16}
    assert not verifier.commands("update"), "a drafter that comes moves nothing"
    dns.answers["drafter.example"] = ips_of(two)
    await until(lambda: len(verifier.commands("update")) == spread[one])
    assert set(drafters_now(verifier).values()) == {two}
    assert num_connected(running, "drafter") == 1
    # What its verifier still says of it is no mistake.
    verifier.send(verifier.drafter_status(one, DOWN), verifier.drafter_status(two, DOWN))
    await until(lambda: num_connected(running, "drafter") == 0)
    assert (
        running.sample(
            "tandem_peer_messages_ignored_total", peer="verifier", reason="unknown_drafter"
        )
        == 0
    )
    first_call.cancel()
    second_call.cancel()


def test_what_is_remembered_of_drafters_that_are_gone_is_bounded() -> None:
    drafters = Drafters()
    for number in range(3000):
        address = f"10.0.{number // 256}.{number % 256}:1"
        drafters.set_addresses([address])
        drafters.set_state("verifier", address, DrafterState.UP)
    assert len(drafters._gone) == 1024
    assert len(drafters._states["verifier"]) == 1025
    assert drafters.num_up == 1
    assert "10.0.0.0:1" not in drafters._states["verifier"]
    assert len(drafters._num_answered) == 1025
