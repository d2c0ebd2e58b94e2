"""Certificates that are replaced while a server runs: streams go on, new connections use them."""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import trustme
from prometheus_client import CollectorRegistry

from servicekit.channels import watched_files
from servicekit.channels.channel import open_channel
from servicekit.channels.renewed_channel import RenewedChannel
from servicekit.config import ChannelOptions
from servicekit.serving.server import Server
from tests.servicekit.factories import SERVICE, check_health, make_server

STREAM = f"/{SERVICE}/Stream"
NAME = f"/{SERVICE}/Name"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 0.0)


class Holder:
    """Files of one party: its certificate, its key, and the authorities that it trusts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.chain, self.key, self.ca = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"

    def show(self, certificate: trustme.LeafCert) -> None:
        self.chain.write_bytes(chain_of(certificate))
        self.key.write_bytes(certificate.private_key_pem.bytes())

    def trust(self, *authorities: trustme.CA) -> None:
        self.ca.write_bytes(b"".join(each.cert_pem.bytes() for each in authorities))

    @property
    def channel_options(self) -> dict[str, Any]:
        return {"peer_tls_ca": self.ca, "peer_tls_cert": self.chain, "peer_tls_key": self.key}


def chain_of(certificate: trustme.LeafCert) -> bytes:
    return b"".join(pem.bytes() for pem in certificate.cert_chain_pems)


class Counting:
    """A method that counts as fast as its client reads, and one that names its caller."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def stream(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        number = 0
        while not self.may_end.is_set():
            yield str(number).encode()
            number += 1
            await asyncio.sleep(0.001)

    async def name(self, _request: bytes, context: Any) -> bytes:
        return b",".join(context.auth_context()["peer_dns"])


class Parties:
    """A server and a client with certificates of one authority, and another authority."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = trustme.CA(), trustme.CA()
        self.server, self.client = Holder(folder / "server"), Holder(folder / "client")
        self.server.show(self.old.issue_cert("127.0.0.1"))
        self.server.trust(self.old)
        self.client.show(self.old.issue_cert("old.test"))
        self.client.trust(self.old)
        self.registry = CollectorRegistry()
        self.log = structlog.testing.LogCapture()
        self.method = Counting()

    @contextlib.asynccontextmanager
    async def served(self, *, mtls: bool = True) -> AsyncIterator[Server]:
        server = make_server(
            registry=self.registry,
            logger=structlog.wrap_logger(None, processors=[self.log]),
            tls_cert=self.server.chain,
            tls_key=self.server.key,
            tls_client_ca=self.server.ca if mtls else None,
        )
        handlers: Any = {
            "Stream": grpc.unary_stream_rpc_method_handler(self.method.stream),
            "Name": grpc.unary_unary_rpc_method_handler(self.method.name),
        }
        server.grpc.add_registered_method_handlers(SERVICE, handlers)
        await server.start()
        server.set_serving()
        try:
            yield server
        finally:
            await server.stop(0)

    def open_channel(self, server: Server) -> grpc.aio.Channel:
        return open_channel(server.address, ChannelOptions(**self.client.channel_options))

    def reloads(self, outcome: str) -> float:
        labels = {"files": "server_certificate", "outcome": outcome}
        return self.registry.get_sample_value("tandem_file_reloads_total", labels) or 0.0

    def expiry_s(self) -> float | None:
        name = "tandem_certificate_expiry_timestamp_seconds"
        return self.registry.get_sample_value(name, {"certificate": "server"})


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path)


async def read(call: Any) -> int:
    async with asyncio.timeout(20):
        response = await call.read()
    assert response is not grpc.aio.EOF
    return int(response)


async def read_to_the_end(call: Any) -> None:
    """Reads the rest of a call that ends well."""
    async with asyncio.timeout(20):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert await call.code() is grpc.StatusCode.OK


async def assert_refused(address: str, options: dict[str, Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check_health(address, **options)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_streams_go_on_while_new_connections_get_the_new_certificate(
    parties: Parties, tmp_path: Path
) -> None:
    newcomer = Holder(tmp_path / "newcomer")
    newcomer.show(parties.new.issue_cert("new.test"))
    newcomer.trust(parties.new)
    async with parties.served() as server, parties.open_channel(server) as channel:
        begin: Any = channel.unary_stream(STREAM)
        streams = [begin(b"") for _ in range(8)]
        next_numbers = [await read(each) + 1 for each in streams]
        await assert_refused(server.address, newcomer.channel_options)
        parties.server.show(parties.new.issue_cert("127.0.0.1"))
        parties.server.trust(parties.new)
        assert await check_health(server.address, **newcomer.channel_options) == 1
        await assert_refused(server.address, parties.client.channel_options)
        assert parties.reloads("success") >= 1
        for _ in range(50):
            # None is lost, none comes twice.
            assert [await read(each) for each in streams] == next_numbers
            next_numbers = [number + 1 for number in next_numbers]
        parties.method.may_end.set()
        for each in streams:
            await read_to_the_end(each)


async def test_half_written_and_expired_files_keep_the_last_good_ones(parties: Parties) -> None:
    options = parties.client.channel_options
    async with parties.served(mtls=False) as server:
        renewed = parties.old.issue_cert("127.0.0.1")
        key = renewed.private_key_pem.bytes()
        expired = parties.old.issue_cert(
            "127.0.0.1", not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        )
        for chain, secret, reason in (
            (chain_of(renewed), None, "is not the key of"),
            (chain_of(renewed), key[:100], "holds no private key"),
            (b"", key, "holds no certificate"),
            (chain_of(expired), expired.private_key_pem.bytes(), "has expired"),
        ):
            num_failures = parties.reloads("failure")
            parties.server.chain.write_bytes(chain)
            if secret is not None:
                parties.server.key.write_bytes(secret)
            assert await check_health(server.address, **options) == 1
            assert parties.reloads("failure") > num_failures
            assert reason in parties.log.entries[-1]["reason"]
            assert parties.log.entries[-1]["event"] == "files_not_reloaded"
            assert "BEGIN" not in str(parties.log.entries[-1])
        assert parties.reloads("success") == 0
        parties.server.show(parties.new.issue_cert("127.0.0.1"))
        await assert_refused(server.address, options)
        assert parties.reloads("success") == 1


async def test_the_expiry_follows_the_file_also_without_handshakes(parties: Parties) -> None:
    async with parties.served():
        not_after = datetime.datetime(2031, 5, 6, tzinfo=datetime.UTC)
        assert parties.expiry_s() != not_after.timestamp()
        parties.server.show(parties.old.issue_cert("127.0.0.1", not_after=not_after))
        assert parties.expiry_s() == not_after.timestamp()
        parties.server.chain.write_bytes(b"half a certi")
        assert parties.expiry_s() == not_after.timestamp()


async def test_clients_without_with_foreign_and_with_expired_certificates_are_refused(
    parties: Parties,
) -> None:
    not_after = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    async with parties.served() as server:
        assert await check_health(server.address, **parties.client.channel_options) == 1
        await assert_refused(server.address, {"peer_tls_ca": parties.client.ca})
        for authority, expires in ((parties.new, None), (parties.old, not_after)):
            certificate = authority.issue_cert("client.test", not_after=expires)
            # Not by `open_channel`, which refuses to use an expired one itself.
            credentials = grpc.ssl_channel_credentials(
                parties.client.ca.read_bytes(),
                certificate.private_key_pem.bytes(),
                chain_of(certificate),
            )
            async with grpc.aio.secure_channel(server.address, credentials) as channel:
                name: Any = channel.unary_unary(NAME)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await name(b"", timeout=20)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await check_health(server.address, **parties.client.channel_options) == 1


async def test_a_channels_next_call_shows_the_new_certificate(parties: Parties) -> None:
    parties.server.trust(parties.old, parties.new)
    async with parties.served() as server, parties.open_channel(server) as channel:
        assert isinstance(channel, RenewedChannel)
        name: Any = channel.unary_unary(NAME)
        begin: Any = channel.unary_stream(STREAM)
        assert await name(b"") == b"old.test"
        stream = begin(b"")
        number = await read(stream)
        # Half of it: the old one stays in use.
        certificate = parties.new.issue_cert("new.test")
        parties.client.chain.write_bytes(chain_of(certificate))
        assert await name(b"") == b"old.test"
        parties.client.show(certificate)
        assert await name(b"") == b"new.test"
        assert await name(b"") == b"new.test"
        for _ in range(20):
            number += 1
            assert await read(stream) == number, "the call in flight goes on"
        assert len(channel._retired) == 1
        parties.method.may_end.set()
        await read_to_the_end(stream)
        async with asyncio.timeout(20):
            while channel._retired or channel._closing:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await name(b"") == b"new.test"
        # One without calls is closed at once.
        parties.client.show(parties.new.issue_cert("newest.test"))
        assert await name(b"") == b"newest.test"
        assert not channel._retired


async def test_closing_a_renewed_channel_ends_all_its_calls(parties: Parties) -> None:
    async with parties.served() as server:
        channel = parties.open_channel(server)
        begin: Any = channel.unary_stream(STREAM)
        old = begin(b"")
        await read(old)
        parties.client.show(parties.old.issue_cert("renewed.test"))
        new = begin(b"")
        await read(new)
        await channel.close()
        assert [await each.code() for each in (old, new)] == [grpc.StatusCode.CANCELLED] * 2
