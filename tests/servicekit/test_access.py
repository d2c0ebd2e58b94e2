"""Which certificates may call, by name."""

from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from servicekit.channels.channel import open_channel
from servicekit.channels.tls import watch_server_certificate
from servicekit.config import ChannelOptions, ConfigError, ServerOptions
from servicekit.interceptors.access import CallerNotAllowedError, check_names
from servicekit.interceptors.callers import Caller
from tests.servicekit.factories import SERVICE, call, check_health, make_server


@pytest.mark.parametrize(
    ("names", "allowed", "is_allowed"),
    [
        (["a.test"], ["a.test"], True),
        (["A.Test"], ["a.tesT"], True),
        (["b.test", "a.test"], ["c.test", "a.test"], True),
        (["spiffe://test/a"], ["spiffe://test/a"], True),
        (["a.test"], ["*.test"], True),
        (["a.b.test"], ["*.test"], False),
        (["test"], ["*.test"], False),
        ([".test"], ["*.test"], False),
        (["atest"], ["*.test"], False),
        (["xa.test"], ["a.test"], False),
        (["a.test.evil"], ["a.test", "*.test"], False),
        (["*.test"], ["a.test"], False),
        ([], ["a.test", "*.test"], False),
        ([""], ["*."], False),
    ],
)
def test_names_match_whole_and_a_star_stands_for_one_label(
    names: list[str], allowed: list[str], is_allowed: bool
) -> None:
    caller = Caller(certificate_names=tuple(names))
    if is_allowed:
        check_names(caller, allowed)
    else:
        with pytest.raises(CallerNotAllowedError):
            check_names(caller, allowed)


async def test_only_allowed_certificates_may_call_and_health_is_open(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca")
    for name in ("127.0.0.1", "friend.test", "other.test"):
        certificate = authority.issue_cert(name)
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / name)
    begun = []

    async def echo(_request: bytes, _context: Any) -> bytes:
        begun.append(True)
        return b"answer"

    server = make_server(
        tls_cert=tmp_path / "127.0.0.1",
        tls_key=tmp_path / "127.0.0.1.key",
        tls_client_ca=tmp_path / "ca",
        allowed_clients=["friend.test"],
    )
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.grpc.add_registered_method_handlers(SERVICE, handlers)
    async with server:
        server.set_serving()
        for name in ("friend.test", "other.test"):
            options: dict[str, Any] = {
                "peer_tls_ca": tmp_path / "ca",
                "peer_tls_cert": tmp_path / name,
                "peer_tls_key": tmp_path / f"{name}.key",
            }
            assert await check_health(server.address, **options) == 1
            async with open_channel(server.address, ChannelOptions(**options)) as channel:
                if name == "friend.test":
                    assert await call(channel) == b"answer"
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "other.test" in (caught.value.details() or "")
    assert len(begun) == 1


@pytest.mark.parametrize("has_tls", [False, True])
def test_names_need_client_certificates(tmp_path: Path, has_tls: bool) -> None:
    options: dict[str, Any] = {}
    if has_tls:
        certificate = trustme.CA().issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(tmp_path / "key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert")
        options = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
    with pytest.raises(ConfigError, match="needs --tls-client-ca") as caught:
        watch_server_certificate(
            ServerOptions(allowed_clients=["a.test"], **options), on_reload=lambda _: None
        )
    assert caught.value.key == "--allowed-clients"
