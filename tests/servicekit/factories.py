"""What several tests of servicekit need: servers, calls, health checks, an error."""

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions, ServerOptions
from servicekit.errors import ErrorTable, RequestError
from servicekit.interceptors.callers import Caller
from servicekit.logs import Logger, get_logger
from servicekit.serving.server import Server

SERVICE = "test.v1.EchoService"


class InvalidValueError(RequestError):
    """An error of a service, for its error table."""


def make_server(
    *,
    error_table: ErrorTable | None = None,
    registry: CollectorRegistry | None = None,
    logger: Logger | None = None,
    admit: Callable[[Caller], object] | None = None,
    max_connection_age_s: float = 0.0,
    **options: Any,
) -> Server:
    """A server that is not started yet; options as of `ServerOptions`."""
    return Server(
        ServerOptions(**options),
        service="test",
        service_names=[SERVICE],
        error_table=error_table or {},
        registry=registry or CollectorRegistry(),
        logger=logger or get_logger("test"),
        admit=admit,
        max_connection_age_s=max_connection_age_s,
    )


async def check_health(address: str, server_name: str | None = None, /, **options: Any) -> int:
    """The status that a server answers a health check with; options as of `ChannelOptions`."""
    async with open_channel(address, ChannelOptions(**options), server_name=server_name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status)


def call(channel: grpc.aio.Channel, method: str = f"/{SERVICE}/Echo") -> Any:
    """Calls a unary method with an empty request."""
    unary: Any = channel.unary_unary(method)
    return unary(b"")
