"""Exchanges over a ProposeStream that is opened again after a failure.

Owns the call. Does not know the content of messages (`tandem.drafts.draft_exchange`).
"""

import asyncio
from typing import TypeAlias

import grpc

from tandem.generation import TandemError
from tandem.v1 import drafter_pb2, drafter_pb2_grpc

_Call: TypeAlias = (
    "grpc.aio.StreamStreamCall[drafter_pb2.ProposeRequest, drafter_pb2.ProposeResponse]"
)


class ProposeStream:
    """One ProposeStream at a time, with one batch in flight.

    Belongs to the event loop. Any failure of an exchange, the caller's cancellation too, ends the
    stream, because its answer may still arrive and would be taken for the next one's. The next
    exchange opens another stream.
    """

    def __init__(self, stub: "drafter_pb2_grpc.DrafterServiceAsyncStub") -> None:
        self._stub = stub
        self._call: _Call | None = None
        self._exchanging = asyncio.Lock()

    async def exchange(
        self, request: drafter_pb2.ProposeRequest, timeout_s: float | None
    ) -> drafter_pb2.ProposeResponse:
        """Sends a request and returns its answer.

        Raises:
            grpc.RpcError: the stream failed; the next exchange opens another.
            grpc.aio.UsageError: the channel is closed.
            TandemError: no answer in time, or the drafter ended the stream.
        """
        try:
            # The wait for other tasks' exchanges counts, too.
            async with asyncio.timeout(timeout_s), self._exchanging:
                return await self._exchange(request)
        except TimeoutError:
            raise TandemError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s} s"
            ) from None

    async def _exchange(self, request: drafter_pb2.ProposeRequest) -> drafter_pb2.ProposeResponse:
        if self._call is None or self._call.done():  # done: it ended between exchanges
            self._call = self._stub.ProposeStream()
        call = self._call
        is_answered = False
        try:
            is_written = await _write(call, request)
            response = await call.read() if is_written else grpc.aio.EOF
            if isinstance(response, drafter_pb2.ProposeResponse):
                is_answered = True
                return response
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
            # The server is stopping. Our own cancellation raises CancelledError instead.
        finally:
            if not is_answered:
                self.drop()
        raise TandemError(grpc.StatusCode.UNAVAILABLE, "the drafter ended the stream")

    def drop(self) -> None:
        """Ends the stream, if there is one."""
        if self._call is not None:
            # Otherwise its handler would run on: grpc.aio does not end abandoned calls.
            self._call.cancel()
            self._call = None


async def _write(call: _Call, request: drafter_pb2.ProposeRequest) -> bool:
    """Returns whether the request was written; False where the stream has ended."""
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        return False
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INTERNAL:
            raise
        # "Internal error from Core", where the true status is not known yet.
        return False
    return True
