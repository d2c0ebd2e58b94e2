"""The verifier's process: load, serve, drain."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from servicekit.channels.discovery import Resolve, resolve_host
from servicekit.channels.tls import channel_credentials
from servicekit.config import ConfigError
from servicekit.logs import Logger, get_logger
from servicekit.serving.process import serve_until_signalled
from servicekit.serving.server import Server
from tandem.v1 import limits_pb2, verifier_pb2, verifier_pb2_grpc
from verifier.build import LoadedModel, build_engine, load_model
from verifier.checkpoint.refusals import CheckpointError
from verifier.config import SERVICE, VerifierConfig
from verifier.drafters.addresses import AdmittedDrafters
from verifier.drafters.link import DrafterLink
from verifier.drafters.messages import DrafterMessage, Link
from verifier.engine.engine import Engine
from verifier.engine.observation import EngineObserver
from verifier.errors import ERROR_TABLE
from verifier.metrics import VerifierMetrics
from verifier.service.servicer import VerifierServicer
from verifier.service.watchdog import Watchdog
from verifier.structured.grammars import Grammars
from verifier.tensor_parallel.launch import Launch

if TYPE_CHECKING:
    from servicekit.telemetry.spans import Spans
    from verifier.tensor_parallel.leader import Leader

SERVICE_NAME = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name

# A step is mostly short Python between long operations without the GIL. With the default of 5 ms
# the event loop, and with it hints, would wait that long.
_SWITCH_INTERVAL_S = 0.00005

# Of events that a session leaves unread; it is ended beyond.
_MAX_SESSION_EVENT_BYTES = 8 << 20

# Longer than a step takes.
_LAST_STEP_TIMEOUT_S = 10.0
# For the names of the drafters, before the model is loaded.
_RESOLVE_TIMEOUT_S = 5.0


class VerifierServer:
    """One verifier. It binds its port before it loads, so that probes get NOT_SERVING meanwhile.

    Attributes:
        server: the gRPC server, with health, reflection and the metrics endpoint.
        servicer: the RPCs.
        engine: None before `load`.
    """

    def __init__(
        self,
        config: VerifierConfig,
        *,
        registry: CollectorRegistry,
        logger: Logger,
        resolve: Resolve = resolve_host,
        spans: "Spans | None" = None,
    ) -> None:
        """Builds it; nothing is bound before `start`.

        Args:
            resolve: resolves the names of drafters.
            spans: records the sequences; None: nothing does.
        """
        self.engine: Engine | None = None
        self._grammars: Grammars | None = None
        self._config = config
        self._registry = registry
        self._logger = logger
        self.server = Server(
            config.server,
            service=SERVICE,
            service_names=[SERVICE_NAME],
            error_table=ERROR_TABLE,
            registry=registry,
            logger=logger,
            limit_options=limits_pb2,
        )
        self._admitted = AdmittedDrafters(
            config.drafters, resolve_interval_s=config.peers.resolve_interval_s, resolve=resolve
        )
        for address in config.drafters:
            # What cannot be used is found now, and not by the first request.
            channel_credentials(address, config.peers)
        if config.drafters:
            self.server.watch_peer_certificate(config.peers)
        self.servicer = VerifierServicer(
            admits_drafter=self._admitted.admit,
            max_session_event_bytes=_MAX_SESSION_EVENT_BYTES,
            max_waiting_tokens=config.max_waiting_tokens,
            allow_score=config.score != "none",
            spans=spans,
        )
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self.servicer, self.server.grpc)

    async def start(
        self, load: Callable[[VerifierConfig], LoadedModel], observer: EngineObserver | None = None
    ) -> Engine:
        """Binds, loads the model in a thread of its own, and starts the engine.

        Args:
            load: `build.load_model`, except in tests.
            observer: called beside the metrics.

        Raises:
            CheckpointError, ConfigError: cannot start.
        """
        await self.server.start()
        try:
            # A resolver that hangs must not: names are resolved again and again.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                    await self._admitted.resolve()
            loaded = await asyncio.to_thread(load, self._config)
        except BaseException:
            await self.server.stop(0)
            raise
        metrics = VerifierMetrics(
            self._registry,
            model_id=loaded.served.model_id,
            block_size=loaded.served.block_size,
            num_kv_blocks=loaded.served.num_kv_blocks,
            max_num_seqs=loaded.served.max_num_seqs,
            max_num_waiting=self._config.max_num_waiting,
            max_waiting_tokens=self._config.max_waiting_tokens,
        )
        loop = asyncio.get_running_loop()

        def open_link(address: str, post: Callable[[DrafterMessage], None]) -> Link:
            link = DrafterLink(
                address,
                admitted=self._admitted,
                loop=loop,
                options=self._config.peers,
                post=post,
                deadline_s=self._config.draft_deadline_s,
                logger=self._logger,
            )
            link.start()
            return link

        engine = self.engine = build_engine(
            loaded, self._config, [metrics, *([observer] if observer else [])], open_link
        )
        metrics.watch(engine)
        engine.start()
        if self._config.allow_structured_output:
            self._grammars = Grammars(
                self._config.model / "tokenizer.json",
                vocab_size=loaded.served.vocab_size,
                end_token_ids=sorted(loaded.served.eos_token_ids),
                # As many as run, and as many again, so that the next to run are ready.
                max_num_states=2 * self._config.max_num_seqs,
                on_compiled=metrics.grammar_compiled,
                logger=self._logger,
            )
        self.servicer.open(self.engine, loaded.served, self._grammars)
        return engine

    def close(self) -> None:
        """Ends the thread that compiles grammars; idempotent. Blocks, as `Grammars.close` does."""
        if self._grammars is not None:
            self._grammars.close()

    async def resolve_drafters(self) -> None:
        """Keeps the drafters' names resolved, until cancelled."""
        await self._admitted.run()

    async def watch(self, stopped: "asyncio.Future[None]") -> None:
        """Updates the liveness status until the engine has stopped; after `start`."""
        assert self.engine is not None, "the verifier has not started"
        await Watchdog(
            self.engine,
            stall_timeout_s=self._config.stall_timeout_s,
            on_change=self._on_liveness,
        ).run(stopped)

    def _on_liveness(self, is_alive: bool) -> None:
        assert self.engine is not None, "the verifier has not started"
        # Why an engine has ended, its error says.
        if not is_alive and not self.engine.stopped.done():
            self._logger.warning("engine_stalled", timeout_s=self._config.stall_timeout_s)
        self.server.set_alive(is_alive)


async def serve(
    config: VerifierConfig, launch: Launch | None = None, spans: "Spans | None" = None
) -> None:
    """Serves until signalled.

    Args:
        launch: if this process is rank 0 of several.
        spans: records the sequences; None: nothing does.

    Raises:
        ConfigError: cannot start.
        RankLostError: another rank is lost.
        Exception: the engine's, when it failed.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if launch is None:
        await _serve(config, None, spans)
        return
    # With torch, which one process alone may never need.
    from verifier.tensor_parallel.leader import Leader

    leader = Leader(launch)
    try:
        await _serve(config, leader, spans)
    except BaseException as error:
        leader.fail(error)
        raise
    await asyncio.to_thread(leader.stop)


async def _serve(config: VerifierConfig, leader: "Leader | None", spans: "Spans | None") -> None:
    verifier = VerifierServer(
        config, registry=CollectorRegistry(), logger=get_logger(SERVICE), spans=spans
    )
    try:
        engine = await verifier.start(lambda config: load_model(config, leader))
    except BaseException as error:
        await verifier.server.stop(0)
        if isinstance(error, CheckpointError):
            raise ConfigError("--model", str(error)) from error
        raise
    # The loaded objects live as long as the process. Each garbage collection of them would stop
    # both threads for tens of milliseconds.
    gc.freeze()
    stopped = asyncio.wrap_future(engine.stopped)
    failed = stopped if leader is None else _first_failure(stopped, leader)
    watching = asyncio.create_task(verifier.watch(stopped))
    resolving = asyncio.create_task(verifier.resolve_drafters())
    try:
        await serve_until_signalled(verifier.server, drain=verifier.servicer.drain, failed=failed)
    finally:
        watching.cancel()
        resolving.cancel()
        engine.stop()
        await asyncio.to_thread(verifier.close)
        # The process would abort if the interpreter ended during a step.
        await asyncio.wait([stopped], timeout=_LAST_STEP_TIMEOUT_S)


def _first_failure(stopped: "asyncio.Future[None]", leader: "Leader") -> "asyncio.Future[None]":
    """Done when the engine has stopped or a rank is lost, with the error of either."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(future: "asyncio.Future[None]") -> None:
        error = future.exception()
        if failed.done():
            return
        if error is None:
            failed.set_result(None)
        else:
            failed.set_exception(error)

    for future in (stopped, asyncio.wrap_future(leader.lost)):
        future.add_done_callback(ended)
    return failed
