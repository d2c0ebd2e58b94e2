"""HTTP follows the gRPC port's rules: TLS with the same files, plaintext on loopback."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
import trustme
from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from servicekit.channels import watched_files
from servicekit.config import ConfigError, ServerOptions
from servicekit.logs import Logger
from tests.gateway.running_gateway import StartGateway
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Certificates and keys of a server and of a client."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("127.0.0.1", "client.test"):
        certificate = authority.issue_cert(name)
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    return {path.name: path for path in tmp_path.iterdir()}


def mutual_tls(files: dict[str, Path]) -> ServerOptions:
    """Of a server that wants its clients' certificates."""
    return ServerOptions(
        listen="127.0.0.1:0",
        tls_cert=files["127.0.0.1.pem"],
        tls_key=files["127.0.0.1.key"],
        tls_client_ca=files["ca.pem"],
    )


async def status_of(address: str | None, context: ssl.SSLContext | None) -> str:
    """The status line of `/health`; "" where the connection ends before it."""
    assert address is not None
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    try:
        async with asyncio.timeout(20):
            return (await reader.readline()).decode().strip()
    except (ssl.SSLError, ConnectionError):
        return ""
    finally:
        writer.close()


async def test_plaintext_beyond_loopback_needs_allow_plaintext(logger: Logger) -> None:
    def gateway(*, allow_plaintext: bool) -> GatewayServer:
        config = GatewayConfig(
            server=ServerOptions(listen="127.0.0.1:0", allow_plaintext=allow_plaintext),
            http_listen="0.0.0.0:0",
            verifiers=["127.0.0.1:1"],
        )
        return GatewayServer(config, registry=CollectorRegistry(), logger=logger)

    with pytest.raises(ConfigError) as caught:
        await gateway(allow_plaintext=False).start()
    assert caught.value.key == "--http-listen"
    assert "--allow-plaintext" in caught.value.message
    asked_for = gateway(allow_plaintext=True)
    await asked_for.start()
    await asked_for.stop()


@pytest.mark.parametrize("is_mutual", [False, True])
async def test_it_speaks_tls_where_grpc_does(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    files: dict[str, Path],
    is_mutual: bool,
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address],
        server=ServerOptions(
            listen="127.0.0.1:0",
            tls_cert=files["127.0.0.1.pem"],
            tls_key=files["127.0.0.1.key"],
            tls_client_ca=files["ca.pem"] if is_mutual else None,
        ),
        http_listen="127.0.0.1:0",
    )
    address = running.gateway.http_address
    anonymous = ssl.create_default_context(cafile=files["ca.pem"])
    known = ssl.create_default_context(cafile=files["ca.pem"])
    known.load_cert_chain(files["client.test.pem"], files["client.test.key"])
    assert await status_of(address, known) == "HTTP/1.1 200 OK"
    assert await status_of(address, anonymous) == ("" if is_mutual else "HTTP/1.1 200 OK")
    assert await status_of(address, None) == ""
    # A session of TLS 1.2 can be resumed without the client's certificate being looked at.
    known.maximum_version = ssl.TLSVersion.TLSv1_2
    if is_mutual:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await status_of(address, known)
    else:
        assert await status_of(address, known) == "HTTP/1.1 200 OK"


async def test_a_session_that_shows_no_certificate_again_is_not_resumed(
    start_gateway: StartGateway, verifier: ScriptedVerifier, files: dict[str, Path]
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], server=mutual_tls(files), http_listen="127.0.0.1:0"
    )
    assert running.gateway.http_address is not None
    host, port = running.gateway.http_address.split(":")
    context = ssl.create_default_context(cafile=files["ca.pem"])
    context.load_cert_chain(files["client.test.pem"], files["client.test.key"])

    def are_resumed() -> list[bool | None]:
        """Of two connections, each of which offers the session of the one before."""
        session, resumed = None, []
        for _ in range(2):
            with (
                socket.create_connection((host, int(port)), timeout=20) as plain,
                context.wrap_socket(plain, server_hostname=host, session=session) as connection,
            ):
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
                session = connection.session
                resumed.append(connection.session_reused)
        return resumed

    assert await asyncio.to_thread(are_resumed) == [False, False]


async def test_it_uses_new_certificates_and_authorities_without_a_restart(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 0.0)
    running = await start_gateway(
        verifiers=[verifier.address], server=mutual_tls(files), http_listen="127.0.0.1:0"
    )
    address = running.gateway.http_address
    old = ssl.create_default_context(cafile=files["ca.pem"])
    old.load_cert_chain(files["client.test.pem"], files["client.test.key"])
    authority = trustme.CA()
    new = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    authority.issue_cert("new.test").configure_cert(new)
    # One that trusts the new server, and which the new server does not trust.
    foreign = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    foreign.load_cert_chain(files["client.test.pem"], files["client.test.key"])
    assert await status_of(address, old) == "HTTP/1.1 200 OK"
    with pytest.raises(ssl.SSLError):
        await status_of(address, new)
    certificate = authority.issue_cert("127.0.0.1")
    # Half of it: the old one stays in use.
    certificate.cert_chain_pems[0].write_to_path(files["127.0.0.1.pem"])
    assert await status_of(address, old) == "HTTP/1.1 200 OK"
    certificate.private_key_pem.write_to_path(files["127.0.0.1.key"])
    authority.cert_pem.write_to_path(files["ca.pem"])
    assert await status_of(address, new) == "HTTP/1.1 200 OK"
    assert await status_of(address, foreign) == ""
    with pytest.raises(ssl.SSLError):
        await status_of(address, old)
