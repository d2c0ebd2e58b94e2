"""A STAND-IN for the drafter, for what a real one does not do on demand: lose a sequence, answer
late, answer nonsense. It records every batch.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tandem.v1 import drafter_pb2, drafter_pb2_grpc
from tests.gateway.scripted_server import ScriptedServer

Answer = Callable[[drafter_pb2.SequenceDelta], drafter_pb2.Proposal]


def no_match(delta: drafter_pb2.SequenceDelta) -> drafter_pb2.Proposal:
    """Appends everything, and proposes nothing."""
    return drafter_pb2.Proposal(
        sequence_id=delta.sequence_id,
        base_length=delta.base_length + len(delta.token_ids),
        status=drafter_pb2.STATUS_NO_MATCH,
    )


class ScriptedDrafter(ScriptedServer, drafter_pb2_grpc.DrafterServiceServicer):
    """See the module.

    Attributes:
        answer: the proposal for each delta; may be replaced at any time.
        wrong_batch_ids: how many of the next answers are to batches that nobody sent.
        holds: while true, answers are kept back until `let_go`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answer: Answer = no_match
        self.holds = False
        self.wrong_batch_ids = 0
        self.num_streams = 0
        self.batches: list[drafter_pb2.ProposeRequest] = []
        self._let_go = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)

    async def ProposeStream(
        self,
        request_iterator: AsyncIterator[drafter_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[drafter_pb2.ProposeResponse]:
        self.num_streams += 1
        async for request in request_iterator:
            if request.batch_id:  # not the greeting
                self.batches.append(request)
                await self.notify()
                if self.holds:
                    await self._let_go.wait()
            is_wrong = bool(request.batch_id and self.wrong_batch_ids)
            self.wrong_batch_ids -= is_wrong
            yield drafter_pb2.ProposeResponse(
                batch_id=request.batch_id + 1000 * is_wrong,
                proposals=[self.answer(delta) for delta in request.sequences],
            )

    async def Propose(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")

    async def Release(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")

    async def GetDrafterLoad(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")

    def let_go(self) -> None:
        """Sends the answers that were kept back, and all later ones."""
        self.holds = False
        self._let_go.set()

    def deltas(self) -> list[drafter_pb2.SequenceDelta]:
        """All deltas, of all streams, in order."""
        return [delta for batch in self.batches for delta in batch.sequences]

    def releases(self) -> list[str]:
        """All released sequences, in order."""
        return [release.sequence_id for batch in self.batches for release in batch.releases]

    async def nth(self, n: int) -> drafter_pb2.SequenceDelta:
        """Waits for the n-th delta, from 0."""
        await self.until(lambda: len(self.deltas()) > n)
        return self.deltas()[n]
