"""Stands in for a GPU's graphs on a CPU: records calls, and replays a Python function."""

from collections.abc import Callable
from typing import Any, TypeVar

from verifier.gpu.graph_pool import CapturedGraph

Output = TypeVar("Output")


class RecordingCapture:
    """Implements `Capture`. A graph calls the function again, which a GPU's graph does not.

    Attributes:
        num_bytes: of each graph to come.
        error: what the next capture raises.
        num_captures: so far.
        num_replays: so far, of all graphs.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.error: Exception | None = None
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, compute: Callable[[], Output]) -> CapturedGraph[Output]:
        if self.error is not None:
            raise self.error
        self.num_captures += 1
        return _Graph(self, compute)


class _Graph:
    def __init__(self, capture: RecordingCapture, compute: Callable[[], Any]) -> None:
        self.num_bytes = capture.num_bytes
        self._capture = capture
        self._compute = compute

    def replay(self) -> Any:
        self._capture.num_replays += 1
        return self._compute()
