"""The spans of one session's sequences: their wait, their prefill, their decode.

Owns what is recorded of a sequence between its Open and its last event, from the events that its
session sends. Exists only where the process traces. On the event loop.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servicekit.errors import find_code
from verifier.engine.messages import Decided, Event, Opened, Rejected
from verifier.errors import ERROR_TABLE
from verifier.scheduling.sequence import OpenSequence

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from servicekit.telemetry.spans import Spans


@dataclass(slots=True, kw_only=True, eq=False)
class _Recorded:
    """One sequence that is open; times in monotonic nanoseconds, 0: not yet."""

    span: "Span"
    # Unix nanoseconds where the monotonic clock is 0, as of the opening: the wall clock may be set
    # while the sequence runs.
    epoch_ns: int
    opened_ns: int
    admitted_ns: int = 0
    decoding_ns: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class SequenceSpans:
    """Holds one entry per open sequence that is recorded."""

    def __init__(self, spans: "Spans") -> None:
        self._spans = spans
        self._open: dict[str, _Recorded] = {}
        # By the id of an open sequence: further Opens of that id, each of which will be rejected.
        self._num_refused: Counter[str] = Counter()

    def receive(self, sequence_id: str) -> None:
        """An Open has come. Where its id is open, the Rejected to come is not that sequence's."""
        if sequence_id in self._open:
            self._num_refused[sequence_id] += 1

    def begin(self, sequence: OpenSequence, trace_parent: str) -> OpenSequence:
        """A sequence is to be opened; its drafter's part becomes a part of its span."""
        if sequence.sequence_id in self._open:
            return sequence  # the engine rejects it
        opened_ns = time.monotonic_ns()
        epoch_ns = time.time_ns() - opened_ns
        span = self._spans.begin("sequence", trace_parent, at_ns=epoch_ns + opened_ns)
        if (drafted_by := sequence.drafted_by) is not None:
            own = dataclasses.replace(drafted_by, trace_parent=self._spans.trace_parent(span))
            sequence = dataclasses.replace(sequence, drafted_by=own)
        if not span.is_recording():
            return sequence
        span.set_attributes(
            {
                "tandem.sequence.id": sequence.sequence_id,
                "tandem.prompt_tokens": sequence.prompt_length,
                "tandem.given_output_tokens": len(sequence.token_ids) - sequence.prompt_length,
                "tandem.drafter": drafted_by.address if drafted_by else "",
            }
        )
        self._open[sequence.sequence_id] = _Recorded(
            span=span, epoch_ns=epoch_ns, opened_ns=opened_ns
        )
        return sequence

    def note(self, events: Sequence[Event]) -> None:
        """The session gets these events."""
        if not self._open:
            return
        now_ns = time.monotonic_ns()
        for event in events:
            recorded = self._open.get(event.sequence_id)
            if recorded is None:
                continue
            if isinstance(event, Decided):
                _count(recorded, event, now_ns)
                if event.finish_reason is not None:
                    self._end(event.sequence_id, now_ns, event.finish_reason.value)
            elif isinstance(event, Opened):
                recorded.admitted_ns = now_ns
                recorded.num_cached_tokens = event.num_cached_tokens
            elif not isinstance(event, Rejected):
                pass
            elif self._num_refused[event.sequence_id]:
                self._num_refused[event.sequence_id] -= 1
            else:
                code = find_code(event.error, ERROR_TABLE)
                self._end(
                    event.sequence_id, now_ns, error="INTERNAL" if code is None else code.name
                )

    def end_all(self) -> None:
        """The session is over, and with it its sequences."""
        now_ns = time.monotonic_ns()
        for sequence_id in list(self._open):
            self._end(sequence_id, now_ns, error="CANCELLED")

    def _end(self, sequence_id: str, now_ns: int, reason: str = "", *, error: str = "") -> None:
        recorded = self._open.pop(sequence_id)
        self._num_refused.pop(sequence_id, None)
        span = recorded.span
        epoch_ns = recorded.epoch_ns
        admitted_ns = recorded.admitted_ns or now_ns
        self._spans.add_part(
            "queue", span, start_ns=epoch_ns + recorded.opened_ns, end_ns=epoch_ns + admitted_ns
        )
        if recorded.admitted_ns:
            self._spans.add_part(
                "prefill",
                span,
                start_ns=epoch_ns + admitted_ns,
                end_ns=epoch_ns + (recorded.decoding_ns or now_ns),
                attributes={"tandem.cached_tokens": recorded.num_cached_tokens},
            )
        if recorded.decoding_ns:
            self._spans.add_part(
                "decode",
                span,
                start_ns=epoch_ns + recorded.decoding_ns,
                end_ns=epoch_ns + now_ns,
                attributes={
                    "tandem.steps": recorded.num_steps,
                    "tandem.output_tokens": recorded.num_output_tokens,
                    "tandem.drafts": recorded.num_drafts,
                    "tandem.draft_tokens": recorded.num_draft_tokens,
                    "tandem.accepted_tokens": recorded.num_accepted_tokens,
                },
            )
        if error:
            self._spans.fail(span, error)
        else:
            span.set_attribute("tandem.finish_reason", reason)
        span.end(epoch_ns + now_ns)


def _count(recorded: _Recorded, decided: Decided, now_ns: int) -> None:
    if not decided.token_ids:
        return
    # Its step ends the prefill.
    recorded.decoding_ns = recorded.decoding_ns or now_ns
    recorded.num_steps += 1
    recorded.num_output_tokens += len(decided.token_ids)
    recorded.num_drafts += decided.num_draft_tokens > 0
    recorded.num_draft_tokens += decided.num_draft_tokens
    recorded.num_accepted_tokens += decided.num_accepted_tokens
