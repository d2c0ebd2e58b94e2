"""The clients of a Tandem gateway: `TandemClient` blocks, `AsyncTandemClient` is for asyncio.

    # The bundled model renames an identifier: this prints bill = price + tax.
    prompt = "<|code|>total = price + tax<|rename|>total<|to|>bill<|out|>"
    with TandemClient("127.0.0.1:50050") as client:
        print(client.generate(GenerationRequest(prompt=prompt)).text)

    async with AsyncTandemClient("127.0.0.1:50050") as client:
        request = GenerationRequest(prompt=prompt)
        async with contextlib.aclosing(client.stream(request)) as events:
            async for event in events:
                ...

`DrafterClient` and `AsyncDrafterClient` call a drafter without a gateway, for engines that verify
drafts by themselves.

Everything that a caller needs is importable from here. A failed call raises `TandemError` and
nothing else. A stream that is left early (its iterator is closed, an exception, a task's
cancellation) cancels its call, and the servers free its resources within one step of the model.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Self

import grpc

from tandem import wire
from tandem.channel import TlsOptions, open_async_channel, open_channel
from tandem.drafter_client import AsyncDrafterClient, DrafterClient
from tandem.drafting import (
    Draft,
    DraftedSequence,
    DrafterLoad,
    DraftQuery,
    Keep,
    NgramParams,
)
from tandem.generation import (
    Choice,
    Chunk,
    DraftSource,
    Event,
    EventCollector,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    MatchAcceptance,
    Model,
    ProposalTrace,
    SamplingParams,
    SpeculationParams,
    Started,
    StepTrace,
    TandemError,
    TokenLogprob,
    Traced,
    Usage,
)
from tandem.v1 import gateway_pb2, gateway_pb2_grpc

__all__ = [
    "AsyncDrafterClient",
    "AsyncTandemClient",
    "Choice",
    "Chunk",
    "Draft",
    "DraftQuery",
    "DraftSource",
    "DraftedSequence",
    "DrafterClient",
    "DrafterLoad",
    "Event",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationRequest",
    "Keep",
    "MatchAcceptance",
    "Model",
    "NgramParams",
    "ProposalTrace",
    "SamplingParams",
    "SpeculationParams",
    "Started",
    "StepTrace",
    "TandemClient",
    "TandemError",
    "TlsOptions",
    "TokenLogprob",
    "Traced",
    "Usage",
]


class TandemClient:
    """Blocking client; may be shared between threads.

    Args:
        target: HOST:PORT of the gateway's gRPC.
        tls: None speaks plaintext.
    """

    def __init__(self, target: str, *, tls: TlsOptions | None = None) -> None:
        self._channel = open_channel(target, tls)
        self._stub = gateway_pb2_grpc.GenerationServiceStub(self._channel)

    def stream(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> Generator[Event, None, None]:
        """Yields one Started, then Chunks, then one Finished per choice.

        Raises:
            TandemError: the request failed; events yielded before stay valid.
        """
        call = self._stub.Generate(wire.to_request(request), timeout=timeout_s)
        try:
            for response in call:
                if (event := wire.to_event(response)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise wire.to_error(error) from error
        finally:
            call.cancel()

    def generate(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Generation:
        """Returns the whole result at once.

        Raises:
            TandemError: the request failed.
        """
        collector = EventCollector()
        for event in self.stream(request, timeout_s=timeout_s):
            collector.add(event)
        return collector.generation()

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Returns the models that the gateway serves."""
        try:
            response = self._stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise wire.to_error(error) from error
        return wire.to_models(response)

    def close(self) -> None:
        """Closes the channel; calls still open end with CANCELLED."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTandemClient:
    """Asyncio client; belongs to the event loop that it was made in.

    Args:
        target: HOST:PORT of the gateway's gRPC.
        tls: None speaks plaintext.
    """

    def __init__(self, target: str, *, tls: TlsOptions | None = None) -> None:
        self._channel = open_async_channel(target, tls)
        self._stub = gateway_pb2_grpc.GenerationServiceStub(self._channel)

    async def stream(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yields one Started, then Chunks, then one Finished per choice.

        Leave it early through `contextlib.aclosing`: a `break` alone leaves the call open until
        the event loop finalises the iterator.

        Raises:
            TandemError: the request failed; events yielded before stay valid.
        """
        call = self._stub.Generate(wire.to_request(request), timeout=timeout_s)
        try:
            async for response in call:
                if (event := wire.to_event(response)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise wire.to_error(error) from error
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
        """Returns the models that the gateway serves."""
        try:
            response = await self._stub.ListModels(
                gateway_pb2.ListModelsRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise wire.to_error(error) from error
        return wire.to_models(response)

    async def close(self) -> None:
        """Closes the channel; calls still open end with CANCELLED."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
