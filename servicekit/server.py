"""The life of a server: bind, announce, serve, drain, stop.

Owns the listening ports of a process (gRPC, plaintext health, metrics), its signals and its exit
code. Knows no service: servicers are added to `Server.grpc` before `start`.

    async def serve(options: Options) -> None:
        server = Server(options.server, service_names=[...], ...)
        add_MyServiceServicer_to_server(servicer, server.grpc)
        async with server:  # starts it; stops it also if something fails before it serves
            await serve_until_signalled(server, drain=servicer.drain)

    options = load_config(Options, service="mine")
    configure_logs(options.server.log_level, "mine")
    sys.exit(run(lambda: serve(options)))
"""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, Gauge

from servicekit import health
from servicekit.address import Address, parse_address
from servicekit.certificates import first_expiry
from servicekit.config import ConfigError, ServerOptions
from servicekit.errors import ErrorTable
from servicekit.interceptors import server_interceptors
from servicekit.limits import KEEPALIVE, MAX_RECEIVE_BYTES, PING_TOLERANCE
from servicekit.logs import Logger, get_logger
from servicekit.message_limits import LimitOptions, limits_of_methods
from servicekit.metrics import MetricsServer, start_metrics_server
from servicekit.tls import server_credentials

# What calls that outlive the drain get to end by themselves: the drain has waited for all that
# matters, so these are streams that only their client would end.
_GRACE_AFTER_DRAIN_S = 1.0

# Probes are few; a plaintext port that anyone may reach needs no more.
_MAX_PROBE_STREAMS = 64
_MAX_PROBE_BYTES = 4096


class Server:
    """One process's listening ports. Owned by the event loop's thread; made inside the loop.

    Health says NOT_SERVING until `set_serving`. No interceptor stands before the plaintext
    health port, and nothing but grpc.health.v1 is behind it.

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
        """Wires it up.

        Args:
            options: the server's part of a service's configuration.
            service_names: the services that it will offer.
            error_table: which exception becomes which status.
            registry: takes the metrics.
            logger: for what no caller is told.
            limit_options: where the services' .proto files say how much a request may hold. None:
                as much as the transport takes.
        """
        self.options = options
        self._logger = logger
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
        #: Servicers are added to it before `start`.
        self.grpc = grpc.aio.server(
            interceptors=server_interceptors(
                error_table=error_table,
                registry=registry,
                logger=logger,
                limits=limits_of_methods(service_names, limit_options) if limit_options else {},
                max_concurrent_calls=options.max_concurrent_calls,
                request_timeout_s=options.request_timeout_s,
            ),
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
        """Where gRPC is served, with the real port. Only after `start`."""
        assert self._address is not None, "the server has not started"
        return self._address

    @property
    def health_address(self) -> str | None:
        """Where plaintext health is served, with the real port; None if nowhere."""
        return self._health_address

    @property
    def metrics_address(self) -> str | None:
        """Where metrics are served, with the real port; None if nowhere."""
        return None if self._metrics is None else self._metrics.address

    def export_expiry(self, certificate: str, path: Path) -> None:
        """Exports when a certificate that was loaded from `path` expires.

        Args:
            certificate: what it is to this process, the metric's label: "server" is the one that
                it serves with, "peer" the one that it shows to the services that it calls.
            path: its file, PEM.
        """
        self._certificate_expiry.labels(certificate).set(first_expiry(path.read_bytes()))

    async def start(self) -> None:
        """Binds every port and begins to answer; health still says NOT_SERVING.

        Raises:
            ConfigError: an address cannot be bound; it names the flag. Nothing is left running.
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
                    self._metrics = start_metrics_server(
                        self._registry, options.metrics_listen, self._logger
                    )
                except OSError as error:
                    raise _cannot_listen(
                        "--metrics-listen", options.metrics_listen, error
                    ) from None
            await self.grpc.start()
            if self._probes is not None:
                await self._probes.start()
        except BaseException:
            # A gRPC server lets go of its ports only when it stops, and stops only if it started.
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
        """What `health.LIVENESS_NAME` says; true until then."""
        self._health.set_alive(alive)

    def retire(self) -> None:
        """Health says NOT_SERVING for good, whatever `set_serving` is called for later."""
        self._health.retire()

    def refuse_calls(self, grace_s: float) -> None:
        """Takes no more calls on the main port, and tells every client to go elsewhere (GOAWAY).

        Calls in flight go on, `grace_s` at most. The other ports answer as before.
        """
        if self._refusing is None:
            self._refusing = asyncio.create_task(self.grpc.stop(grace_s))

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives those in flight `grace_s` to end, cancels them, closes.

        May be called again, also meanwhile: the shorter grace counts.
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


async def serve_until_signalled(
    server: Server,
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    ready_line: Callable[[], str] | None = None,
    failed: "asyncio.Future[None] | None" = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and stops; the server is stopped on return.

    Says SERVING, prints the ready line on stdout, and waits. At the first signal it says
    NOT_SERVING; after `drain_delay_s` it takes no more calls and drains, which takes at most
    `drain_timeout_s`. A second signal stops at once.

    Args:
        server: a started server.
        drain: returns when what the service has begun is done or handed over. It ends the
            service's own long-lived streams: after it, calls in flight get one more second. None:
            calls in flight get all of `drain_timeout_s`.
        ready_line: what to print; None for `ready grpc=ADDRESS`.
        failed: ends the serving, without drain, when it is done, with its exception.

    Raises:
        Exception: that of `failed`, or of `drain`.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        server.set_serving()
        print(ready_line() if ready_line else f"ready grpc={server.address}", flush=True)
        await _first_of(signals.get(), failed)
        server.retire()
        await _first_of(_drain_and_stop(server, drain), signals.get(), failed)
    finally:
        await server.stop(0)
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def run(main: Callable[[], Awaitable[None]]) -> int:
    """Runs a process's main coroutine to its end, on uvloop where that is installed.

    Returns:
        The exit code: 0 at the end, 1 after an exception, which is logged, 2 after a ConfigError,
        which is printed in one line on stderr, 128 + n after signal n.
    """
    # As process 1 of a container, a process without a handler does not get SIGTERM at all.
    previous = signal.getsignal(signal.SIGTERM)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_cancel_at_sigterm(main))
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except Exception:
        get_logger(__name__).exception("process_failed")
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


async def _cancel_at_sigterm(main: Callable[[], Awaitable[None]]) -> None:
    # The first cancels main, which can clean up. A second one means now: also where the loop is
    # blocked, or the interpreter waits for a thread that is not going to end.
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    is_first = True

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_first
        if not is_first or task.done():
            os._exit(128 + signal.SIGTERM)
        is_first = False
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, on_sigterm)
    await main()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _drain_and_stop(server: Server, drain: Callable[[], Awaitable[None]] | None) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(server.options.drain_delay_s)
    deadline_s = loop.time() + server.options.drain_timeout_s
    if drain is not None:
        # Before the drain, not after it: clients whose channels are open would send their calls
        # here, and hear that they are refused, until the last stream has ended.
        server.refuse_calls(server.options.drain_timeout_s)
        try:
            async with asyncio.timeout_at(deadline_s) as limit:
                await drain()
        except TimeoutError:
            # Not by the clock: uvloop's timers go by whole milliseconds and may fire early.
            if not limit.expired():
                raise  # the drain's own
            server._logger.warning("drain_timed_out", timeout_s=server.options.drain_timeout_s)
        deadline_s = min(deadline_s, loop.time() + _GRACE_AFTER_DRAIN_S)
    await server.stop(max(0.0, deadline_s - loop.time()))


async def _first_of(*awaitables: "Awaitable[object] | None") -> None:
    """Waits for one to end and cancels the others; raises what it raised.

    Futures are only watched: they belong to the caller and are not cancelled.
    """
    theirs = {a for a in awaitables if isinstance(a, asyncio.Future)}
    ours = {asyncio.ensure_future(a) for a in awaitables if a is not None and a not in theirs}
    watched: set[asyncio.Future[Any]] = {*ours, *theirs}
    try:
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)
    for future in done:
        future.result()


def _arguments(max_concurrent_streams: int, max_receive_bytes: int) -> list[tuple[str, int]]:
    return [
        *KEEPALIVE,
        *PING_TOLERANCE,
        # A port that another process has is an error, not something to share with it.
        ("grpc.so_reuseport", 0),
        # Without a limit, a client that opens and resets calls in a hurry hurts all others.
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
    # gRPC says only that it failed, not why; and of a name with several addresses it is content
    # with one, so that `localhost` would quietly be half ours and half another process's. But an
    # address that this machine does not have, as ::1 where IPv6 is off, is no one else's either.
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
