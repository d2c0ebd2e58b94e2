"""The servers that can be put under load: a gateway's gRPC, and any server of the OpenAI API.

Each fills an `Answer` while it reads a stream. A request that fails is an answer with an error.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from tandem.client import (
    AsyncTandemClient,
    Chunk,
    Finished,
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
    TandemError,
)
from tandem.load.answer import Answer
from tandem.load.workloads import Prompt

if TYPE_CHECKING:
    import openai

_MAX_COUNT = (1 << 63) - 1


class Endpoint(Protocol):
    """A server that answers prompts."""

    async def answer(self, prompt: Prompt, *, speculates: bool, arrived_at_s: float) -> Answer:
        """Sends one request and reads its stream to the end.

        Args:
            arrived_at_s: when its user wanted it, by `time.perf_counter`; it may have waited since.
        """
        ...


class GrpcEndpoint:
    """A gateway's gRPC. The client must not retry, so that each failure counts.

    Args:
        timeout_s: of each request.
    """

    def __init__(self, client: AsyncTandemClient, *, model_id: str, timeout_s: float) -> None:
        self._client = client
        self._model_id = model_id
        self._timeout_s = timeout_s

    async def answer(self, prompt: Prompt, *, speculates: bool, arrived_at_s: float) -> Answer:
        answer = Answer()
        request = GenerationRequest(
            prompt=prompt.prompt,
            model_id=self._model_id,
            max_new_tokens=prompt.max_new_tokens,
            sampling=SamplingParams(temperature=prompt.temperature),
            speculation=SpeculationParams(enabled=None if speculates else False),
        )
        try:
            stream = self._client.stream(request, timeout_s=self._timeout_s)
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        answer.received_at_s.append(time.perf_counter() - arrived_at_s)
                        answer.output_tokens += len(event.token_ids)
                    elif isinstance(event, Finished):
                        answer.usage = event.usage
                        answer.num_drafts = event.usage.num_drafts
                        answer.num_draft_tokens = event.usage.num_draft_tokens
                        answer.num_accepted_tokens = event.usage.num_accepted_tokens
        except TandemError as error:
            answer.error = f"{error.code.name}: {error}"
        return answer


class OpenAiEndpoint:
    """A server of the OpenAI API. The client must not retry.

    Acceptance is known of servers that tell it as Tandem does, in `usage.speculation`.

    Args:
        timeout_s: of each request.
        is_chat: whether prompts go as a user's message to `/chat/completions`, and must be texts;
            else as they are to `/completions`.
    """

    def __init__(
        self,
        client: "openai.AsyncOpenAI",
        *,
        model_id: str,
        timeout_s: float,
        is_chat: bool,
    ) -> None:
        self._client = client
        self._is_chat = is_chat
        self._model_id = model_id
        self._timeout_s = timeout_s

    async def answer(self, prompt: Prompt, *, speculates: bool, arrived_at_s: float) -> Answer:
        import openai

        # Until something says that the answer is whole: the library ends a stream that is cut off
        # like one that is not.
        answer = Answer(error="the answer broke off")
        try:
            async with asyncio.timeout(self._timeout_s), self._stream(prompt, speculates) as stream:
                async for chunk in stream:
                    if chunk.choices and self._has_output(chunk.choices[0]):
                        answer.received_at_s.append(time.perf_counter() - arrived_at_s)
                    if chunk.choices and chunk.choices[0].finish_reason is not None:
                        answer.error = None
                    if chunk.usage is not None:
                        _read_usage(answer, chunk.usage)
        except TimeoutError:
            answer.error = f"no end within {self._timeout_s:g} s"
        except openai.APIStatusError as error:
            answer.error = f"HTTP {error.status_code}: {' '.join(error.message.split())}"
        # Any server may be at the other end, and the library wraps few of the ways to break a
        # stream. Each is a failed request, none ends the others.
        except Exception as error:
            answer.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return answer

    @contextlib.asynccontextmanager
    async def _stream(self, prompt: Prompt, speculates: bool) -> AsyncIterator[AsyncIterator[Any]]:
        given: Any = prompt.prompt if isinstance(prompt.prompt, str) else list(prompt.prompt)
        options: Any = {
            "model": self._model_id,
            "max_tokens": prompt.max_new_tokens,
            "temperature": prompt.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            # An extension of Tandem's; other servers see it only when drafts shall be off.
            "extra_body": None if speculates else {"speculation": {"enabled": False}},
        }
        stream: Any
        if self._is_chat:
            messages: Any = [{"role": "user", "content": given}]
            stream = await self._client.chat.completions.create(messages=messages, **options)
        else:
            stream = await self._client.completions.create(prompt=given, **options)
        async with stream:
            yield stream

    def _has_output(self, choice: Any) -> bool:
        if not self._is_chat:
            return bool(choice.text)
        # Many servers show what a model thinks apart from what it answers, as an extension.
        delta = choice.delta
        extension = delta.model_extra or {}
        thought = extension.get("reasoning_content") or extension.get("reasoning")
        return bool(delta.content or delta.tool_calls or thought)


def _read_usage(answer: Answer, usage: Any) -> None:
    answer.output_tokens = _count(usage.completion_tokens)
    speculation = (usage.model_extra or {}).get("speculation")
    if isinstance(speculation, dict):
        answer.num_drafts = _count(speculation.get("num_drafts"))
        answer.num_draft_tokens = _count(speculation.get("num_draft_tokens"))
        answer.num_accepted_tokens = _count(speculation.get("num_accepted_tokens"))


def _count(value: object) -> int:
    """What a server tells as a count; 0 if it is none, or none that can be divided as a float."""
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else 0
