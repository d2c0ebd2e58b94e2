"""Who may call whom, by certificate: a client's opens neither a verifier nor a drafter."""

from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions, ServerOptions
from tandem.client import GenerationRequest
from tandem.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.integration.prompts import rename_prompts
from tests.integration.stack import EVERY_DRAFT, running_stack, verifier_config


async def test_a_clients_certificate_opens_neither_a_verifier_nor_a_drafter(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca")
    for name in ("gateway", "verifier", "drafter", "client"):
        certificate = authority.issue_cert("127.0.0.1", f"{name}.test")
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")

    def served(name: str, *, allowed: str) -> ServerOptions:
        return ServerOptions(
            listen="127.0.0.1:0",
            tls_cert=tmp_path / f"{name}.pem",
            tls_key=tmp_path / f"{name}.key",
            tls_client_ca=tmp_path / "ca",
            allowed_clients=[allowed],
        )

    def peers(name: str) -> ChannelOptions:
        return ChannelOptions(
            peer_tls_ca=tmp_path / "ca",
            peer_tls_cert=tmp_path / f"{name}.pem",
            peer_tls_key=tmp_path / f"{name}.key",
        )

    async with running_stack(
        verifier=verifier_config(
            server=served("verifier", allowed="gateway.test"), peers=peers("verifier")
        ),
        drafter={"server": served("drafter", allowed="verifier.test")},
        gateway={"peers": peers("gateway"), **EVERY_DRAFT},
    ) as stack:
        prompt = rename_prompts(1, seed=3)[0]
        generation = await stack.generate(GenerationRequest(prompt=prompt, max_new_tokens=40))
        assert generation.usage.num_draft_tokens > 0, "the services may call each other"
        for name in ("client", "gateway"):
            address = stack.drafter.server.address
            async with open_channel(address, peers(name)) as channel:
                drafter = drafter_pb2_grpc.DrafterServiceStub(channel)
                await assert_denied(drafter.Propose(drafter_pb2.ProposeRequest()))
        for name in ("client", "drafter"):
            address = stack.verifier.server.address
            async with open_channel(address, peers(name)) as channel:
                verifier = verifier_pb2_grpc.VerifierServiceStub(channel)
                await assert_denied(verifier.GetModelInfo(verifier_pb2.GetModelInfoRequest()))
                await assert_denied(verifier.Session().read())


async def assert_denied(call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
