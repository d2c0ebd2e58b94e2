"""The spans of histories: how long each is stored, and how long it becomes.

Owns the open span of every history that is recorded. Exists only where the process traces. On the
event loop.
"""

import time
from typing import TYPE_CHECKING

from drafter.history.history import History

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from servicekit.telemetry.spans import Spans


class HistorySpans:
    """Holds one span per stored history that is recorded; a `HistoryWatcher`."""

    def __init__(self, spans: "Spans") -> None:
        self._spans = spans
        # With Unix nanoseconds where the monotonic clock is 0, as of the span's beginning: the wall
        # clock may be set while the history is stored.
        self._open: dict[History, tuple[Span, int]] = {}

    def created(self, history: History, trace_parent: str) -> None:
        """Only for a caller that names its span: without one nobody looks for it."""
        if not trace_parent:
            return
        now_ns = time.monotonic_ns()
        epoch_ns = time.time_ns() - now_ns
        span = self._spans.begin("history", trace_parent, at_ns=epoch_ns + now_ns)
        if span.is_recording():
            span.set_attributes(
                {
                    "tandem.sequence.id": history.sequence_id,
                    "tandem.prompt_tokens": history.prompt_length,
                }
            )
            self._open[history] = span, epoch_ns

    def removed(self, history: History) -> None:
        """It was released, evicted or created anew."""
        opened = self._open.pop(history, None)
        if opened is not None:
            span, epoch_ns = opened
            span.set_attribute("tandem.tokens", history.length)
            span.end(epoch_ns + time.monotonic_ns())
