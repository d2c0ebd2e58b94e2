"""When pools are written to disk, and how without anyone waiting for it.

Owns the schedule and the folder. Texts are copied on the event loop, one at a time with a turn for
others between; a thread writes them. Does not know the format (`snapshot.py`).
"""

import asyncio
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from drafter.pool_records import FeedOutcome, KeptText
from drafter.pool_store import PoolStore
from drafter.snapshot import (
    DamagedSnapshotError,
    read_pool,
    remove_others,
    snapshots_in,
    sync_folder,
    write_pool,
)
from servicekit.logs import Logger

SLICE_S = 0.0005
"""How long copying keeps the event loop before others get a turn."""


class SnapshotOutcome(Enum):
    """What became of a snapshot of all pools."""

    WRITTEN = "written"
    FAILED = "failed"


class Snapshotter:
    """Writes one snapshot at a time. Owned by the event loop."""

    def __init__(
        self,
        store: PoolStore,
        *,
        folder: Path,
        logger: Logger,
        on_snapshot: Callable[[SnapshotOutcome], None] = lambda outcome: None,
    ) -> None:
        """Wires it up.

        Args:
            store: all pools.
            folder: of one drafter alone; made when it is first needed.
            logger: told what could not be written or read.
            on_snapshot: called after each attempt to write.
        """
        self._store = store
        self._folder = folder
        self._logger = logger
        self._on_snapshot = on_snapshot
        self._turn = asyncio.Lock()

    def restore(self) -> None:
        """Keeps what was kept when the last snapshot was taken.

        Called once, off the event loop, before anything else has to do with the store.
        """
        texts: list[KeptText] = []
        for path in snapshots_in(self._folder):
            try:
                texts += read_pool(path)
            except DamagedSnapshotError as error:
                self._logger.warning("snapshot_skipped", path=str(path), reason=str(error))
        # The oldest first, over all pools. Sorting keeps a pool's own order where ages are equal.
        texts.sort(key=lambda text: -text.age_s)
        num_kept = 0
        for text in texts:
            outcome = self._store.restore(text)
            self._store.finish()
            num_kept += outcome is FeedOutcome.KEPT
        if texts:
            self._logger.info("pools_restored", num_pools=self._store.num_pools, num_texts=num_kept)

    async def write(self) -> None:
        """Takes a snapshot of all pools. What goes wrong is logged; the next one may succeed."""
        async with self._turn:
            try:
                await self._write()
            except OSError as error:
                self._logger.error("snapshot_failed", folder=str(self._folder), reason=str(error))
                self._on_snapshot(SnapshotOutcome.FAILED)
            else:
                self._on_snapshot(SnapshotOutcome.WRITTEN)

    async def write_forever(self, interval_s: float) -> None:
        """Takes a snapshot at each interval; runs until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.write()

    async def _write(self) -> None:
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        written: set[Path] = set()
        for pool_id in self._store.pool_ids():
            texts: list[KeptText] = []
            slice_end_s = time.perf_counter() + SLICE_S
            for text in self._store.texts_of(pool_id):
                texts.append(text)
                if time.perf_counter() > slice_end_s:
                    await asyncio.sleep(0)
                    slice_end_s = time.perf_counter() + SLICE_S
            if texts:
                written.add(await asyncio.to_thread(write_pool, self._folder, texts))
        await asyncio.to_thread(remove_others, self._folder, written)
        await asyncio.to_thread(sync_folder, self._folder)
