"""Says in the log that kernels are being compiled: minutes, at a service's first start."""

import contextlib
from collections.abc import Iterator
from typing import Any

from numba.core import event

from servicekit.logs import Logger
from servicekit.progress_log import ProgressLog


class _Listener(event.Listener):
    """Counts; numba calls it under its compiler's lock."""

    def __init__(self, logger: Logger) -> None:
        self._progress = ProgressLog("kernels", logger)
        self._num_compiled = 0

    def on_start(self, event: Any) -> None:
        pass

    def on_end(self, event: Any) -> None:
        self._num_compiled += 1
        self._progress.show(compiled=self._num_compiled)


@contextlib.contextmanager
def compilations_logged(logger: Logger) -> Iterator[None]:
    """Logs how many kernels were compiled, whatever thread compiles them; none that are cached."""
    listener = _Listener(logger)
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)  # type: ignore[no-untyped-call]
