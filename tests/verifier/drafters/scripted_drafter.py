"""A STAND-IN for the drafter, for what a real one does not do on demand: lose a sequence, answer
late, answer nonsense. It is a real gRPC server, and records every batch.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from servicekit.channels.limits import PING_TOLERANCE
from tandem.v1 import drafter_pb2 as pb
from verifier.drafters import wire

#: How long tests wait before they fail.
PATIENCE_S = 60.0

#: One batch's answers, as bytes on the wire: none, one as it should be, or several.
Answer = Callable[[pb.ProposeRequest], list[bytes]]


def appended(delta: pb.SequenceDelta, **fields: Any) -> pb.Proposal:
    """The proposal of a drafter that has appended the delta and found nothing."""
    proposal = pb.Proposal(
        sequence_id=delta.sequence_id,
        base_length=delta.base_length + len(delta.token_ids),
        status=pb.STATUS_NO_MATCH,
    )
    proposal.MergeFrom(pb.Proposal(**fields))
    return proposal


def proposing(propose: Callable[[pb.SequenceDelta], pb.Proposal]) -> Answer:
    """Answers each delta by itself."""

    def answer(request: pb.ProposeRequest) -> list[bytes]:
        proposals = [propose(delta) for delta in request.sequences]
        response = pb.ProposeResponse(batch_id=request.batch_id, proposals=proposals)
        return [response.SerializeToString()]

    return answer


no_match = proposing(appended)


class ScriptedDrafter:
    """See the module.

    Attributes:
        address: of the server, once it is started.
        answer: the answers to each batch; may be replaced at any time.
        answers_greeting: whether a stream's first message is answered.
        ends_streams: whether streams end as soon as they were greeted.
        may_answer: answers are kept back while this is cleared.
        batches: what was received, of all streams, without the greetings.
        num_streams: streams that were begun.
    """

    def __init__(self, answer: Answer = no_match) -> None:
        self.address = ""
        self.answer = answer
        self.answers_greeting = True
        self.ends_streams = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.batches: list[pb.ProposeRequest] = []
        self.num_streams = 0
        self._server: grpc.aio.Server | None = None
        self._recorded = asyncio.Condition()

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *PING_TOLERANCE])
        _, service, method = wire.METHOD.split("/")
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._propose_stream
        )
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        self._server.add_generic_rpc_handlers((handlers,))
        host = listen.rpartition(":")[0]
        self.address = f"{host}:{self._server.add_insecure_port(listen)}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    @property
    def deltas(self) -> list[pb.SequenceDelta]:
        """All deltas, of all streams, in order."""
        return [delta for batch in self.batches for delta in batch.sequences]

    @property
    def releases(self) -> list[pb.Release]:
        """All releases, of all streams, in order."""
        return [release for batch in self.batches for release in batch.releases]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the records fulfil a condition."""
        async with asyncio.timeout(PATIENCE_S), self._recorded:
            await self._recorded.wait_for(condition)

    async def _notify(self) -> None:
        async with self._recorded:
            self._recorded.notify_all()

    async def _propose_stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        self.num_streams += 1
        await self._notify()
        async for data in requests:
            request = pb.ProposeRequest.FromString(data)
            if not request.batch_id:
                if not self.answers_greeting:
                    await asyncio.Event().wait()
                yield pb.ProposeResponse().SerializeToString()
                if self.ends_streams:
                    return
                continue
            self.batches.append(request)
            await self._notify()
            await self.may_answer.wait()
            for answer in self.answer(request):
                yield answer
