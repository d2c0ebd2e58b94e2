"""Builds a whole gateway from its configuration, and runs it."""

import asyncio
import secrets
from collections.abc import Coroutine

import grpc
from prometheus_client import CollectorRegistry

from gateway.api.frontend import Frontend
from gateway.api.grpc_service import SERVICE_NAME, GenerationServicer
from gateway.api.http import HttpListener
from gateway.api.unread_watch import UnreadWatch
from gateway.config import GatewayConfig
from gateway.coordinator import Coordinator
from gateway.errors import ERROR_TABLE
from gateway.messages.verifier import DraftWait
from gateway.metrics import GatewayMetrics
from gateway.peers.drafter_link import DrafterLink
from gateway.peers.verifier_link import VerifierLink
from gateway.routing.fleet import Fleet
from gateway.routing.progress_watch import ProgressWatch
from gateway.text.tokenizer import Tokenizer, TokenizerLoadError
from servicekit.channel import open_channel
from servicekit.config import ConfigError
from servicekit.logs import Logger
from servicekit.server import Server
from tandem.v1 import gateway_pb2_grpc, limits_pb2


class GatewayServer:
    """One gateway.

    Attributes:
        server: the gRPC server, with health, reflection and the metrics endpoint.
        frontend: the core behind the APIs.
        fleet, coordinator: for tests.
    """

    def __init__(
        self, config: GatewayConfig, *, registry: CollectorRegistry, logger: Logger
    ) -> None:
        """Builds it, inside the event loop; nothing is bound before `start`.

        Raises:
            ConfigError: the tokenizer cannot be loaded, or the credentials cannot be used.
        """
        self._config = config
        self._registry = registry
        self._logger = logger
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: HttpListener | None = None
        self._availability_changed = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        metrics = GatewayMetrics(registry)
        self.fleet = Fleet(metrics=metrics, logger=logger)
        self.coordinator = Coordinator(
            fleet=self.fleet,
            draft_wait=DraftWait(config.draft_wait),
            client_delay_s=config.client_delay_s,
            metrics=metrics,
            on_availability=self._on_availability,
        )
        tokenizer = _load_tokenizer(config)
        self.frontend = Frontend(
            coordinator=self.coordinator,
            fleet=self.fleet,
            tokenizer=tokenizer,
            allow_trace=config.allow_trace,
            defaults=config.request_defaults(
                tokenizer_digest="" if tokenizer is None else tokenizer.digest
            ),
            max_concurrent_requests=config.max_concurrent_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            metrics=metrics,
            logger=logger,
        )
        self.server = Server(
            config.server,
            service_names=[SERVICE_NAME],
            error_table=ERROR_TABLE,
            registry=registry,
            logger=logger,
            limit_options=limits_pb2,
        )
        gateway_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(
                self.frontend,
                UnreadWatch(
                    unread_timeout_s=config.unread_timeout_s, on_unread=metrics.count_unread
                ),
            ),
            self.server.grpc,
        )
        self._add_links(metrics)
        self._progress_watch = ProgressWatch(fleet=self.fleet, timeout_s=config.progress_timeout_s)
        if self._channels and config.peers.peer_tls_cert is not None:
            self.server.export_expiry("peer", config.peers.peer_tls_cert)

    @property
    def http_address(self) -> str | None:
        """The address of HTTP, with the real port, after `start`; None if it is not served."""
        return None if self._http is None else self._http.address

    @property
    def failed(self) -> "asyncio.Future[None]":
        """Done, with its error, when a task that must run for ever has ended."""
        return self._failed

    async def start(self) -> None:
        """Binds, and begins to connect to the peers; health says NOT_SERVING.

        Raises:
            ConfigError: an address cannot be bound. Nothing is left running.
        """
        try:
            if self._config.http_listen is not None:
                self._http = HttpListener(
                    listen=self._config.http_listen,
                    options=self._config.server,
                    frontend=self.frontend,
                    registry=self._registry,
                )
            await self.server.start()
        except BaseException:
            await self.stop()
            raise
        if self._http is not None:
            self._spawn(self._http.run())
        for link in self.fleet.links:
            self._spawn(link.run())
        self._spawn(self._progress_watch.run())

    async def wait_until_serving(self) -> None:
        """Returns when a verifier is connected and every drafter is, or had time to be.

        No request needs a drafter, but a ready gateway should draft from the first request.

        Raises:
            Exception: that of `failed`.
        """
        loop = asyncio.get_running_loop()
        drafters_due_s: float | None = None
        while True:
            timeout_s = None
            if self.frontend.is_serving:
                drafters_due_s = drafters_due_s or loop.time() + self._config.connect_timeout_s
                timeout_s = drafters_due_s - loop.time()
                if timeout_s <= 0 or all(drafter.is_up for drafter in self.fleet.drafters):
                    return
            await self._await_availability(timeout_s=timeout_s)

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones are done."""
        await self.frontend.drain()

    async def stop(self) -> None:
        """Stops everything and cuts running requests off. May be called again."""
        await self.server.stop(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._http is not None:
            self._http.close()
        for channel in self._channels:
            await channel.close()
        self.frontend.close()

    def ready_line(self) -> str:
        """The line that the process prints when it serves."""
        http = "" if self.http_address is None else f" http={self.http_address}"
        return f"ready grpc={self.server.address}{http}"

    async def _await_availability(self, *, timeout_s: float | None) -> None:
        self._availability_changed.clear()
        changed = asyncio.ensure_future(self._availability_changed.wait())
        try:
            await asyncio.wait(
                (changed, self._failed), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()
        if self._failed.done():
            self._failed.result()

    def _on_availability(self) -> None:
        self._availability_changed.set()
        if self.frontend.is_serving:
            self.server.set_serving()
        else:
            self.server.set_not_serving()

    def _add_links(self, metrics: GatewayMetrics) -> None:
        config = self._config
        gateway_id = secrets.token_hex(16)
        for name in config.verifiers:
            self.fleet.verifiers.append(
                VerifierLink(
                    name=name,
                    channel=self._open_channel(name),
                    gateway_id=gateway_id,
                    listener=self.coordinator,
                    hint_tokens=config.hint_tokens,
                    greet_timeout_s=config.connect_timeout_s,
                    metrics=metrics,
                    logger=self._logger,
                )
            )
        for name in config.drafters:
            self.fleet.drafters.append(
                DrafterLink(
                    name=name,
                    channel=self._open_channel(name),
                    listener=self.coordinator,
                    hint_tokens=config.hint_tokens,
                    deadline_s=config.draft_deadline_s,
                    greet_timeout_s=config.connect_timeout_s,
                    metrics=metrics,
                    logger=self._logger,
                )
            )

    def _open_channel(self, target: str) -> grpc.aio.Channel:
        channel = open_channel(target, self._config.peers, user_agent="tandem-gateway")
        self._channels.append(channel)
        return channel

    def _spawn(self, forever: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(forever)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or self._failed.done():
            return
        error = task.exception() or RuntimeError("a task that runs for ever has ended")
        self._failed.set_exception(error)


def _load_tokenizer(config: GatewayConfig) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    try:
        return Tokenizer.load(config.tokenizer)
    except TokenizerLoadError as error:
        raise ConfigError("--tokenizer", str(error)) from None
