"""Files that are read again when they change, without a restart.

Owns when they are read, and which content counts: the last that could be read. Knows no content.
A replaced file, a changed one and a moved symbolic link (as Kubernetes updates a mounted secret)
are all noticed, because a file's identity, size and time of change are compared.
"""

import asyncio
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from servicekit.yaml_file import ConfigError

T = TypeVar("T")

#: How often files are looked at, at most, in seconds.
CHECK_INTERVAL_S = 1.0

# The longest pause before files that failed are read again although they look the same.
_LONGEST_PAUSE_S = 60.0

# A file's device, inode, size and time of change; None: it cannot be found.
_Stamp = tuple[int, int, int, int] | None


class WatchedFiles(Generic[T]):
    """What some files hold. `value` and `refresh` may be used from any thread."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        on_reload: Callable[[ConfigError | None], None],
    ) -> None:
        """Reads the files.

        Args:
            paths: the files that `read` reads.
            read: reads them all; raises ConfigError while they cannot be used.
            on_reload: called after a change, with None if the files were read, else with the error.
                Once per change, from the thread of `refresh`.

        Raises:
            ConfigError: the files cannot be used.
        """
        self._paths = tuple(paths)
        self._read = read
        self._on_reload = on_reload
        self._refreshing = threading.Lock()
        # Taken before reading, so that a change during it is noticed later.
        self._stamps = self._stamp()
        # After a failure, when files are read again that look the same, and the pause after that.
        self._next_try_s: float | None = None
        self._pause_s = CHECK_INTERVAL_S
        self._next_check_s = 0.0
        #: What the files held when they could last be read.
        self.value = read()

    def refresh(self) -> None:
        """Reads the files if they have changed; looks at them once in `CHECK_INTERVAL_S` only."""
        if time.monotonic() < self._next_check_s or not self._refreshing.acquire(blocking=False):
            return
        try:
            now_s = time.monotonic()
            self._next_check_s = now_s + CHECK_INTERVAL_S
            stamps = self._stamp()
            is_change = stamps != self._stamps
            # What failed is read again even if it looks the same: a file may have been half
            # written, and be completed within one tick of its clock; or it may be read now. Ever
            # more seldom: a large file takes a second.
            if is_change:
                self._pause_s = CHECK_INTERVAL_S
            if is_change or (self._next_try_s is not None and now_s >= self._next_try_s):
                self._stamps = stamps
                self._reload(is_change)
        finally:
            self._refreshing.release()

    async def watch(self) -> None:
        """Keeps the value fresh, in a thread of its own, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await asyncio.to_thread(self.refresh)

    def _reload(self, is_change: bool) -> None:
        try:
            self.value = self._read()
        except Exception as error:  # what nobody foresaw must not end the service either
            self._next_try_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            if is_change:
                self._on_reload(
                    error if isinstance(error, ConfigError) else ConfigError("", repr(error))
                )
            return
        self._next_try_s = None
        self._on_reload(None)

    def _stamp(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp_of(path) for path in self._paths)


def _stamp_of(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        # What was read of a pipe is gone from it.
        return found.st_dev, found.st_ino, 0, 0
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
