"""Which clients a gateway serves, and what their credentials decide."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from servicekit.channels import watched_files
from servicekit.config import ServerOptions
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc
from tests.certificates import issue_uri_cert
from tests.gateway.clients import bearer, replace, write_clients
from tests.gateway.running_gateway import (
    GenerateCall,
    RunningGateway,
    StartGateway,
    collect,
    error_of,
    until,
)
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

Metadata = tuple[tuple[str, str], ...]


def call_with(running: RunningGateway, metadata: Metadata, **fields: Any) -> GenerateCall:
    request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[1]), **fields)
    return running.stub.Generate(request, metadata=metadata)


async def code_of(call: GenerateCall) -> grpc.StatusCode:
    try:
        await collect(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    return write_clients(tmp_path / "clients.yaml", a={"tokens": ["one"]}, b={"tokens": ["two"]})


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong"),
        bearer(""),
        (("authorization", "one"),),
        (("authorization", "Basic one"),),
        (*bearer("one"), *bearer("one")),
    ],
)
async def test_a_call_without_valid_token_is_refused_before_its_request_is_received(
    start_gateway: StartGateway, verifier: ScriptedVerifier, clients: Path, metadata: Metadata
) -> None:
    running = await start_gateway(verifiers=[verifier.address], clients=clients)
    error = await error_of(call_with(running, metadata))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert error.details() == "valid credentials are required"
    # A call that never sends its request is answered, too.
    begin: Any = running.channel.stream_stream("/tandem.v1.GenerationService/Generate")
    silent = begin(metadata=metadata)
    assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    reflection = reflection_pb2_grpc.ServerReflectionStub(running.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
    )
    assert await reflection.code() is grpc.StatusCode.UNAUTHENTICATED
    # Probes have no token.
    health = health_pb2_grpc.HealthStub(running.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
    assert running.sample("tandem_requests_received_total") == 0
    labels = {"service": "tandem.v1.GenerationService", "method": "Generate"}
    refused = running.sample("tandem_rpc_requests_total", code="UNAUTHENTICATED", **labels)
    assert refused == 2


async def test_the_token_decides_the_tenant(
    start_gateway: StartGateway, verifier: ScriptedVerifier, clients: Path
) -> None:
    running = await start_gateway(verifiers=[verifier.address], clients=clients)
    verifier.play(lambda opened: [5, STOP])
    for token in ("one", "two"):
        await collect(call_with(running, bearer(token)))
    await collect(call_with(running, (("authorization", "bearer  one"),)))
    assert [opened.cache_salt for opened in verifier.commands("open")] == ["1:a/", "1:b/", "1:a/"]


async def test_the_file_is_read_again_and_a_broken_one_changes_nothing(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    clients: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 0.01)
    running = await start_gateway(verifiers=[verifier.address], clients=clients)
    verifier.play(lambda opened: [5, STOP])
    assert await code_of(call_with(running, bearer("one"))) is grpc.StatusCode.OK

    def reloads(outcome: str) -> float:
        return running.sample("tandem_file_reloads_total", files="clients", outcome=outcome)

    write_clients(clients, a={"tokens": ["three"]})
    await until(lambda: reloads("success") == 1)
    assert await code_of(call_with(running, bearer("one"))) is grpc.StatusCode.UNAUTHENTICATED
    assert await code_of(call_with(running, bearer("three"))) is grpc.StatusCode.OK
    replace(clients, "tenants: [half a fi")
    await until(lambda: reloads("failure") == 1)
    assert await code_of(call_with(running, bearer("three"))) is grpc.StatusCode.OK
    replace(clients, "tenants: {a: {tokens: [three]}}")
    await until(lambda: reloads("failure") == 2)
    assert await code_of(call_with(running, bearer("three"))) is grpc.StatusCode.OK
    replace(clients, "tenants: !!bool x")
    await until(lambda: reloads("failure") == 3)
    assert await code_of(call_with(running, bearer("three"))) is grpc.StatusCode.OK
    failures = [entry for entry in running.log if entry["event"] == "files_not_reloaded"]
    assert [entry["files"] for entry in failures] == ["clients"] * 3
    write_clients(clients, a={"tokens": ["one"]})
    await until(lambda: reloads("success") == 2)
    assert await code_of(call_with(running, bearer("one"))) is grpc.StatusCode.OK


@contextlib.asynccontextmanager
async def mtls_channel(
    address: str, authority: trustme.CA, certificate: trustme.LeafCert
) -> AsyncIterator[grpc.aio.Channel]:
    credentials = grpc.ssl_channel_credentials(
        root_certificates=authority.cert_pem.bytes(),
        private_key=certificate.private_key_pem.bytes(),
        certificate_chain=b"".join(pem.bytes() for pem in certificate.cert_chain_pems),
    )
    async with grpc.aio.secure_channel(address, credentials) as channel:
        yield channel


async def test_a_certificate_s_name_stands_for_a_client(
    start_gateway: StartGateway, verifier: ScriptedVerifier, tmp_path: Path
) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    server.private_key_pem.write_to_path(tmp_path / "server.key")
    server.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    names = ("batch.test", "legacy", "spiffe://test/batch")
    running = await start_gateway(
        verifiers=[verifier.address],
        server=ServerOptions(
            listen="127.0.0.1:0",
            tls_cert=tmp_path / "server.pem",
            tls_key=tmp_path / "server.key",
            tls_client_ca=tmp_path / "ca.pem",
        ),
        clients=write_clients(
            tmp_path / "clients.yaml",
            a={"tokens": ["one"]},
            c={"clients": [{"certificate": name} for name in names]},
        ),
    )
    verifier.play(lambda opened: [5, STOP])
    address = running.gateway.server.address
    results = []
    for certificate, metadata in (
        (authority.issue_cert("batch.test"), ()),
        (authority.issue_cert(common_name="legacy"), ()),
        # The common name does not count beside alternative names.
        (authority.issue_cert("other.test", common_name="legacy"), ()),
        (authority.issue_cert("10.0.0.7", common_name="legacy"), ()),
        (issue_uri_cert(authority, "spiffe://test/batch"), ()),
        (authority.issue_cert("other.test"), ()),
        (authority.issue_cert("other.test"), bearer("one")),
        (authority.issue_cert("batch.test"), bearer("wrong")),
    ):
        async with mtls_channel(address, authority, certificate) as channel:
            stub: gateway_pb2_grpc.GenerationServiceAsyncStub
            stub = gateway_pb2_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[1]))
            results.append(await code_of(stub.Generate(request, metadata=metadata)))
    refused = grpc.StatusCode.UNAUTHENTICATED
    served = grpc.StatusCode.OK
    assert results == [
        *(served, served, refused, refused, served),
        *(refused, served, refused),
    ]
    assert [opened.cache_salt for opened in verifier.commands("open")] == ["1:c/"] * 3 + ["1:a/"]
