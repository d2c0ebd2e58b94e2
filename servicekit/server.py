"""The listening ports of a process: gRPC, plaintext health, metrics.

Owns binding, starting and stopping them, and what health says. Knows no service: servicers are
added to `Server.grpc` before `start`. Signals and exit codes belong to `servicekit.process`.
"""

import asyncio
import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, Gauge

from servicekit import health
from servicekit.address import Address, parse_address
from servicekit.config import ConfigError, ServerOptions
from servicekit.errors import ErrorTable
from servicekit.interceptors.bounds import BoundsInterceptor
from servicekit.interceptors.error_mapping import ErrorInterceptor
from servicekit.interceptors.request_id import RequestIdInterceptor
from servicekit.interceptors.rpc_metrics import MetricsInterceptor
from servicekit.limits import KEEPALIVE, MAX_RECEIVE_BYTES, PING_TOLERANCE
from servicekit.logs import Logger
from servicekit.message_limits import LimitOptions, limits_of_methods
from servicekit.metrics import MetricsServer
from servicekit.tls import first_expiry, server_credentials

# Probes are few; a plaintext port that anyone may reach needs no more.
_MAX_PROBE_STREAMS = 64
_MAX_PROBE_BYTES = 4096


class Server:
    """One process's listening ports. Owned by the event loop's thread; made inside the loop.

    Health says NOT_SERVING until `set_serving`. The plaintext health port serves grpc.health.v1
    only, without interceptors.

    Raises:
        ConfigError: see `tls.server_credentials`.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        service_names: Sequence[str],
        error_table: ErrorTable,
        registry: CollectorRegistry,
        logger: Logger,
        limit_options: LimitOptions | None = None,
    ) -> None:
        """Makes the gRPC servers; binds nothing yet.

        Args:
            options: the server's part of a service's configuration.
            service_names: the services that it will offer.
            error_table: which exception becomes which status.
            registry: where the metrics are registered.
            logger: for errors that callers do not see.
            limit_options: the options of the .proto files that limit requests; None leaves the
                transport's limit only.
        """
        self.options = options
        self.logger = logger
        self._registry = registry
        self._credentials = server_credentials(options)
        self._certificate_expiry = Gauge(
            "tandem_certificate_expiry_timestamp_seconds",
            "When a certificate in use, or one of its chain, expires, in Unix seconds.",
            ["certificate"],
            registry=registry,
        )
        if options.tls_cert is not None:
            self.export_expiry("server", options.tls_cert)
        self._health = health.HealthServicer([*service_names, health.SERVICE_NAME])
        self._address: str | None = None
        self._health_address: str | None = None
        self._metrics: MetricsServer | None = None
        self._refusing: asyncio.Task[None] | None = None
        limits = limits_of_methods(service_names, limit_options) if limit_options else {}
        #: Servicers are added to it before `start`.
        self.grpc = grpc.aio.server(
            interceptors=[
                RequestIdInterceptor(),
                MetricsInterceptor(registry),
                BoundsInterceptor(options.max_concurrent_calls, options.request_timeout_s),
                ErrorInterceptor(error_table, logger, limits),
            ],
            options=_arguments(options.max_concurrent_streams, MAX_RECEIVE_BYTES),
        )
        self._probes: grpc.aio.Server | None = None
        if options.health_listen is not None:
            self._probes = grpc.aio.server(options=_arguments(_MAX_PROBE_STREAMS, _MAX_PROBE_BYTES))
            self._health.add_to_server(self._probes)
        self._health.add_to_server(self.grpc)
        if options.reflection:
            reflection.enable_server_reflection(
                [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc
            )

    @property
    def address(self) -> str:
        """The address of gRPC, with the real port. Only after `start`."""
        assert self._address is not None, "the server has not started"
        return self._address

    @property
    def health_address(self) -> str | None:
        """The address of plaintext health, with the real port; None if it is not served."""
        return self._health_address

    @property
    def metrics_address(self) -> str | None:
        """The address of metrics, with the real port; None if they are not served."""
        return None if self._metrics is None else self._metrics.address

    def export_expiry(self, certificate: str, path: Path) -> None:
        """Exports when the certificate in a file expires.

        Args:
            certificate: the metric's label: "server" for this server's own certificate, "peer"
                for the one that it shows to the services that it calls.
            path: its file, PEM.
        """
        self._certificate_expiry.labels(certificate).set(first_expiry(path.read_bytes()))

    async def start(self) -> None:
        """Binds every port and answers calls; health still says NOT_SERVING.

        Raises:
            ConfigError: an address cannot be bound; the error names the flag. Nothing is left
                running.
        """
        options = self.options
        try:
            self._address = _bind(self.grpc, "--listen", options.listen, self._credentials)
            if self._probes is not None and options.health_listen is not None:
                self._health_address = _bind(
                    self._probes, "--health-listen", options.health_listen, None
                )
            if options.metrics_listen is not None:
                try:
                    self._metrics = MetricsServer(
                        self._registry, options.metrics_listen, self.logger
                    )
                except OSError as error:
                    raise _cannot_listen(
                        "--metrics-listen", options.metrics_listen, error
                    ) from None
            await self.grpc.start()
            if self._probes is not None:
                await self._probes.start()
        except BaseException:
            # A gRPC server frees its ports only when it stops, and stops only if it started.
            for server in (self.grpc, self._probes):
                if server is not None:
                    await server.start()
            await self.stop(0)
            raise

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0)

    def set_serving(self) -> None:
        """Health says SERVING, for "" and every service."""
        self._health.set_serving(True)

    def set_not_serving(self) -> None:
        """Health says NOT_SERVING, for "" and every service."""
        self._health.set_serving(False)

    def set_alive(self, alive: bool) -> None:
        """Sets the health of `health.LIVENESS_NAME`, which is alive at first."""
        self._health.set_alive(alive)

    def retire(self) -> None:
        """Health says NOT_SERVING from now on, even after `set_serving`."""
        self._health.retire()

    def refuse_calls(self, grace_s: float) -> None:
        """Refuses new calls on the main port and sends every client a GOAWAY.

        Calls in flight may take `grace_s` more. The other ports answer as before.
        """
        if self._refusing is None:
            self._refusing = asyncio.create_task(self.grpc.stop(grace_s))

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives those in flight `grace_s` to end, cancels them, closes.

        May be called again, also while it runs: the shorter grace counts.
        """
        self._health.close()
        await self.grpc.stop(grace_s)
        if self._refusing is not None:
            await self._refusing
        if self._probes is not None:
            await self._probes.stop(0)
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            await asyncio.to_thread(metrics.stop)


def _arguments(max_concurrent_streams: int, max_receive_bytes: int) -> list[tuple[str, int]]:
    return [
        *KEEPALIVE,
        *PING_TOLERANCE,
        # A port that another process uses is an error; by default gRPC would share it.
        ("grpc.so_reuseport", 0),
        # Without a limit, a client that rapidly opens and resets calls slows all others.
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        ("grpc.max_receive_message_length", max_receive_bytes),
    ]


def _bind(
    server: grpc.aio.Server, flag: str, listen: str, credentials: grpc.ServerCredentials | None
) -> str:
    address = parse_address(listen)
    try:
        _check_free(address)
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except (OSError, RuntimeError) as error:
        raise _cannot_listen(flag, listen, error) from None
    return str(Address(host=address.host, port=port))


def _check_free(address: Address) -> None:
    # gRPC does not report why binding failed. Of a name with several addresses it accepts a single
    # one, so that another process could silently keep the other half of `localhost`. An address
    # that this machine does not have, such as ::1 without IPv6, is skipped.
    found = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    absent: list[OSError] = []
    for family, kind, _, _, name in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(name)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            absent.append(error)
    if len(absent) == len(found):
        raise absent[0]


def _cannot_listen(flag: str, listen: str, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(flag, f"cannot listen on {listen}: {reason}")
