"""When pools are written to disk, without anyone waiting for it.

Owns the schedule, and the files that it has written or restored, but no others: a file that could
not be restored (damaged, or of another version) stays, since another version may read it. Texts are
copied on the event loop, one at a time, and written by a thread. Does not know the format
(`snapshot.py`).
"""

import asyncio
import os
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from drafter.budgets import SNAPSHOT_SLICE_S
from drafter.pool_index.records import FeedOutcome, PoolText
from drafter.pools.snapshot import (
    lock_folder,
    read_pool,
    remove,
    snapshots_in,
    sync_folder,
    try_folder,
    write_pool,
)
from drafter.pools.store import PoolStore
from drafter.refusals import Failure
from servicekit.config import ConfigError
from servicekit.logs import Logger
from servicekit.progress_log import ProgressLog

REWRITES_PER_TTL = 16
"""How often an unchanged pool is written within the lifetime of a text: the ages in its file are
those of the time of writing."""


class SnapshotOutcome(Enum):
    """What became of a snapshot of all pools."""

    WRITTEN = "written"
    FAILED = "failed"


class _Written(NamedTuple):
    """The version of a pool that its file holds, and when it was written."""

    path: Path
    version: int
    at_s: float


class Snapshotter:
    """Writes one snapshot at a time. Owned by the event loop; `clock` is the store's.

    `on_snapshot` is called after each attempt to write, `on_failure` for each file that could not
    be restored.
    """

    def __init__(
        self,
        store: PoolStore,
        *,
        folder: Path,
        logger: Logger,
        on_snapshot: Callable[[SnapshotOutcome], None],
        on_failure: Callable[[Failure], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._folder = folder
        self._logger = logger
        self._on_snapshot = on_snapshot
        self._on_failure = on_failure
        self._clock = clock
        self._turn = asyncio.Lock()
        # Keeps other drafters out of the folder; None: it is not taken.
        self._folder_lock: int | None = None
        # Files that could not be restored; they are never changed.
        self._skipped: set[Path] = set()
        # Files that were restored, and of which pool, until the first snapshot replaces them.
        self._restored: dict[Path, str] = {}
        self._written: dict[str, _Written] = {}

    def take_folder(self) -> None:
        """Makes the folder, if there is none, tries it, and keeps other drafters out of it until
        `leave_folder`; blocks, as a disk may.

        Raises:
            ConfigError: no snapshot can be written there, or another drafter writes there.
        """
        try:
            try_folder(self._folder)
            self._folder_lock = lock_folder(self._folder)
        except BlockingIOError:
            # Each would write its own pools over the other's.
            raise ConfigError(
                "--snapshot-dir", f"{self._folder}: another drafter uses it"
            ) from None
        except OSError as error:
            raise ConfigError(
                "--snapshot-dir", f"{self._folder}: cannot be written to: {error.strerror}"
            ) from None

    def leave_folder(self) -> None:
        """Lets another drafter have the folder; may be called twice."""
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None

    def restore(self) -> None:
        """Restores the last snapshot; called once, off the event loop, before the store is used."""
        texts: list[PoolText] = []
        for path in snapshots_in(self._folder):
            try:
                pool = read_pool(path)
            except Exception as error:  # each file fails alone
                self._skipped.add(path)
                self._logger.warning("snapshot_skipped", path=str(path), reason=str(error))
                self._on_failure(Failure.SNAPSHOT)
            else:
                texts += pool
                self._restored[path] = pool[0].pool_id if pool else ""
        # The oldest first, over all pools. Sorting keeps a pool's own order where ages are equal.
        texts.sort(key=lambda text: -text.age_s)
        num_kept = 0
        progress = ProgressLog("pools", self._logger)
        try:
            for index, text in enumerate(texts):
                outcome = self._store.restore(text)
                self._store.finish()
                num_kept += outcome is FeedOutcome.KEPT
                progress.show(percent=100 * (index + 1) // len(texts))
        except Exception:
            # A mistake of ours, or no memory left: the pools are in doubt, the files are not.
            self._logger.exception("restore_failed", num_texts=len(texts))
            self._on_failure(Failure.SNAPSHOT)
            self._store.forget_all()
            self._skipped |= self._restored.keys()
            self._restored.clear()
            return
        if texts:
            self._logger.info("pools_restored", num_pools=self._store.num_pools, num_texts=num_kept)

    async def write(self) -> None:
        """Takes a snapshot of all pools; a failure is logged, and the next one may succeed."""
        async with self._turn:
            try:
                num_failed, first_error = await self._write()
            except Exception as error:
                num_failed, first_error = 1, error
            if first_error is None:
                self._on_snapshot(SnapshotOutcome.WRITTEN)
                return
            self._logger.error(
                "snapshot_failed",
                folder=str(self._folder),
                reason=str(first_error),
                num_failed=num_failed,
                # A failing disk needs no traceback.
                exc_info=None if isinstance(first_error, OSError) else first_error,
            )
            self._on_snapshot(SnapshotOutcome.FAILED)

    async def write_forever(self, interval_s: float) -> None:
        """Takes a snapshot at each interval; runs until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.write()

    async def _write(self) -> tuple[int, Exception | None]:
        """Writes pools that changed or have no file; returns how many steps failed, and the first
        reason.
        """
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        present = set(await asyncio.to_thread(snapshots_in, self._folder))
        num_failed, first_error = 0, None
        pool_ids = self._store.pool_ids()
        try:
            # First, and whatever fails later: it makes room on a full disk.
            await asyncio.to_thread(self._remove_gone, set(pool_ids))
        except Exception as error:
            num_failed, first_error = 1, error
        for pool_id in pool_ids:
            try:
                await self._write_pool(pool_id, present)
            except Exception as error:  # the others are written nevertheless
                num_failed += 1
                first_error = first_error or error
        if first_error is None:
            await asyncio.to_thread(self._remove_restored)
        await asyncio.to_thread(sync_folder, self._folder)
        return num_failed, first_error

    async def _write_pool(self, pool_id: str, present: set[Path]) -> None:
        """Writes a pool, unless its file is up to date, and among those that are present."""
        version, now_s = self._store.version_of(pool_id), self._clock()
        written = self._written.get(pool_id)
        if (
            written is not None
            and written.version == version
            and written.path in present
            and now_s - written.at_s < self._store.limits.pool_ttl_s / REWRITES_PER_TTL
        ):
            return
        texts: list[PoolText] = []
        slice_end_s = time.perf_counter() + SNAPSHOT_SLICE_S
        for text in self._store.texts_of(pool_id):
            texts.append(text)
            if time.perf_counter() > slice_end_s:
                await asyncio.sleep(0)
                slice_end_s = time.perf_counter() + SNAPSHOT_SLICE_S
        if texts:
            path = await asyncio.to_thread(write_pool, self._folder, texts, self._skipped)
            self._written[pool_id] = _Written(path=path, version=version, at_s=now_s)

    def _remove_gone(self, pool_ids: set[str]) -> None:
        """Removes the files of pools that are gone, and files left half-written."""
        gone = [pool_id for pool_id in self._written if pool_id not in pool_ids]
        restored = [path for path, pool_id in self._restored.items() if pool_id not in pool_ids]
        remove(self._folder, [*restored, *(self._written[pool_id].path for pool_id in gone)])
        for pool_id in gone:
            del self._written[pool_id]
        for path in restored:
            del self._restored[path]

    def _remove_restored(self) -> None:
        """Removes the files that were restored, where others hold their pools now."""
        written = {each.path for each in self._written.values()}
        remove(self._folder, self._restored.keys() - written)
        self._restored.clear()
