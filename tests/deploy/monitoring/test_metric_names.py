"""The names, types and labels of all metrics that running services export are frozen.

Dashboards and alerts of operators rely on them. After a deliberate change:

    python -m tests.deploy.monitoring.test_metric_names
"""

import asyncio
import datetime
import difflib
import tempfile
from pathlib import Path

import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions, ServerOptions
from servicekit.logs import get_logger
from tandem.client import GenerationRequest
from tests.deploy.monitoring.metric_names import GOLDEN, scrape
from tests.integration.stack import running_stack, verifier_config
from verifier.server import VerifierServer


async def scrape_all(folder: Path) -> str:
    """The golden text, from three real services with TLS between them after a request."""
    tls = make_certificate(folder)
    served = ServerOptions(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        tls_cert=tls["cert"],
        tls_key=tls["key"],
        tls_client_ca=tls["ca"],
    )
    peers = ChannelOptions(
        peer_tls_ca=tls["ca"], peer_tls_cert=tls["cert"], peer_tls_key=tls["key"]
    )
    async with running_stack(
        verifier=verifier_config(server=served, peers=peers),
        drafter={"server": served},
        gateway={
            "server": ServerOptions(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0"),
            "peers": peers,
        },
    ) as stack:
        await stack.generate(GenerationRequest(prompt=[9, 10, 11] * 8, max_new_tokens=8))
        servers = {
            "drafter": stack.drafter.server,
            "gateway": stack.gateway.server,
            "verifier": stack.verifier.server,
        }
        lines: set[str] = set()
        for service, server in servers.items():
            assert server.metrics_address is not None
            # An ended call gives series of calls; the gateway has had one.
            if service != "gateway":
                async with open_channel(server.address, peers) as channel:
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            lines |= await asyncio.to_thread(scrape, server.metrics_address, service)
        await stack.check_idle()
    return "".join(f"{line}\n" for line in sorted(lines))


def make_certificate(folder: Path) -> dict[str, Path]:
    authority = trustme.CA()
    certificate = authority.issue_cert(
        "127.0.0.1", not_after=datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=90)
    )
    paths = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    certificate.cert_chain_pems[0].write_to_path(paths["cert"])
    certificate.private_key_pem.write_to_path(paths["key"])
    return paths


async def test_running_services_export_exactly_the_frozen_metrics(tmp_path: Path) -> None:
    found = await scrape_all(tmp_path)
    difference = difflib.unified_diff(
        GOLDEN.read_text().splitlines(), found.splitlines(), "written down", "exported", lineterm=""
    )
    assert found == GOLDEN.read_text(), "\n".join(difference)


async def test_callers_export_the_expiry_of_the_certificate_that_they_present(
    tmp_path: Path,
) -> None:
    tls = make_certificate(tmp_path)
    peers = ChannelOptions(
        peer_tls_ca=tls["ca"], peer_tls_cert=tls["cert"], peer_tls_key=tls["key"]
    )
    registries = {"gateway": CollectorRegistry(), "verifier": CollectorRegistry()}
    logger = get_logger("test")
    calling = verifier_config(drafters=["127.0.0.1:1"], peers=peers)
    VerifierServer(calling, registry=registries["verifier"], logger=logger)
    server = GatewayServer(
        GatewayConfig(verifiers=["127.0.0.1:1"], peers=peers),
        registry=registries["gateway"],
        logger=logger,
    )
    await server.stop()
    for service, registry in registries.items():
        expiry_s = registry.get_sample_value(
            "tandem_certificate_expiry_timestamp_seconds", {"certificate": "peer"}
        )
        assert expiry_s is not None, service
        days_left = (expiry_s - datetime.datetime.now(datetime.UTC).timestamp()) / 86400
        assert 89 < days_left <= 90


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        GOLDEN.write_text(asyncio.run(scrape_all(Path(temporary))))
