"""API keys are the tokens of gRPC: they name the tenant."""

import ssl
from pathlib import Path
from typing import Any

import openai
import pytest
import trustme

from servicekit.config import ServerOptions
from tests.certificates import issue_uri_cert
from tests.gateway.clients import write_clients
from tests.gateway.openai.clients import exchange, get, official_client, post, request_bytes
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

BODY: dict[str, Any] = {"model": "scripted", "prompt": [1, 2]}


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    return write_clients(
        tmp_path / "clients.yaml",
        acme={"tokens": ["secret"], "clients": [{"certificate": "client.test"}]},
    )


async def test_a_key_names_the_tenant(
    start_api: StartApi, verifier: ScriptedVerifier, clients: Path
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_api(clients=clients)
    async with official_client(running, token="secret") as client:
        await client.completions.create(**BODY)
        assert len((await client.models.list()).data) == 1
    assert (await verifier.nth("open", 0)).cache_salt == "4:acme/"


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}],
    ids=["none", "wrong", "other scheme"],
)
async def test_without_a_key_only_probes_are_answered(
    start_api: StartApi, clients: Path, headers: dict[str, str]
) -> None:
    running = await start_api(clients=clients)
    # Refused by its head: the body is not even JSON.
    answer = await post(running, "/v1/completions", b"{", **headers)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (await get(running, "/v1/models", **headers)).status == 401
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert (await get(running, path, **headers)).status == 200


async def test_a_priority_over_the_clients_ceiling_is_forbidden(
    start_api: StartApi, clients: Path
) -> None:
    running = await start_api(clients=clients)
    async with official_client(running, token="secret") as client:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.completions.create(**BODY, extra_body={"priority": 1})
        assert caught.value.param == "priority"


async def test_a_certificate_names_the_tenant(
    start_api: StartApi, verifier: ScriptedVerifier, clients: Path, tmp_path: Path
) -> None:
    verifier.play(lambda opened: [5, 0])
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, certificate in {
        **{
            name: authority.issue_cert(name)
            for name in ("127.0.0.1", "client.test", "other.test", "drafter.test")
        },
        # Neither its address is a name, nor the common name beside it.
        "address": authority.issue_cert("10.0.0.7", common_name="client.test"),
        "uri": issue_uri_cert(authority, "spiffe://test/client"),
    }.items():
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    running = await start_api(
        clients=clients,
        server=ServerOptions(
            listen="127.0.0.1:0",
            tls_cert=tmp_path / "127.0.0.1.pem",
            tls_key=tmp_path / "127.0.0.1.key",
            tls_client_ca=tmp_path / "ca.pem",
            allowed_clients=["client.test", "other.test", "10.0.0.7", "spiffe://test/client"],
        ),
    )

    def context(name: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        return context

    sent = request_bytes("/v1/completions", BODY)
    answer = await exchange(running, sent, context("client.test"))
    assert answer.status == 200
    assert (await verifier.nth("open", 0)).cache_salt == "4:acme/"
    other = await exchange(running, sent, context("other.test"))
    assert other.status == 401
    assert (await exchange(running, sent, context("uri"))).status == 401
    for name in ("drafter.test", "address"):
        assert (await exchange(running, sent, context(name))).status == 403
    assert running.sample("tandem_request_errors_total", code="PERMISSION_DENIED") == 2
