"""A server with a service that the test defines, a channel to it, and its log entries."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.wrappers_pb2 import StringValue
from prometheus_client import CollectorRegistry

from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions, ServerOptions
from servicekit.errors import ErrorTable
from servicekit.interceptors.callers import Caller
from servicekit.serving.server import Server
from tests.servicekit.factories import SERVICE, make_server

# The four shapes of a method, as the test calls them.
_MAKERS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A started server with a client, its metrics and its log entries."""

    server: Server
    channel: grpc.aio.Channel
    registry: CollectorRegistry
    log_entries: list[MutableMapping[str, Any]]

    def method(self, shape: str, name: str = "Echo") -> Any:
        """The client's side of a method."""
        return getattr(self.channel, shape)(
            f"/{SERVICE}/{name}",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=StringValue.FromString,
        )

    def raw_method(self, shape: str, name: str = "Echo") -> Any:
        """As `method`, but it sends and receives bytes."""
        return getattr(self.channel, shape)(f"/{SERVICE}/{name}")

    def num_requests(self, code: str, name: str = "Echo", service: str = SERVICE) -> float:
        """How many calls the server's metrics say have ended with the code."""
        labels = {"service": service, "method": name, "code": code}
        return self.registry.get_sample_value("tandem_rpc_requests_total", labels) or 0.0

    async def counted(self, code: str, **labels: str) -> None:
        """Waits until a call has ended with the code.

        For calls that end at the client before the server has counted them.
        """
        async with asyncio.timeout(20):
            while self.num_requests(code, **labels) == 0:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.001)


StartServer = Callable[..., Awaitable[RunningServer]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts a server whose method `Echo` has the shape and the behaviour given."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            behaviours: Mapping[str, Any] | None = None,
            *,
            options: ServerOptions | None = None,
            error_table: ErrorTable | None = None,
            admit: Callable[[Caller], object] | None = None,
            max_connection_age_s: float = 0.0,
        ) -> RunningServer:
            registry = CollectorRegistry()
            capture = structlog.testing.LogCapture()
            logger = structlog.wrap_logger(
                None,
                processors=[structlog.contextvars.merge_contextvars, capture],
                wrapper_class=structlog.make_filtering_bound_logger("debug"),
            )
            server = make_server(
                error_table=error_table,
                registry=registry,
                logger=logger,
                admit=admit,
                max_connection_age_s=max_connection_age_s,
                **(options.model_dump() if options else {}),
            )
            for shape, behaviour in (behaviours or {}).items():
                handler = _MAKERS[shape](
                    behaviour, StringValue.FromString, StringValue.SerializeToString
                )
                server.grpc.add_registered_method_handlers(SERVICE, {"Echo": handler})
            await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = open_channel(server.address, ChannelOptions())
            stack.push_async_callback(channel.close)
            return RunningServer(
                server=server,
                channel=channel,
                registry=registry,
                log_entries=capture.entries,
            )

        yield start
