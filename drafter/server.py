"""Builds a drafter from its configuration: the server and everything behind it."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from drafter.batch.engine import DraftEngine
from drafter.config import SERVICE, DrafterConfig
from drafter.errors import ERROR_TABLE
from drafter.history.pool_drafts import PoolDrafts
from drafter.history.store import HistoryStore
from drafter.history_spans import HistorySpans
from drafter.metrics import DrafterMetrics
from drafter.pools.keeper import PoolKeeper
from drafter.pools.snapshotter import Snapshotter
from drafter.pools.store import PoolStore
from drafter.service import SERVICE_NAME, DrafterServicer
from drafter.warm_up import warm_up
from servicekit.kernels.compile_log import compilations_logged
from servicekit.logs import Logger
from servicekit.serving.server import Server
from tandem.v1 import limits_pb2

if TYPE_CHECKING:
    from servicekit.telemetry.spans import Spans


class DrafterServer:
    """One drafter.

    Attributes:
        server: the gRPC server, with health, reflection and the metrics endpoint.
        servicer: the RPCs.
        store: the histories.
        pools: the shared pools.
        pool_keeper: does the pools' work.
        snapshotter: writes the pools to disk; None: no folder is configured.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        registry: CollectorRegistry,
        logger: Logger,
        clock: Callable[[], float] = time.monotonic,
        spans: "Spans | None" = None,
    ) -> None:
        """Builds it; no port is bound before `start`.

        Args:
            clock: returns seconds, monotonic.
            spans: records the histories; None: nothing does.
        """
        self._logger = logger
        metrics = DrafterMetrics(registry)
        self.store = HistoryStore(
            config.store_limits(),
            clock=clock,
            on_eviction=metrics.count,
            watcher=None if spans is None else HistorySpans(spans),
        )
        self.pools = PoolStore(
            config.pool_limits(),
            clock=clock,
            seed=secrets.randbits(64),
            on_feed=metrics.count,
            on_eviction=metrics.count,
        )
        metrics.watch(self.store, self.pools)
        self.pool_keeper = PoolKeeper(self.pools, logger=logger, on_failure=metrics.count_failure)
        self._snapshot_interval_s = config.snapshot_interval_s
        self.snapshotter: Snapshotter | None = None
        if config.snapshot_dir is not None:
            self.snapshotter = Snapshotter(
                self.pools,
                folder=config.snapshot_dir,
                logger=logger,
                on_snapshot=metrics.count,
                on_failure=metrics.count_failure,
                clock=clock,
            )

        self.servicer = DrafterServicer(
            DraftEngine(
                self.store,
                PoolDrafts(self.pools, on_work=self.pool_keeper.wake),
                logger=logger,
                on_batch=metrics.observe_batch,
                on_failure=metrics.count_failure,
            ),
            metrics=metrics,
            instance_id=secrets.token_hex(16),
            logger=logger,
            unread_timeout_s=config.unread_timeout_s,
        )
        self.server = Server(
            config.server,
            service=SERVICE,
            service_names=[SERVICE_NAME],
            error_table=ERROR_TABLE,
            registry=registry,
            logger=logger,
            limit_options=limits_pb2,
        )
        self.servicer.add_to_server(self.server.grpc)

    async def start(self) -> None:
        """Binds every port, then warms up; meanwhile RPCs are refused.

        Raises:
            ConfigError: a port cannot be bound, or no snapshot written, or another drafter writes
                them to the same folder.
        """
        if self.snapshotter is not None:
            await asyncio.to_thread(self.snapshotter.take_folder)
        await self.server.start()
        await self.warm_up()

    async def warm_up(self) -> None:
        """Loads or compiles the kernels, restores the pools, and begins to accept requests."""
        with compilations_logged(self._logger):
            await asyncio.to_thread(warm_up)
        if self.snapshotter is not None:
            await asyncio.to_thread(self.snapshotter.restore)
        self.servicer.open()

    async def run_forever(self) -> None:
        """Forgets expired sequences and takes snapshots, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.servicer.sweep_forever())
            if self.snapshotter is not None:
                tasks.create_task(self.snapshotter.write_forever(self._snapshot_interval_s))

    async def drain(self) -> None:
        """Answers the batches read so far, ends all streams, and takes a last snapshot."""
        await self.servicer.drain()
        if self.snapshotter is not None:
            await self.snapshotter.write()
            self.snapshotter.leave_folder()
