"""A terminal for a process, and all that it has shown."""

import contextlib
import os
import pty
import re
import termios
import threading
from collections.abc import Iterator


class PseudoTerminal:
    """Reads what is written to `descriptor`, from a thread, until nobody has it open."""

    def __init__(self) -> None:
        self._reader, self.descriptor = pty.openpty()
        termios.tcsetwinsize(self.descriptor, (40, 160))
        self._shown = ""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def shown(self) -> str:
        with self._changed:
            return self._shown

    def wait_for(self, *patterns: str, timeout_s: float = 120.0) -> re.Match[str]:
        """Waits until something shown matches each pattern; returns the match of the last."""
        found: list[re.Match[str] | None] = []

        def has_all() -> bool:
            found[:] = [re.search(pattern, self._shown) for pattern in patterns]
            return self._is_closed or None not in found

        with self._changed:
            self._changed.wait_for(has_all, timeout_s)
            missing = [p for p, match in zip(patterns, found, strict=True) if match is None]
            assert not missing, f"not shown: {missing}: {self._shown}"
            last = found[-1]
        assert last is not None
        return last

    def close(self) -> None:
        """Closes this process's end; what was written before is still read."""
        os.close(self.descriptor)
        self._thread.join(30.0)
        os.close(self._reader)

    def _read(self) -> None:
        # Linux reports the last writer's end as an error.
        with contextlib.suppress(OSError):
            while content := os.read(self._reader, 1 << 16):
                with self._changed:
                    self._shown += content.decode(errors="replace")
                    self._changed.notify_all()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


@contextlib.contextmanager
def pseudo_terminal() -> Iterator[PseudoTerminal]:
    terminal = PseudoTerminal()
    try:
        yield terminal
    finally:
        terminal.close()
