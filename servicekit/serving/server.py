"""The listening ports of a process: gRPC, plaintext health, metrics.

Owns binding, starting and stopping them, and what health says. Knows no service: servicers are
added to `Server.grpc` before `start`. Signals and exit codes belong to `process.py`.
"""

import asyncio
import errno
import functools
import socket
from collections.abc import Callable, Sequence
from typing import Self

import grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)

from servicekit import VERSION
from servicekit.address import Address, parse_address
from servicekit.channels.limits import KEEPALIVE, MAX_RECEIVE_BYTES, PING_TOLERANCE
from servicekit.channels.tls import (
    ChannelCertificate,
    ServerCertificate,
    peer_files,
    read_channel_certificate,
    server_credentials,
    watch_server_certificate,
)
from servicekit.channels.watched_files import WatchedFiles
from servicekit.config import ChannelOptions, ConfigError, ServerOptions
from servicekit.errors import ErrorTable
from servicekit.interceptors.access import AccessInterceptor
from servicekit.interceptors.bounds import BoundsInterceptor
from servicekit.interceptors.callers import Caller
from servicekit.interceptors.error_mapping import ErrorInterceptor
from servicekit.interceptors.request_id import RequestIdInterceptor
from servicekit.interceptors.rpc_metrics import MetricsInterceptor
from servicekit.listening_socket import cannot_listen
from servicekit.logs import Logger
from servicekit.message_limits import LimitOptions, limits_of_methods
from servicekit.serving import health
from servicekit.serving.grpc_stop import GrpcStop
from servicekit.telemetry.metrics import MetricsServer

# Calls that gRPC has accepted and Python has not begun, some 10 KB each. Beyond it, gRPC ends new
# calls of any client with CANCELLED. By default it is 1,000, fewer than one connection may open.
_MAX_PENDING_CALLS = 8_192

# Of one connection; further ones wait at the client. Where many come and go at the limit, some are
# refused (UNAVAILABLE), which bounds what resets cost.
_MAX_CONCURRENT_STREAMS = 1024

# Probes are few; a plaintext port that anyone may reach needs no more.
_MAX_PROBE_STREAMS = 64
_MAX_PROBE_BYTES = 4096


class Server:
    """One process's listening ports. Owned by the event loop's thread; made inside the loop.

    Health says NOT_SERVING until `set_serving`. The plaintext health port serves grpc.health.v1
    only, without interceptors.

    Raises:
        ConfigError: see `tls.watch_server_certificate`.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        service: str,
        service_names: Sequence[str],
        error_table: ErrorTable,
        registry: CollectorRegistry,
        logger: Logger,
        limit_options: LimitOptions | None = None,
        admit: Callable[[Caller], object] | None = None,
        max_connection_age_s: float = 0.0,
    ) -> None:
        """Makes the gRPC servers; binds nothing yet.

        Args:
            options: the server's part of a service's configuration.
            service: the process's name.
            service_names: the gRPC services that it will offer.
            error_table: which exception becomes which status.
            registry: where the metrics are registered.
            logger: for errors that callers do not see.
            limit_options: the options of the .proto files that limit requests; None leaves the
                transport's limit only.
            admit: raises an exception of the error table for a caller who may not call; None
                admits all.
            max_connection_age_s: how long a connection takes new calls: then its client is asked
                to open another one (GOAWAY) and finds new replicas. 0 is no limit.
        """
        self.options = options
        self.logger = logger
        self._registry = registry
        self._certificate_expiry = Gauge(
            "tandem_certificate_expiry_timestamp_seconds",
            "When a certificate in use, or one of its chain, expires, in Unix seconds.",
            ["certificate"],
            registry=registry,
        )
        self._file_reloads = Counter(
            "tandem_file_reloads",
            "Changed files that were read again, by what they hold and whether they could be used.",
            ["files", "outcome"],
            registry=registry,
        )
        #: What the main port shows; None: it speaks plaintext.
        self.certificate = watch_server_certificate(
            options, on_reload=self.on_reload("server_certificate")
        )
        if self.certificate is not None:
            self._export_expiry("server", self.certificate)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        Gauge(
            "tandem_build_info",
            "1; which service, and its version.",
            ["service", "version"],
            registry=registry,
        ).labels(service, VERSION).set(1)
        self._health = health.HealthServicer([*service_names, health.SERVICE_NAME])
        Gauge(
            "tandem_serving", "1 while health says SERVING, else 0.", registry=registry
        ).set_function(lambda: self._health.is_serving)
        self._address: str | None = None
        self._health_address: str | None = None
        self._metrics: MetricsServer | None = None
        limits = limits_of_methods(service_names, limit_options) if limit_options else {}
        access = []
        if options.allowed_clients or admit is not None:
            access.append(
                AccessInterceptor(
                    allowed_clients=options.allowed_clients, admit=admit, error_table=error_table
                )
            )
        #: Servicers are added to it before `start`.
        self.grpc = grpc.aio.server(
            interceptors=[
                RequestIdInterceptor(),
                MetricsInterceptor(registry),
                *access,
                BoundsInterceptor(
                    options.max_concurrent_calls,
                    options.request_timeout_s,
                    knows_tokens=admit is not None,
                ),
                ErrorInterceptor(error_table, logger, limits),
            ],
            options=[
                *_arguments(_MAX_CONCURRENT_STREAMS, MAX_RECEIVE_BYTES),
                *_max_age(max_connection_age_s),
            ],
        )
        self._stop = GrpcStop(self.grpc)
        self._probes: grpc.aio.Server | None = None
        self._probes_stop: GrpcStop | None = None
        if options.health_listen is not None:
            self._probes = grpc.aio.server(options=_arguments(_MAX_PROBE_STREAMS, _MAX_PROBE_BYTES))
            self._health.add_to_server(self._probes)
            self._probes_stop = GrpcStop(self._probes)
        self._health.add_to_server(self.grpc)
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

    def watch_peer_certificate(self, options: ChannelOptions) -> None:
        """Exports when the certificate expires that this process shows to the services it calls.

        Raises:
            ConfigError: see `tls.read_channel_certificate`.
        """
        if options.peer_tls_ca is None or options.peer_tls_cert is None:
            return
        certificate = WatchedFiles(
            peer_files(options),
            functools.partial(read_channel_certificate, options),
            on_reload=self.on_reload("peer_certificate"),
        )
        self._export_expiry("peer", certificate)

    def on_reload(self, files: str) -> Callable[[ConfigError | None], None]:
        """What `WatchedFiles` are to call: it logs and counts their changes.

        Args:
            files: what they hold, for the metric's label.
        """
        outcomes = [self._file_reloads.labels(files, each) for each in ("success", "failure")]

        def report(error: ConfigError | None) -> None:
            outcomes[error is not None].inc()
            if error is None:
                self.logger.info("files_reloaded", files=files)
            else:
                self.logger.error("files_not_reloaded", files=files, reason=str(error))

        return report

    def _export_expiry(
        self,
        certificate: str,
        files: WatchedFiles[ServerCertificate] | WatchedFiles[ChannelCertificate],
    ) -> None:
        # A scrape also looks whether the files have changed: handshakes may be rare.
        def read() -> float:
            files.refresh()
            return files.value.expires_s

        self._certificate_expiry.labels(certificate).set_function(read)

    async def start(self) -> None:
        """Binds every port and answers calls; health still says NOT_SERVING.

        Raises:
            ConfigError: an address cannot be bound; the error names the flag. Nothing is left
                running.
        """
        options = self.options
        try:
            self._address = _bind(
                self.grpc,
                "--listen",
                options.listen,
                None if self.certificate is None else server_credentials(self.certificate),
            )
            if self._probes is not None and options.health_listen is not None:
                self._health_address = _bind(
                    self._probes, "--health-listen", options.health_listen, None
                )
            if options.metrics_listen is not None:
                try:
                    self._metrics = MetricsServer(
                        self._registry, options.metrics_listen, self.logger
                    )
                except (OSError, TypeError, UnicodeError) as error:  # a name may not be encodable
                    raise cannot_listen("--metrics-listen", options.metrics_listen, error) from None
            await _start(self.grpc)
            if self._probes is not None:
                await _start(self._probes)
        except BaseException:
            # A gRPC server frees its ports only when it stops, and stops only if it started.
            for server in (self.grpc, self._probes):
                if server is not None:
                    await _start(server)
            await self.stop(0)
            raise

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0)

    @property
    def is_serving(self) -> bool:
        """Whether health says SERVING."""
        return self._health.is_serving

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

    def refuse_calls(self) -> None:
        """Refuses new calls on the main port and sends every client a GOAWAY.

        Calls in flight go on until `stop`. The other ports answer as before.
        """
        self._stop.begin()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives those in flight `grace_s` to end, cancels them, closes.

        May be called again, also while it runs: the shortest grace counts.
        """
        self._health.close()
        await self._stop.stop(grace_s)
        if self._probes_stop is not None:
            await self._probes_stop.stop(0)
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
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.max_receive_message_length", max_receive_bytes),
        # Otherwise gRPC widens the windows of all streams of a fast client to megabytes, also of
        # those that nothing is read from yet.
        ("grpc.http2.bdp_probe", 0),
    ]


def _max_age(max_connection_age_s: float) -> list[tuple[str, int]]:
    """Calls in flight have no limit: gRPC's default. It also spreads the ages by a tenth."""
    if not max_connection_age_s:
        return []
    return [("grpc.max_connection_age_ms", max(1, round(1000 * max_connection_age_s)))]


async def _start(server: grpc.aio.Server) -> None:
    """Starts it to the end, even if the caller is cancelled: half started, it cannot stop."""
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        raise


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
    except (OSError, RuntimeError, UnicodeError) as error:
        raise cannot_listen(flag, listen, error) from None
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
