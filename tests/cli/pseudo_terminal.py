"""A terminal for a process, and all that it has shown."""

import contextlib
import os
import pty
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

    def wait_for(self, *texts: str, timeout_s: float = 120.0) -> str:
        """Waits until all texts were shown; returns everything shown."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._is_closed or all(text in self._shown for text in texts), timeout_s
            )
            missing = [text for text in texts if text not in self._shown]
            assert found, f"not shown: {missing}: {self._shown}"
            assert not missing, f"never shown: {missing}: {self._shown}"
            return self._shown

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
