"""A started gateway with a client, for tests."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from gateway.server import GatewayServer
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc as rpc
from tests.gateway.scripted_server import PATIENCE_S

StartGateway = Callable[..., Awaitable["RunningGateway"]]
GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


@dataclass
class Output:
    """Everything that one call streamed."""

    started: pb.Started | None = None
    chunks: list[pb.Chunk] = field(default_factory=list)
    finished: list[pb.Finished] = field(default_factory=list)
    traced: list[pb.Traced] = field(default_factory=list)

    def of(self, choice_index: int) -> "Output":
        """The part of one choice."""
        return Output(
            started=self.started,
            chunks=[chunk for chunk in self.chunks if chunk.choice_index == choice_index],
            finished=[end for end in self.finished if end.choice_index == choice_index],
        )

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def usage(self) -> pb.Usage:
        (finished,) = self.finished
        return finished.usage


@dataclass
class RunningGateway:
    """A started gateway and a client of it."""

    gateway: GatewayServer
    channel: grpc.aio.Channel
    stub: "rpc.GenerationServiceAsyncStub"
    registry: CollectorRegistry
    log: Sequence[Mapping[str, object]]

    def call(self, *prompt: int, **fields: Any) -> GenerateCall:
        """Begins a call with a prompt of token ids, or the fields' own."""
        if prompt:
            fields["tokens"] = pb.TokenIds(token_ids=prompt)
        return self.stub.Generate(pb.GenerateRequest(**fields))

    async def generate(self, *prompt: int, **fields: Any) -> Output:
        """A whole call."""
        return await collect(self.call(*prompt, **fields))

    async def until_idle(self) -> None:
        """Waits until nothing is left of any request."""
        try:
            await until(self.is_idle)
        except TimeoutError:
            self.gateway.frontend.check_idle()
            raise

    def is_idle(self) -> bool:
        try:
            self.gateway.frontend.check_idle()
        except AssertionError:
            return False
        return True

    def sample(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels; 0 if there are none."""
        return sum_of_samples(self.registry, name, labels)


def sum_of_samples(registry: CollectorRegistry, name: str, labels: Mapping[str, str]) -> float:
    """The sum of a metric's series with these labels; 0 if there are none."""
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def until(condition: Callable[[], bool]) -> None:
    """Polls a condition that no event announces.

    Raises:
        TimeoutError: it did not become true.
    """
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def collect(call: GenerateCall) -> Output:
    """Reads the rest of a call."""
    output = Output()
    async with asyncio.timeout(PATIENCE_S):
        while isinstance(response := await call.read(), pb.GenerateResponse):
            add(output, response)
    return output


def add(output: Output, response: pb.GenerateResponse) -> None:
    """Adds one response to the output."""
    kind = response.WhichOneof("event")
    if kind == "started":
        assert output.started is None, "Started comes once"
        assert not output.chunks, "Started comes first"
        output.started = response.started
    elif kind == "chunk":
        output.chunks.append(response.chunk)
    elif kind == "traced":
        output.traced.append(response.traced)
    else:
        output.finished.append(response.finished)


async def read(call: GenerateCall) -> pb.GenerateResponse:
    """The next message of a call."""
    async with asyncio.timeout(PATIENCE_S):
        response = await call.read()
    assert isinstance(response, pb.GenerateResponse), "the stream has ended"
    return response


async def error_of(call: GenerateCall) -> grpc.aio.AioRpcError:
    """The error with which a call ends."""
    try:
        await collect(call)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
