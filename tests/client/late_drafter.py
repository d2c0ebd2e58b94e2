"""A stand-in for the drafter: a grpc.aio server on loopback that answers late."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from tandem.v1 import drafter_pb2, drafter_pb2_grpc
from tests.client.drafter_model import DrafterModel

_Context = grpc.aio.ServicerContext[drafter_pb2.ProposeRequest, drafter_pb2.ProposeResponse]
_ReleaseContext = grpc.aio.ServicerContext[drafter_pb2.ReleaseRequest, drafter_pb2.ReleaseResponse]
_LoadContext = grpc.aio.ServicerContext[
    drafter_pb2.GetDrafterLoadRequest, drafter_pb2.GetDrafterLoadResponse
]


class LateDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers batches once `may_answer` is set.

    Attributes:
        release_s: how long a release takes.
        has_release: set when one has come.
    """

    def __init__(self) -> None:
        self.model = DrafterModel()
        self.may_answer = asyncio.Event()
        self.release_s = 0.0
        self.has_release = asyncio.Event()
        self.address = ""

    async def Propose(
        self, request: drafter_pb2.ProposeRequest, context: _Context
    ) -> drafter_pb2.ProposeResponse:
        await self.may_answer.wait()
        return self.model.answer(request)

    async def ProposeStream(
        self, request_iterator: AsyncIterator[drafter_pb2.ProposeRequest], context: _Context
    ) -> AsyncIterator[drafter_pb2.ProposeResponse]:
        async for request in request_iterator:
            await self.may_answer.wait()
            yield self.model.answer(request)

    async def Release(
        self, request: drafter_pb2.ReleaseRequest, context: _ReleaseContext
    ) -> drafter_pb2.ReleaseResponse:
        self.has_release.set()
        await asyncio.sleep(self.release_s)
        return drafter_pb2.ReleaseResponse()

    async def GetDrafterLoad(
        self, request: drafter_pb2.GetDrafterLoadRequest, context: _LoadContext
    ) -> drafter_pb2.GetDrafterLoadResponse:
        return drafter_pb2.GetDrafterLoadResponse()


@contextlib.asynccontextmanager
async def late_drafter() -> AsyncIterator[LateDrafter]:
    servicer = LateDrafter()
    server = grpc.aio.server()
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    servicer.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)
