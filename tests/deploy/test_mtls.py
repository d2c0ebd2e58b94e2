"""Real certificates with the names of the mtls component's manifests."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from servicekit import probe
from servicekit.address import parse_address
from servicekit.channels.tls import channel_credentials
from servicekit.config import ChannelOptions, ServerOptions
from servicekit.logs import get_logger
from servicekit.serving.health import LIVENESS_NAME
from servicekit.serving.server import Server
from tests.deploy.manifests import environment, named, workloads

VARIANT = "ha+mtls+keda+hpa"


@pytest.fixture
def secrets(tmp_path: Path) -> Mapping[str, Path]:
    """A folder per certificate, like cert-manager's, with tls.crt, tls.key and ca.crt."""
    authority = trustme.CA()
    folders = {}
    for service in ("gateway", "drafter", "verifier"):
        spec = named(VARIANT, "Certificate", f"tandem-{service}")["spec"]
        issued = authority.issue_cert(*spec["dnsNames"], common_name=spec["commonName"])
        folder = folders[service] = tmp_path / service
        folder.mkdir()
        (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        (folder / "tls.crt").write_bytes(chain)
        authority.cert_pem.write_to_path(folder / "ca.crt")
    return folders


@pytest.mark.parametrize(("caller", "callee"), [("gateway", "verifier"), ("verifier", "drafter")])
async def test_services_connect_by_every_name_and_probes_need_no_certificate(
    secrets: Mapping[str, Path], caller: str, callee: str
) -> None:
    own, theirs = secrets[caller], secrets[callee]
    server = Server(
        ServerOptions(
            health_listen="127.0.0.1:0",
            tls_cert=theirs / "tls.crt",
            tls_key=theirs / "tls.key",
            tls_client_ca=theirs / "ca.crt",
        ),
        service=callee,
        service_names=[],
        error_table={},
        registry=CollectorRegistry(),
        logger=get_logger("test"),
    )
    credentials = channel_credentials(
        server.options.listen,
        ChannelOptions(
            peer_tls_ca=own / "ca.crt",
            peer_tls_cert=own / "tls.crt",
            peer_tls_key=own / "tls.key",
        ),
    )
    assert credentials is not None
    # Verifiers call drafters by the names that gateways give them.
    addresses = environment(VARIANT, workloads(VARIANT)[0])[f"TANDEM_GATEWAY_{callee.upper()}S"]
    async with server:
        server.set_serving()
        for address in addresses.split(","):
            # There is no cluster DNS here; the certificate's name is checked nevertheless.
            override = ("grpc.ssl_target_name_override", parse_address(address).host)
            async with grpc.aio.secure_channel(
                server.address, credentials, options=[override]
            ) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert server.health_address is not None
        arguments = [server.health_address, "--service", LIVENESS_NAME, "--timeout-s", "20"]
        assert await asyncio.to_thread(probe.main, arguments) == 0
        # The main port refuses plaintext.
        assert await asyncio.to_thread(probe.main, [server.address, "--timeout-s", "20"]) == 1
