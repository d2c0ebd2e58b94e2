"""Runs the work of the pool store on the event loop, a little at a time.

Owns one task, which lives while there is work. Does not know what the work is (`store.py`).
"""

import asyncio
import time
from collections.abc import Callable

from drafter.budgets import POOL_SLICE_S
from drafter.pools.store import PoolStore
from drafter.refusals import Failure
from servicekit.logs import Logger


class PoolKeeper:
    """Owned by the event loop. The work is bounded by the bytes that may wait in the store."""

    def __init__(
        self,
        store: PoolStore,
        *,
        logger: Logger,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self._store = store
        self._logger = logger
        self._on_failure = on_failure
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Starts the work, if there is any; returns at once."""
        if self._task is None and self._store.has_work:
            self._task = asyncio.create_task(self._work())

    async def settle(self) -> None:
        """Returns when there is no work left."""
        self.wake()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _work(self) -> None:
        try:
            while self._store.has_work:
                end_s = time.perf_counter() + POOL_SLICE_S
                while self._store.work() and time.perf_counter() < end_s:
                    pass
                await asyncio.sleep(0)
        except Exception:
            # A mistake of ours, or no memory left: the state of the pools is in doubt.
            self._logger.exception("pools_failed", num_pools=self._store.num_pools)
            self._on_failure(Failure.POOLS)
            self._store.forget_all()
        finally:
            self._task = None
