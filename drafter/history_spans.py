"""The spans of histories: how long each is stored, and how long it becomes.

Owns the open span of every history that is recorded. Exists only where the process traces. On the
event loop.
"""

from typing import TYPE_CHECKING

from drafter.history.history import History

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from servicekit.spans import Spans


class HistorySpans:
    """Holds one span per stored history that is recorded; a `HistoryWatcher`."""

    def __init__(self, spans: "Spans") -> None:
        self._spans = spans
        self._open: dict[History, Span] = {}

    def created(self, history: History, trace_parent: str) -> None:
        """Only for a caller that names its span: without one nobody looks for it."""
        if not trace_parent:
            return
        span = self._spans.begin("history", trace_parent)
        if span.is_recording():
            span.set_attributes(
                {
                    "tandem.sequence.id": history.sequence_id,
                    "tandem.prompt_tokens": history.prompt_length,
                }
            )
            self._open[history] = span

    def removed(self, history: History) -> None:
        """It was released, evicted or created anew."""
        span = self._open.pop(history, None)
        if span is not None:
            span.set_attribute("tandem.tokens", history.length)
            span.end()
