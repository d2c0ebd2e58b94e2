"""Builds a whole gateway from its configuration, and runs it."""

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry

from gateway.api.frontend import Frontend
from gateway.api.grpc_service import SERVICE_NAME, GenerationServicer
from gateway.api.http import HttpListener
from gateway.api.openai.service import OpenAiApi
from gateway.config import SERVICE, GatewayConfig
from gateway.coordinator import Coordinator
from gateway.errors import ERROR_TABLE, UnreadError
from gateway.metrics import GatewayMetrics
from gateway.page.routes import page_routes
from gateway.peers.pool_copies import PoolCopies
from gateway.peers.pool_feeder import PoolFeeder
from gateway.peers.verifier_link import VerifierLink
from gateway.requests.authenticator import Authenticator
from gateway.requests.clients_file import KnownClients, read_clients
from gateway.routing.aliases import parse_aliases
from gateway.routing.fleet import Fleet
from gateway.routing.membership import Membership
from gateway.routing.progress_watch import ProgressWatch
from gateway.text.chat_template import ChatTemplateError
from gateway.text.model_text import ModelText, ModelTexts, SameTokenizerError
from gateway.text.sampling_defaults import NO_DEFAULTS, GenerationConfigError
from gateway.text.tokenizer import TokenizerLoadError
from gateway.text.tokenizer_threads import TokenizerThreads
from servicekit.channels.channel import open_channel
from servicekit.channels.discovery import Discovery, Replica, Resolve, resolve_host
from servicekit.channels.tls import channel_credentials
from servicekit.channels.watched_files import WatchedFiles
from servicekit.config import ConfigError
from servicekit.logs import Logger
from servicekit.serving.client_waits import ClientWaits
from servicekit.serving.server import Server
from tandem.v1 import gateway_pb2_grpc, limits_pb2
from tandem.values import DraftWait

if TYPE_CHECKING:
    from servicekit.telemetry.spans import Spans

# In characters, of a value in the log.
_MAX_SHOWN = 64

# Clients find new replicas of the gateway; calls in flight end undisturbed.
_MAX_CONNECTION_AGE_S = 300.0


class GatewayServer:
    """One gateway.

    Attributes:
        server: the gRPC server, with health, reflection and the metrics endpoint.
        frontend: the core behind the APIs.
        fleet, coordinator, pool_copies: for tests.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        registry: CollectorRegistry,
        logger: Logger,
        resolve: Resolve = resolve_host,
        spans: "Spans | None" = None,
    ) -> None:
        """Builds it, inside the event loop; nothing is bound before `start`.

        Args:
            resolve: resolves the names of verifiers and drafters.
            spans: records the requests; None: nothing does.

        Raises:
            ConfigError: a tokenizer cannot be loaded, or the credentials cannot be used.
        """
        self._config = config
        self._registry = registry
        self._logger = logger
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: HttpListener | None = None
        self._availability_changed = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        metrics = GatewayMetrics(registry)
        self._metrics = metrics
        self._gateway_id = secrets.token_hex(16)
        self.fleet = Fleet(metrics=metrics, logger=logger)
        self._pools = PoolFeeder(config.peers, logger=logger)
        self.pool_copies = PoolCopies(self._pools, logger=logger, on_copy=metrics.count_pool_copy)
        self.coordinator = Coordinator(
            fleet=self.fleet,
            draft_wait=DraftWait(config.draft_wait),
            max_resumes=config.max_resumes,
            stream_interval_s=config.stream_interval_s,
            resume_timeout_s=config.resume_timeout_s,
            metrics=metrics,
            logger=logger,
            on_availability=self._on_availability,
            copies=self.pool_copies,
        )
        texts, threads = _load_texts(config, logger), TokenizerThreads()
        self._threads = threads
        self.frontend = Frontend(
            coordinator=self.coordinator,
            fleet=self.fleet,
            aliases=parse_aliases(config.model_aliases),
            texts=texts,
            threads=threads,
            pools=self._pools,
            allow_trace=config.allow_trace,
            defaults=config.request_defaults(),
            max_concurrent_requests=config.max_concurrent_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            metrics=metrics,
            logger=logger,
            spans=spans,
        )
        self._clients: WatchedFiles[KnownClients] | None = None
        self._authenticator = Authenticator(None if config.clients is None else self._known_clients)
        self.server = Server(
            config.server,
            service=SERVICE,
            service_names=[SERVICE_NAME],
            error_table=ERROR_TABLE,
            registry=registry,
            logger=logger,
            limit_options=limits_pb2,
            admit=None if config.clients is None else self._authenticator.authenticate,
            max_connection_age_s=_MAX_CONNECTION_AGE_S,
        )
        if config.clients is not None:
            self._clients = WatchedFiles(
                [config.clients],
                functools.partial(read_clients, config.clients),
                on_reload=self.server.on_reload("clients"),
            )
        self._openai = OpenAiApi(
            frontend=self.frontend,
            authenticator=self._authenticator,
            allowed_clients=config.server.allowed_clients,
            texts=texts,
            threads=threads,
            body_timeout_s=config.server.request_timeout_s,
            max_connections=config.server.max_concurrent_calls,
            on_shed=metrics.count_shed,
            logger=logger,
        )
        self._client_waits = ClientWaits(
            unread_timeout_s=config.unread_timeout_s, make_unread_error=self._unread_error
        )
        gateway_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.frontend, self._client_waits, self._authenticator),
            self.server.grpc,
        )
        self._progress_watch = ProgressWatch(
            fleet=self.fleet,
            failover_after_s=config.failover_after_s,
            progress_timeout_s=config.progress_timeout_s,
            can_wait=DraftWait(config.draft_wait) is DraftWait.ALWAYS,
        )
        self._membership = Membership(
            fleet=self.fleet,
            start_link=self._start_link,
            on_change=self.coordinator.on_verifiers_changed,
            logger=logger,
        )
        self._verifiers = Discovery(
            config.verifiers,
            interval_s=config.peers.resolve_interval_s,
            on_change=self._membership.set_replicas,
            resolve=resolve,
            logger=logger,
        )
        self._drafters = Discovery(
            config.drafters,
            interval_s=config.peers.resolve_interval_s,
            on_change=self._set_drafters,
            resolve=resolve,
            logger=logger,
        )
        for address in config.verifiers:
            # What cannot be used is found now, and not when the name is resolved.
            channel_credentials(address, config.peers)
        self.server.watch_peer_certificate(config.peers)

    @property
    def http_address(self) -> str | None:
        """The address of HTTP, with the real port, after `start`; None if it is not served."""
        return None if self._http is None else self._http.address

    @property
    def failed(self) -> "asyncio.Future[None]":
        """Done, with its error, when a task that must run for ever has ended."""
        return self._failed

    async def start(self) -> None:
        """Binds, and begins to connect to the verifiers; health says NOT_SERVING.

        Raises:
            ConfigError: an address cannot be bound. Nothing is left running.
        """
        try:
            if self._config.http_listen is not None:
                self._http = HttpListener(
                    listen=self._config.http_listen,
                    options=self._config.server,
                    certificate=self.server.certificate,
                    registry=self._registry,
                    routes=[
                        *self._openai.routes(),
                        *(page_routes() if self._config.page else ()),
                    ],
                    allowed_origins=self._config.http_allowed_origins,
                    refuse_metrics=self._openai.refuse if self._config.metrics_need_token else None,
                    is_ready=lambda: self.server.is_serving and self.frontend.is_serving,
                    client_waits=self._client_waits,
                )
            await self.server.start()
        except BaseException:
            await self.stop()
            raise
        if self._http is not None:
            self._spawn(self._http.run())
        if self._clients is not None:
            self._spawn(self._clients.watch())
        self._membership.set_replicas(self._verifiers.replicas)
        self._set_drafters(self._drafters.replicas)
        self._spawn(self._membership.run())
        self._spawn(self._verifiers.run())
        self._spawn(self._drafters.run())
        self._spawn(self._progress_watch.run())

    async def wait_until_serving(self) -> None:
        """Returns when a verifier is connected.

        Raises:
            Exception: that of `failed`.
        """
        while not self.frontend.is_serving:
            await self._await_availability()

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones are done."""
        self._openai.close()
        await self.frontend.drain()
        await self.pool_copies.settle()
        if self._http is not None:
            await self._http.drain()

    async def stop(self) -> None:
        """Stops everything and cuts running requests off. May be called again."""
        await self.server.stop(0)
        await self.pool_copies.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._http is not None:
            self._http.close()
        self._threads.close()

    def ready_line(self) -> str:
        """The line that the process prints when it serves."""
        http = "" if self.http_address is None else f" http={self.http_address}"
        return f"ready grpc={self.server.address}{http}"

    def _known_clients(self) -> KnownClients:
        assert self._clients is not None, "the gateway has a file of clients"
        return self._clients.value

    def _unread_error(self) -> UnreadError:
        """Counts a request that ends because its client does not read, and says why it ends."""
        timeout_s = self._config.unread_timeout_s
        error = UnreadError(f"output was left unread for {timeout_s} s")
        self._metrics.count_error(error)
        return error

    async def _await_availability(self) -> None:
        self._availability_changed.clear()
        changed = asyncio.ensure_future(self._availability_changed.wait())
        try:
            await asyncio.wait((changed, self._failed), return_when=asyncio.FIRST_COMPLETED)
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

    def _set_drafters(self, replicas: Sequence[Replica]) -> None:
        self._pools.drafters = replicas
        self.coordinator.set_drafters([replica.address for replica in replicas])

    def _start_link(self, replica: Replica) -> "tuple[VerifierLink, asyncio.Task[None]]":
        channel = open_channel(
            replica.address,
            self._config.peers,
            server_name=replica.server_name,
            user_agent="tandem-gateway",
        )
        link = VerifierLink(
            name=replica.address,
            channel=channel,
            gateway_id=self._gateway_id,
            listener=self.coordinator,
            greet_timeout_s=self._config.connect_timeout_s,
            metrics=self._metrics,
            logger=self._logger,
        )
        return link, self._spawn(_run_link(link, channel))

    def _spawn(self, forever: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(forever)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._failed.done():
            return
        error = task.exception() or RuntimeError("a task that runs for ever has ended")
        self._failed.set_exception(error)


async def _run_link(link: VerifierLink, channel: grpc.aio.Channel) -> None:
    async with channel:
        await link.run()


def _log_ignored(logger: Logger, folder: Path, name: str, value: object) -> None:
    logger.warning(
        "sampling_default_ignored", folder=str(folder), field=name, value=repr(value)[:_MAX_SHOWN]
    )


def _load_texts(config: GatewayConfig, logger: Logger) -> ModelTexts:
    loaded = []
    try:
        for folder in config.tokenizer:
            text = ModelText.load(
                folder,
                tool_calls=config.tool_call_parser,
                reasoning=config.reasoning_parser,
                generation_config=config.generation_config,
                on_ignored_default=functools.partial(_log_ignored, logger, folder),
            )
            loaded.append(text)
            if text.sampling_defaults != NO_DEFAULTS:
                defaults = dataclasses.asdict(text.sampling_defaults)
                logger.info("sampling_defaults", folder=str(folder), **defaults)
        return ModelTexts(loaded)
    except (TokenizerLoadError, ChatTemplateError, GenerationConfigError) as error:
        raise ConfigError("--tokenizer", str(error)) from None
    except SameTokenizerError:
        raise ConfigError("--tokenizer", "two folders have the same tokenizer") from None
