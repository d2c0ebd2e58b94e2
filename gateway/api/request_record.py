"""What became of one request: its latencies, its line in the log and, where the process traces, its
span.

Owns these forms. Line and span are made once, at the request's end, of what its choices counted.
They hold identifiers and numbers, never text. Knows no transport.

    generate     the whole request; choices that moved to another verifier are its events
    ├── prepare      until its choices are opened at a verifier
    ├── queue        until the first choice is in a verifier's batch
    └── first_token  until its first output is sent
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gateway.generation.generation import Generation
from gateway.messages.request import AcceptedRequest
from gateway.model_metrics import Exemplar, ModelMetrics
from servicekit import logs
from servicekit.telemetry.trace_context import caller_trace_parent

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from servicekit.telemetry.spans import Spans

#: The status of a request that did not fail; of others, the name of the gRPC code.
OK = "OK"

# The span's names of the line's keys, where OpenTelemetry's conventions for generative AI have one.
_SPAN_NAMES = {
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
}


class RequestRecord:
    """Begins when the request arrives."""

    def __init__(
        self,
        *,
        tenant: str,
        spans: "Spans | None",
        logger: logs.Logger,
        operation: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        operation: OpenTelemetry's name of what was requested; "": it is not known.
        clock: that of `Generation.admitted_at_s`, in seconds.
        """
        self._tenant = tenant
        self._spans = spans
        self._logger = logger
        self._operation = operation
        self._clock = clock
        self._arrived_s = clock()
        self._arrived_ns = time.time_ns()
        self._opened_s: float | None = None
        self._request: AcceptedRequest | None = None
        self._generations: Sequence[Generation] = ()
        # When output of a choice was first and last sent.
        self._first_sent_s: dict[Generation, float] = {}
        self._last_sent_s: dict[Generation, float] = {}
        self._span: Span | None = None
        self._trace_id = ""
        self._exemplar: Exemplar = None
        if spans is not None:
            self._span = spans.begin("generate", caller_trace_parent(), at_ns=self._arrived_ns)
            self._trace_id = spans.trace_id(self._span)
            if self._span.is_recording():
                self._exemplar = {"trace_id": self._trace_id}

    @property
    def trace_parent(self) -> str:
        """For the verifiers; "": nothing is traced."""
        return (
            ""
            if self._spans is None or self._span is None
            else self._spans.trace_parent(self._span)
        )

    def opened(self, request: AcceptedRequest, generations: Sequence[Generation]) -> None:
        """Its choices are opened at a verifier."""
        self._request = request
        self._generations = generations
        self._opened_s = self._clock()

    def sent(self, generation: Generation, metrics: ModelMetrics) -> bool:
        """Output of a choice is sent: returns whether it is its first; hot path."""
        now_s = self._clock()
        last_s = self._last_sent_s.get(generation)
        self._last_sent_s[generation] = now_s
        if last_s is not None:
            metrics.observe_next_token(now_s - last_s, self._exemplar)
            return False
        self._first_sent_s[generation] = now_s
        metrics.observe_first_token(now_s - self._arrived_s, self._exemplar)
        if self._opened_s is not None and (admitted_s := generation.admitted_at_s) is not None:
            metrics.observe_queue(admitted_s - self._opened_s)
            metrics.observe_prefill(now_s - admitted_s)
        return True

    def finished(self, generation: Generation, metrics: ModelMetrics) -> None:
        """A choice has ended by itself, and all its output is sent."""
        now_s = self._clock()
        metrics.observe_last_token(now_s - self._arrived_s, self._exemplar)
        metrics.observe_lengths(generation.prompt_length, generation.num_generated)
        first_s = self._first_sent_s.get(generation)
        if first_s is not None and (num_next := generation.num_generated - 1) > 0:
            metrics.observe_time_per_output_token((now_s - first_s) / num_next)

    def end(self, status: str) -> None:
        """The request is over; its choices are, too.

        Args:
            status: `OK`, or the name of the gRPC code that it failed with.
        """
        ended_s = self._clock()
        figures = self._figures(ended_s)
        self._logger.info(
            "request_ended",
            request_id=self._request.request_id if self._request else logs.request_id(),
            tenant=self._tenant,
            status=status,
            **figures,
            **({"trace_id": self._trace_id} if self._trace_id else {}),
        )
        if self._span is not None:
            self._end_span(self._span, status, figures, ended_s)

    def _figures(self, ended_s: float) -> dict[str, str | int | float | list[str]]:
        """What was counted: in seconds, tokens, steps."""
        figures: dict[str, str | int | float | list[str]] = {}
        request = self._request
        if request is not None:
            usages = [generation.usage() for generation in self._generations]
            figures |= {
                "model": request.model_id,
                "prompt_tokens": len(request.prompt_token_ids),
                # What a resuming client brought is in the line of the gateway that sent it.
                "output_tokens": sum(each.num_generated for each in self._generations),
                # The other choices find what the first one computed.
                "cached_tokens": usages[0].cached_tokens,
                "steps": sum(usage.num_steps for usage in usages),
                "drafts": sum(usage.num_drafts for usage in usages),
                "draft_tokens": sum(usage.num_draft_tokens for usage in usages),
                "accepted_tokens": sum(usage.num_accepted_tokens for usage in usages),
                "resumes": sum(usage.resumes for usage in usages),
                "finish_reasons": [
                    generation.finish_reason or "unfinished" for generation in self._generations
                ],
            }
            admitted_s = self._admitted_s
            if self._opened_s is not None and admitted_s is not None:
                figures["queue_s"] = round(admitted_s - self._opened_s, 6)
        if (first_token_s := self._first_token_s) is not None:
            figures["first_token_s"] = round(first_token_s - self._arrived_s, 6)
        figures["total_s"] = round(ended_s - self._arrived_s, 6)
        return figures

    @property
    def _first_token_s(self) -> float | None:
        """When the first output of any choice was sent."""
        return min(self._first_sent_s.values(), default=None)

    @property
    def _admitted_s(self) -> float | None:
        """When a verifier admitted the first choice to its batch."""
        times_s = [
            generation.admitted_at_s
            for generation in self._generations
            if generation.admitted_at_s is not None
        ]
        return min(times_s, default=None)

    def _end_span(
        self,
        span: "Span",
        status: str,
        figures: dict[str, str | int | float | list[str]],
        ended_s: float,
    ) -> None:
        if not span.is_recording() or self._spans is None:
            return
        request_id = self._request.request_id if self._request else logs.request_id()
        span.set_attributes(
            {_SPAN_NAMES.get(name, f"tandem.{name}"): value for name, value in figures.items()}
        )
        span.set_attributes({"tandem.request.id": request_id, "tandem.tenant": self._tenant})
        span.set_attribute("gen_ai.provider.name", "tandem")
        if self._operation:
            span.set_attribute("gen_ai.operation.name", self._operation)
        begun_s = self._arrived_s
        for name, until_s in (
            ("prepare", self._opened_s),
            ("queue", self._admitted_s),
            ("first_token", self._first_token_s),
        ):
            if until_s is None:
                break
            self._spans.add_part(
                name, span, start_ns=self._to_ns(begun_s), end_ns=self._to_ns(until_s)
            )
            begun_s = until_s
        for generation in self._generations:
            for resume in generation.resumes:
                span.add_event(
                    "resumed",
                    {
                        "tandem.choice": generation.choice_index,
                        "tandem.reason": resume.reason,
                        "tandem.verifier": resume.verifier,
                    },
                    self._to_ns(resume.at_s),
                )
        if status != OK:
            self._spans.fail(span, status)
        span.end(self._to_ns(ended_s))

    def _to_ns(self, monotonic_s: float) -> int:
        """Unix nanoseconds."""
        return self._arrived_ns + round((monotonic_s - self._arrived_s) * 1e9)
