"""From a job's events to the bytes of its answer.

Owns the two ways to answer, in chunks and as a whole, and what an answer may hold. The status waits
until every prompt has begun and the first text is there; an error after that comes as an event of
the stream.
"""

from collections.abc import AsyncGenerator, Callable

from starlette.types import Send

from gateway.api.openai.errors import ApiError
from gateway.api.openai.jobs import Job
from gateway.api.openai.writing.answers import MAX_ANSWER_BYTES, Part
from gateway.api.openai.writing.choices import Choice
from gateway.api.openai.writing.tokens import TokenTexts
from gateway.api.openai.writing.usage import UsageTotal
from gateway.messages.response import Chunk, Finished, GenerateEvent, Model, Started, Traced
from gateway.text.model_text import ModelTexts
from gateway.text.tokenizer_threads import TokenizerThreads

# The tokenizer's threads know work by bytes of text to encode. A logprob, or a token of a report,
# takes as long to format as so many bytes take to encode; a token takes as long to decode.
_BYTES_PER_LOGPROB = 8
_BYTES_PER_REPORTED_TOKEN = 8
_BYTES_PER_TOKEN = 4

_JSON = (b"content-type", b"application/json")
_SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold chunks back.
    (b"x-accel-buffering", b"no"),
)

#: A job's events, each with the index of its prompt.
Events = AsyncGenerator[tuple[int, GenerateEvent], None]


class AnswerWriter:
    """Answers jobs."""

    def __init__(self, *, texts: ModelTexts, threads: TokenizerThreads) -> None:
        """Args:
        texts: the tokenizers of the models.
        threads: for parts that take long to format.
        """
        self._texts = texts
        self._threads = threads
        # By the digest of the tokenizer: they remember how tokens are shown.
        self._token_texts: dict[str, TokenTexts] = {}
        self._no_texts = TokenTexts(None)

    async def stream(
        self,
        job: Job,
        events: Events,
        send: Send,
        to_api_error: Callable[[Exception], ApiError],
    ) -> None:
        """Answers in events.

        Raises:
            Exception: before the status was sent. Later ones are events of the stream.
        """
        answer, usage = job.answer, UsageTotal(has_prediction=job.has_prediction)
        num_starting = job.num_prompts
        # What waits for the status.
        held: list[str] | None = [answer.begin()]
        try:
            async for prompt_index, event in events:
                if isinstance(event, Chunk):
                    index = job.index_of(prompt_index, event.choice_index)
                    usage.grow(index, event.offset + len(event.token_ids))
                    part = await self._read(job.choices[index], event)
                    usage.add_reasoning(part.num_reasoning_tokens)
                    if part.is_empty:
                        continue
                    message = answer.part(index, part, usage)
                elif isinstance(event, Finished):
                    index = job.index_of(prompt_index, event.choice_index)
                    usage.add(event)
                    usage.grow(index, event.usage.output_tokens)
                    has_calls = job.choices[index].has_calls
                    message = answer.last(index, event.finish_reason, usage, has_calls=has_calls)
                else:
                    await self._prepare(job, prompt_index, event)
                    if isinstance(event, Started):
                        num_starting -= 1
                        usage.start(len(event.prompt_token_ids))
                    continue
                if held is not None:
                    held.append(message)
                    if num_starting:
                        continue
                    message, held = "".join(held), None
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
                    )
                await _send_part(send, message)
        except Exception as error:
            if held is not None:
                raise
            # The status is sent.
            await _send_part(send, answer.error(to_api_error(error)), is_last=True)
            return
        await _send_part(send, answer.end(usage), is_last=True)

    async def collect(self, job: Job, events: Events, send: Send) -> None:
        """Answers as a whole.

        Raises:
            ApiError: the answer is too large.
        """
        usage = UsageTotal(has_prediction=job.has_prediction)
        parts: list[list[Part]] = [[] for _ in job.choices]
        num_bytes = 0
        async for prompt_index, event in events:
            if isinstance(event, Chunk):
                index = job.index_of(prompt_index, event.choice_index)
                part = await self._read(job.choices[index], event)
                usage.add_reasoning(part.num_reasoning_tokens)
                parts[index].append(part)
                num_bytes += part.num_bytes
                if num_bytes > MAX_ANSWER_BYTES:
                    raise ApiError(
                        400,
                        f"the answer is over {MAX_ANSWER_BYTES} bytes; stream it",
                        param="stream",
                        code="answer_too_large",
                    )
            elif isinstance(event, Finished):
                index = job.index_of(prompt_index, event.choice_index)
                usage.add(event)
                job.answer.collect(index, parts[index], event.finish_reason)
            else:
                await self._prepare(job, prompt_index, event)
        await send_json(send, job.answer.whole(usage))

    async def _prepare(self, job: Job, prompt_index: int, event: Started | Traced) -> None:
        """Tells choices what comes before their next part."""
        if isinstance(event, Traced):
            job.choices[job.index_of(prompt_index, event.choice_index)].add_trace(event.step)
            return
        choices = job.choices_of(prompt_index)
        texts, token_ids = self._texts_of(event.model), event.prompt_token_ids
        decoded = ""
        if choices[0].echoes_tokens:
            decoded = await self._threads.run(
                _BYTES_PER_TOKEN * len(token_ids), texts.echo, token_ids
            )
        for choice in choices:
            choice.start(texts, token_ids, decoded)

    async def _read(self, choice: Choice, chunk: Chunk) -> Part:
        num_bytes = _BYTES_PER_LOGPROB * (len(chunk.logprobs) + len(chunk.prompt_logprobs))
        if choice.wants.report:
            num_bytes += _BYTES_PER_REPORTED_TOKEN * len(chunk.token_ids)
        return await self._threads.run(num_bytes, choice.read, chunk)

    def _texts_of(self, model: Model) -> TokenTexts:
        text = self._texts.find(model.tokenizer_digest)
        if text is None:
            return self._no_texts
        digest = text.tokenizer.digest
        if digest not in self._token_texts:
            self._token_texts[digest] = TokenTexts(text.tokenizer)
        return self._token_texts[digest]


async def send_json(send: Send, body: str) -> None:
    """Sends a whole answer."""
    encoded = body.encode()
    headers = [_JSON, (b"content-length", str(len(encoded)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": encoded})


async def _send_part(send: Send, text: str, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})
