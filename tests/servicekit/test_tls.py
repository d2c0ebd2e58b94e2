"""TLS and mTLS from files: which clients are served, and the errors of wrong files."""

import contextlib
import datetime
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from servicekit.channels.tls import (
    ServerCertificate,
    channel_credentials,
    read_channel_certificate,
    watch_server_certificate,
)
from servicekit.config import ChannelOptions, ConfigError, ServerOptions
from servicekit.serving.server import Server
from tests.encrypted_key import encrypted_key
from tests.servicekit.factories import check_health, make_server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates and keys of a server, of a client, and of one whom nobody knows."""
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    certificates = {
        "server": authority.issue_cert("127.0.0.1", "localhost"),
        "client": authority.issue_cert("client.test"),
        "rogue": stranger.issue_cert("client.test"),
        "elsewhere": authority.issue_cert("elsewhere.test"),
    }
    for name, certificate in certificates.items():
        (folder / f"{name}.key").write_bytes(certificate.private_key_pem.bytes())
        chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
        (folder / f"{name}.pem").write_bytes(chain)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    stranger.cert_pem.write_to_path(folder / "rogue-ca.pem")
    (folder / "encrypted.key").write_bytes(encrypted_key(certificates["server"]))
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    (folder / "weak.key").write_bytes(
        weak.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "weak.pem").write_bytes(self_signed(weak))
    # What cryptography does not know, OpenSSL may: the id of keys on elliptic curves, changed.
    der = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).public_bytes(
        serialization.Encoding.DER
    )
    unknown = der.replace(bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06072a8648ce3d0209"))
    assert unknown != der
    (folder / "unknown.pem").write_text(ssl.DER_cert_to_PEM_cert(unknown))
    (folder / "garbage.pem").write_bytes(b"\xff\x00not a certificate")
    (folder / "empty.pem").write_bytes(b"")
    intact = authority.cert_pem.bytes()
    (folder / "damaged.pem").write_bytes(intact[:100] + b"\xff" + intact[100:])
    os.mkfifo(folder / "pipe.pem")
    (folder / "missing.pem").unlink(missing_ok=True)
    return {name: folder / name for name in [*(p.name for p in folder.iterdir()), "missing.pem"]}


def certificate_of(**options: Any) -> ServerCertificate | None:
    watched = watch_server_certificate(ServerOptions(**options), on_reload=lambda _: None)
    return None if watched is None else watched.value


def self_signed(key: rsa.RSAPrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=now,
        not_valid_after=now + datetime.timedelta(days=1),
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@contextlib.asynccontextmanager
async def served(files: dict[str, Path], *, mtls: bool, **options: Any) -> AsyncIterator[Server]:
    server = make_server(
        tls_cert=files["server.pem"],
        tls_key=files["server.key"],
        tls_client_ca=files["ca.pem"] if mtls else None,
        **options,
    )
    await server.start()
    server.set_serving()
    try:
        yield server
    finally:
        await server.stop(0)


async def assert_refused(address: str, server_name: str | None = None, /, **options: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check_health(address, server_name, **options)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_private_keys_are_not_shown(files: dict[str, Path]) -> None:
    for held in (
        certificate_of(tls_cert=files["server.pem"], tls_key=files["server.key"]),
        read_channel_certificate(
            ChannelOptions(
                peer_tls_ca=files["ca.pem"],
                peer_tls_cert=files["client.pem"],
                peer_tls_key=files["client.key"],
            )
        ),
    ):
        assert "BEGIN CERTIFICATE" in repr(held)
        assert "PRIVATE KEY" not in repr(held)


async def test_tls_serves_clients_that_trust_the_authority_and_speak_tls(
    files: dict[str, Path],
) -> None:
    async with served(files, mtls=False) as server:
        ca = files["ca.pem"]
        assert await check_health(server.address, peer_tls_ca=ca) == 1
        by_name = server.address.replace("127.0.0.1", "localhost")
        assert await check_health(by_name, peer_tls_ca=ca) == 1
        await assert_refused(server.address)
        await assert_refused(server.address, peer_tls_ca=files["rogue-ca.pem"])


async def test_a_certificate_for_another_name_is_refused(files: dict[str, Path]) -> None:
    elsewhere = {
        **files,
        "server.pem": files["elsewhere.pem"],
        "server.key": files["elsewhere.key"],
    }
    async with served(elsewhere, mtls=False) as server:
        await assert_refused(server.address, peer_tls_ca=files["ca.pem"])


async def test_an_address_that_a_name_led_to_must_have_the_names_certificate(
    files: dict[str, Path],
) -> None:
    elsewhere = {
        **files,
        "server.pem": files["elsewhere.pem"],
        "server.key": files["elsewhere.key"],
    }
    ca = files["ca.pem"]
    async with served(elsewhere, mtls=False) as server:
        assert await check_health(server.address, "elsewhere.test", peer_tls_ca=ca) == 1
        for name in ("other.test", "a.elsewhere.test", "127.0.0.1"):
            await assert_refused(server.address, name, peer_tls_ca=ca)
    async with served(files, mtls=False) as server:
        # Its own address is in its certificate, and does not count.
        await assert_refused(server.address, "elsewhere.test", peer_tls_ca=ca)


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"tls_cert": "missing.pem", "tls_key": "server.key"}, "--tls-cert", "No such file"),
        ({"tls_cert": "server.pem", "tls_key": "missing.pem"}, "--tls-key", "No such file"),
        ({"tls_cert": "pipe.pem", "tls_key": "server.key"}, "--tls-cert", "no regular file"),
        ({"tls_cert": "server.pem", "tls_key": "pipe.pem"}, "--tls-key", "no regular file"),
        ({"tls_cert": "garbage.pem", "tls_key": "server.key"}, "--tls-cert", "no certificate"),
        ({"tls_cert": "empty.pem", "tls_key": "server.key"}, "--tls-cert", "no certificate"),
        ({"tls_cert": "server.key", "tls_key": "server.key"}, "--tls-cert", "no certificate"),
        ({"tls_cert": "server.pem", "tls_key": "garbage.pem"}, "--tls-key", "no private key"),
        ({"tls_cert": "server.pem", "tls_key": "server.pem"}, "--tls-key", "no private key"),
        ({"tls_cert": "server.pem", "tls_key": "client.key"}, "--tls-key", "is not the key of"),
        ({"tls_cert": "server.pem", "tls_key": "encrypted.key"}, "--tls-key", "is encrypted"),
        # OpenSSL, which is HTTP's, refuses what gRPC would serve.
        ({"tls_cert": "weak.pem", "tls_key": "weak.key"}, "--tls-cert", "key too small"),
        ({"tls_cert": "unknown.pem", "tls_key": "server.key"}, "--tls-cert", "an unknown kind"),
        ({"tls_cert": "server.pem"}, "--tls-cert", "needs --tls-key"),
        ({"tls_key": "server.key"}, "--tls-key", "needs --tls-cert"),
        ({"tls_client_ca": "ca.pem"}, "--tls-client-ca", "needs --tls-cert"),
        (
            {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "garbage.pem"},
            "--tls-client-ca",
            "no certificate",
        ),
    ],
)
def test_a_wrong_file_of_a_server_is_named_with_its_flag(
    files: dict[str, Path], options: dict[str, str], key: str, message: str
) -> None:
    paths: dict[str, Any] = {key: files[name] for key, name in options.items()}
    with pytest.raises(ConfigError) as caught:
        certificate_of(**paths)
    assert caught.value.key == key
    assert message in caught.value.message
    if not caught.value.message.startswith("needs"):
        name = options[key.removeprefix("--").replace("-", "_")]
        assert str(files[name]) in caught.value.message


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"peer_tls_ca": "missing.pem"}, "--peer-tls-ca", "No such file"),
        ({"peer_tls_ca": "pipe.pem"}, "--peer-tls-ca", "no regular file"),
        ({"peer_tls_ca": "garbage.pem"}, "--peer-tls-ca", "no certificate"),
        ({"peer_tls_ca": "damaged.pem"}, "--peer-tls-ca", "no certificate"),
        ({"peer_tls_cert": "client.pem"}, "--peer-tls-cert", "needs --peer-tls-ca"),
        ({"peer_tls_key": "client.key"}, "--peer-tls-key", "needs --peer-tls-ca"),
        (
            {"peer_tls_ca": "ca.pem", "peer_tls_cert": "client.pem"},
            "--peer-tls-cert",
            "needs --peer-tls-key",
        ),
        (
            {"peer_tls_ca": "ca.pem", "peer_tls_cert": "client.pem", "peer_tls_key": "rogue.key"},
            "--peer-tls-key",
            "is not the key of",
        ),
    ],
)
def test_a_wrong_file_of_a_client_is_named_with_its_flag(
    files: dict[str, Path], options: dict[str, str], key: str, message: str
) -> None:
    paths: dict[str, Any] = {key: files[name] for key, name in options.items()}
    with pytest.raises(ConfigError) as caught:
        channel_credentials("127.0.0.1:1", ChannelOptions(**paths))
    assert caught.value.key == key
    assert message in caught.value.message


def test_a_server_speaks_plaintext_on_loopback_or_where_a_flag_allows_it() -> None:
    for listen in ("127.0.0.1:0", "localhost:0", "[::1]:0"):
        assert certificate_of(listen=listen) is None
    for listen in ("0.0.0.0:0", "[::]:0", "10.0.0.1:0", "example.org:0"):
        with pytest.raises(ConfigError, match="is not loopback") as caught:
            certificate_of(listen=listen)
        assert caught.value.key == "--listen"
        assert listen in caught.value.message
        assert "--allow-plaintext" in caught.value.message
        assert certificate_of(listen=listen, allow_plaintext=True) is None


def test_a_client_speaks_plaintext_to_loopback_or_where_a_flag_allows_it(
    files: dict[str, Path],
) -> None:
    for target in ("127.0.0.1:1", "dns:///localhost:1", "unix:/x"):
        assert channel_credentials(target, ChannelOptions()) is None
    for target in ("peer:50051", "dns:///peer:50051"):
        with pytest.raises(ConfigError, match="is not loopback") as caught:
            channel_credentials(target, ChannelOptions())
        assert caught.value.key == "--peer-tls-ca"
        assert target in caught.value.message
        assert "--peer-allow-plaintext" in caught.value.message
        assert channel_credentials(target, ChannelOptions(peer_allow_plaintext=True)) is None
        assert channel_credentials(target, ChannelOptions(peer_tls_ca=files["ca.pem"]))
