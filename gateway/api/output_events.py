"""The output of a request's choices, as its client gets it.

Owns the order in which choices are read, and when a token counts as sent. Knows no transport.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gateway.api.request_record import RequestRecord
from gateway.generation.generation import Generation
from gateway.messages.response import Finished, GenerateEvent, Traced
from gateway.model_metrics import ModelMetrics
from gateway.requests.admission import AdmittedRequest


async def read_output(
    generations: Sequence[Generation],
    changed: asyncio.Event,
    admitted: AdmittedRequest,
    record: RequestRecord,
    metrics: ModelMetrics,
) -> AsyncGenerator[GenerateEvent, None]:
    """Yields the generations' output as it is shown.

    Args:
        generations: of one request.
        changed: set whenever one of them has more to read.
        admitted: learns which of them have begun.
        metrics: of the request's model.

    Raises:
        RequestError: of the first generation that failed.
    """
    unfinished = list(generations)
    while unfinished:
        await changed.wait()
        changed.clear()
        for generation in tuple(unfinished):
            # Before reading: while the chunk is written, more may come and end it.
            is_over = generation.is_over
            event = generation.read()
            if isinstance(event, Traced):
                yield event
            elif event is not None:
                if record.sent(generation, metrics):
                    admitted.begin_choice()
                yield event
            if not is_over or generation.has_unread:
                continue
            if generation.error is not None:
                raise generation.error
            record.finished(generation, metrics)
            unfinished.remove(generation)
            assert generation.finish_reason is not None, "it is over"
            yield Finished(
                choice_index=generation.choice_index,
                finish_reason=generation.finish_reason,
                usage=generation.usage(),
            )
