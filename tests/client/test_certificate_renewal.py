"""Clients whose certificate's files are replaced: streams go on, later calls use the new ones."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from tandem.client import (
    AsyncTandemClient,
    GenerationRequest,
    Started,
    TandemClient,
    TlsOptions,
)
from tandem.transport import renewed_channel
from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tests.client.in_thread import InThread
from tests.client.stand_in_gateway import Context, StandInGateway

pytestmark = pytest.mark.stand_in
REQUEST = GenerationRequest(prompt="ren")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewed_channel, "CHECK_INTERVAL_S", 0.0)


class Server(StandInGateway):
    """A gateway that notes whose certificate each call came with."""

    def __init__(self, authority: trustme.CA) -> None:
        super().__init__()
        self.callers: list[str] = []
        self.may_end = asyncio.Event()
        self._authority = authority

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        served = self._authority.issue_cert("localhost")
        gateway_pb2_grpc.add_GenerationServiceServicer_to_server(self, self.server)
        credentials = grpc.ssl_server_credentials(
            [(served.private_key_pem.bytes(), served.cert_chain_pems[0].bytes())],
            root_certificates=self._authority.cert_pem.bytes(),
            require_client_auth=True,
        )
        port = self.server.add_secure_port("127.0.0.1:0", credentials)
        await self.server.start()
        try:
            yield f"localhost:{port}"
        finally:
            await self.server.stop(0)

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        self._note(context)
        yield self.script[0]
        await self.may_end.wait()
        for response in self.script[1:]:
            yield response

    LoadPool: Any = None  # not called

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        self._note(context)
        return gateway_pb2.ListModelsResponse()

    def _note(self, context: Any) -> None:
        (name,) = context.auth_context()["peer_dns"]
        self.callers.append(name.decode())


class Files:
    """The files of a client."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        self._authority = authority
        self.options = TlsOptions(
            ca=folder / "ca.pem", certificate=folder / "cert.pem", key=folder / "key.pem"
        )
        authority.cert_pem.write_to_path(str(self.options.ca))

    def show(self, name: str) -> None:
        own = self._authority.issue_cert(name)
        assert self.options.certificate is not None
        assert self.options.key is not None
        own.cert_chain_pems[0].write_to_path(str(self.options.certificate))
        own.private_key_pem.write_to_path(str(self.options.key))


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Files:
    files = Files(tmp_path, authority)
    files.show("old.test")
    return files


@pytest.mark.parametrize("half", ["key", "certificate", "ca", "missing"])
async def test_files_that_are_half_replaced_are_not_used(
    authority: trustme.CA, files: Files, half: str
) -> None:
    """However long it takes until the rest comes."""
    server = Server(authority)
    file = getattr(files.options, "key" if half == "missing" else half)
    async with server.served() as target, AsyncTandemClient(target, tls=files.options) as client:
        await client.list_models()
        whole = file.read_bytes()
        other = authority.issue_cert("other.test")
        if half == "missing":
            file.unlink()
        else:
            file.write_bytes(
                {
                    "key": other.private_key_pem.bytes(),
                    "certificate": other.cert_chain_pems[0].bytes(),
                    "ca": whole[: len(whole) // 2],
                }[half]
            )
        for _ in range(2):
            await client.list_models(timeout_s=30)
        file.write_bytes(whole)
        files.show("new.test")
        await client.list_models()
        assert server.callers == ["old.test"] * 3 + ["new.test"]


def blocking(client: Callable[..., Any]) -> Callable[..., InThread]:
    return lambda *arguments, **options: InThread(client(*arguments, **options))


@pytest.mark.parametrize("connect", [blocking(TandemClient), AsyncTandemClient])
async def test_a_stream_goes_on_and_the_next_call_shows_the_new_certificate(
    authority: trustme.CA, files: Files, connect: Any
) -> None:
    server = Server(authority)
    async with server.served() as target, connect(target, tls=files.options) as client:
        events = client.stream(REQUEST)
        assert isinstance(await anext(events), Started)
        await client.list_models()
        files.show("new.test")
        await client.list_models()
        assert server.callers == ["old.test", "old.test", "new.test"]
        (channel,) = getattr(client, "client", client)._channels
        renewal = channel._renewal
        assert len(renewal._retired) == 1, "a stream is underway there"
        server.may_end.set()
        assert "".join([getattr(event, "text", "") async for event in events]) == "néw\nname"
        # gRPC tells the end of a call after its last message.
        async with asyncio.timeout(60):
            while renewal._retired:
                await client.list_models()
        assert renewal._current.num_calls == 0
