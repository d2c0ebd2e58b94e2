"""What is recorded of a session's sequences; `tests/integration/test_spans.py` has whole traces."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from servicekit.telemetry.spans import Spans
from tandem.v1 import verifier_pb2
from tests.verifier.running_engine import StartEngine
from tests.verifier.service.test_session_faults import events_of, make_open
from verifier.service.sequence_spans import SequenceSpans


class _Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


async def test_a_refused_duplicate_does_not_end_the_running_sequences_span(
    start_engine: StartEngine,
) -> None:
    """Neither one that the engine refuses nor one that is refused before."""
    kept = _Kept()
    spans = Spans(service="test", version="0", exporter=kept)
    events = await events_of(
        start_engine(),
        make_open("good"),
        make_open("good"),
        make_open("good", token_ids=[]),
        spans=SequenceSpans(spans),
    )
    assert len([event for event in events if event.HasField("rejected")]) == 2
    spans.stop()
    (span,) = [each for each in kept.spans if each.name == "sequence"]
    assert span.attributes is not None
    assert span.attributes["tandem.finish_reason"] == "length"
    assert {each.name for each in kept.spans} == {"sequence", "queue", "prefill", "decode"}


async def test_what_is_open_when_its_session_ends_is_recorded_as_cancelled(
    start_engine: StartEngine,
) -> None:
    kept = _Kept()
    spans = Spans(service="test", version="0", exporter=kept)
    await events_of(
        start_engine(),
        # Without a hint it goes on for ever.
        make_open("open", draft_wait=verifier_pb2.DRAFT_WAIT_ALWAYS, max_new_tokens=100),
        make_open("good"),
        spans=SequenceSpans(spans),
    )
    spans.stop()
    ends = {
        each.attributes["tandem.sequence.id"]: each.status.description
        for each in kept.spans
        if each.name == "sequence" and each.attributes is not None
    }
    assert ends == {"good": None, "open": "CANCELLED"}
