"""The asyncio client of a Tandem gateway; import it from `tandem.client`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self, TypeVar

import grpc

from tandem import wire
from tandem.continuation import Continuation
from tandem.generation import Event, EventCollector, Generation, GenerationRequest, Model, Started
from tandem.transport.channel import (
    TlsOptions,
    may_have_several,
    open_async_channel,
    parse_targets,
    token_metadata,
)
from tandem.transport.retry import Attempts, Failover, RetryPolicy
from tandem.v1 import gateway_pb2, gateway_pb2_grpc

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


class AsyncTandemClient:
    """Asyncio client; belongs to the event loop that it was made in.

    Args:
        targets: where the gateways' gRPC is; see `TandemClient`, also for what follows.
        tls: None speaks plaintext.
        token: sent with every call, as `authorization: Bearer TOKEN`.
        allow_plaintext_token: sends it without TLS beyond this machine, too.
        retry: how requests get over failures; None raises each failure at once.

    Raises:
        ValueError: an argument cannot be used.
        OSError: a file of `tls` cannot be read.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        tls: TlsOptions | None = None,
        token: str | None = None,
        allow_plaintext_token: bool = False,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008 - immutable
    ) -> None:
        targets = parse_targets(targets)
        self._metadata = token_metadata(token, targets, tls, allow_plaintext=allow_plaintext_token)
        resumes = retry is not None and may_have_several(targets)
        # First those with the short keepalive, if any; last, for each target, one with the long
        # keepalive (`Attempts.is_patient`).
        self._channels = [
            open_async_channel(target, tls, round_robin=True, resumes=is_short)
            for is_short in ((True, False) if resumes else (False,))
            for target in targets
        ]
        self._stubs: list[gateway_pb2_grpc.GenerationServiceAsyncStub] = [
            gateway_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels
        ]
        self._num_targets = len(targets)
        self._failover = Failover(len(targets), retry)
        self._closed = asyncio.Event()

    async def stream(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yields one Started, then Chunks, then one Finished per choice; see `TandemClient.stream`.

        Leave it early through `contextlib.aclosing`: a `break` alone leaves the call open until
        the event loop finalises the iterator.

        Raises:
            TandemError: the request failed; events yielded before stay valid.
        """
        continuation = Continuation(request)
        attempts = self._failover.begin(timeout_s)
        while (wanted := continuation.next_call()) is not None:
            call = self._next_stub(attempts).Generate(
                wire.to_request(wanted), timeout=attempts.time_left_s, metadata=self._metadata
            )
            try:
                async for response in call:
                    if (event := wire.to_event(response)) is None:
                        continue
                    if not isinstance(event, Started):
                        attempts.bring_output()
                    if (shown := continuation.receive(event)) is not None:
                        yield shown
                continuation.end()
                attempts.succeed()
            except asyncio.CancelledError:
                wire.raise_if_closed(self._closed.is_set())
                raise
            except grpc.RpcError as error:
                failure = wire.to_error(error)
                pause_s = attempts.fail(failure)
                if pause_s is None:
                    raise failure from error
                for finished in continuation.interrupt():
                    yield finished
                if await self._is_closed_after(pause_s):
                    raise wire.closed_error() from error
            finally:
                # Otherwise its handler would run on: grpc.aio does not end abandoned calls.
                call.cancel()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> Generation:
        """Returns the whole result at once.

        Raises:
            TandemError: the request failed.
        """
        collector = EventCollector()
        async for event in self.stream(request, timeout_s=timeout_s):
            collector.add(event)
        return collector.generation()

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Returns the models that the gateway serves.

        Raises:
            TandemError: the call failed.
        """
        request = gateway_pb2.ListModelsRequest()
        return wire.to_models(await self._call(lambda stub: stub.ListModels, request, timeout_s))

    async def load_pool(
        self, pool: str, text: str, *, model_id: str = "", timeout_s: float | None = None
    ) -> int:
        """Puts a text into a pool; see `TandemClient.load_pool`.

        Raises:
            TandemError: the call failed.
        """
        request = wire.to_load_request(pool, text, model_id)
        return (await self._call(lambda stub: stub.LoadPool, request, timeout_s)).num_tokens

    async def close(self) -> None:
        """Closes the channels; calls still open end with CANCELLED, as do later ones."""
        self._closed.set()
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(
        self,
        method: "Callable[[gateway_pb2_grpc.GenerationServiceAsyncStub], "
        "grpc.aio.UnaryUnaryMultiCallable[_RequestT, _ResponseT]]",
        request: _RequestT,
        timeout_s: float | None,
    ) -> _ResponseT:
        """The answer of a call that may be repeated after failures, as far as `retry` allows."""
        attempts = self._failover.begin(timeout_s)
        while True:
            try:
                response = await method(self._next_stub(attempts))(
                    request, timeout=attempts.time_left_s, metadata=self._metadata
                )
            except asyncio.CancelledError:
                wire.raise_if_closed(self._closed.is_set())
                raise
            except grpc.RpcError as error:
                failure = wire.to_error(error)
                pause_s = attempts.fail(failure)
                if pause_s is None:
                    raise failure from error
                if await self._is_closed_after(pause_s):
                    raise wire.closed_error() from error
            else:
                attempts.succeed()
                return response

    async def _is_closed_after(self, pause_s: float) -> bool:
        """Pauses, until the client is closed at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closed.wait()
        return self._closed.is_set()

    def _next_stub(self, attempts: Attempts) -> "gateway_pb2_grpc.GenerationServiceAsyncStub":
        if self._closed.is_set():
            raise wire.closed_error()
        return self._stubs[attempts.next_gateway() - self._num_targets * attempts.is_patient]
