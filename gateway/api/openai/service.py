"""The endpoints: one request from its head to the last byte of its answer.

Owns the order: who asks, the body, the prompt, the generation, the answer. The status of an answer
waits until a verifier has accepted the request and its first text is there; an error after that
comes as an event of the stream. Errors of the gateway become answers in `errors.py`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gateway.api.frontend import Frontend
from gateway.api.openai import chat, document, merged_events, requests, schema
from gateway.api.openai.answers import DONE, ChatForm, CompletionForm, Envelope, Form, Part
from gateway.api.openai.answers import error_event as to_error_event
from gateway.api.openai.body import BodyReader, ClientGoneError, ended_by_disconnect
from gateway.api.openai.choices import ChatChoice, Choice, CompletionChoice
from gateway.api.openai.errors import ApiError, to_api_error
from gateway.api.openai.report import SpeculationReport
from gateway.api.openai.tokens import TextOffsets, TokenTexts
from gateway.api.openai.usage import UsageTotal
from gateway.messages.request import GenerateRequest
from gateway.messages.response import Chunk, Finished, GenerateEvent, Model, Started, Traced
from gateway.requests.acceptance import MAX_PROMPT_LOGPROBS
from gateway.requests.authenticator import Authenticator
from gateway.requests.principal import Principal
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer, TooManyTokensError
from servicekit import logs
from servicekit.interceptors.access import Caller, CallerNotAllowedError, check_names
from servicekit.logs import Logger

# What an answer that is not streamed may hold: it stays in memory to its end.
_MAX_ANSWER_BYTES = 32 << 20

# More is formatted in a thread.
_MAX_INLINE_LOGPROBS = 256
_MAX_INLINE_BYTES = 16 << 10

_JSON = (b"content-type", b"application/json")
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold chunks back.
    (b"x-accel-buffering", b"no"),
]

_Events = AsyncGenerator[tuple[int, GenerateEvent], None]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One request, ready to run.

    Attributes:
        generate: one per prompt.
        choices: all choices of the first prompt, then those of the next.
        is_stream, includes_usage: the form of the answer.
        reports: one per choice, if each chunk says how its drafts fared.
    """

    form: Form
    model: str
    generate: Sequence[GenerateRequest]
    choices: Sequence[Choice]
    is_stream: bool
    includes_usage: bool
    reports: Sequence[SpeculationReport]

    def index_of(self, prompt_index: int, choice_index: int) -> int:
        """A choice's index in the answer."""
        return prompt_index * (len(self.choices) // len(self.generate)) + choice_index


class OpenAiApi:
    """The OpenAI API of one gateway."""

    def __init__(
        self,
        *,
        frontend: Frontend,
        authenticator: Authenticator,
        allowed_clients: Sequence[str],
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        body_timeout_s: float,
        logger: Logger,
    ) -> None:
        """Args:
        frontend: runs the requests.
        authenticator: knows the clients.
        allowed_clients: names of certificates that may call; empty: all.
        tokenizer: the frontend's.
        chat_template: of the tokenizer's model; None: chat completions are refused.
        body_timeout_s: how long the body of a request may take.
        logger: for errors that callers do not see.
        """
        self._frontend = frontend
        self._authenticator = authenticator
        self._allowed_clients = allowed_clients
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._bodies = BodyReader(timeout_s=body_timeout_s)
        self._logger = logger
        self._texts = TokenTexts(tokenizer)
        self._no_texts = TokenTexts(None)
        self._created = int(time.time())

    def routes(self) -> Sequence[BaseRoute]:
        """The routes, for Starlette."""
        return [
            Route("/v1/models", _Endpoint(self, self._list_models), methods=["GET"]),
            Route("/v1/models/{model:path}", _Endpoint(self, self._get_model), methods=["GET"]),
            Route("/v1/completions", _Endpoint(self, self._complete), methods=["POST"]),
            Route("/v1/chat/completions", _Endpoint(self, self._chat), methods=["POST"]),
            Route("/openapi.json", _Document(), methods=["GET"]),
        ]

    async def answer(self, scope: Scope, receive: Receive, send: Send, run: "_Run") -> None:
        """Runs an endpoint; its errors become the answer if none has begun."""
        began = False

        async def tracked_send(message: Mapping[str, object]) -> None:
            nonlocal began
            began = True
            await send(dict(message))

        try:
            principal = self._principal(scope)
            await run(principal, scope, receive, tracked_send)
        except ClientGoneError:
            return
        except Exception as error:
            api_error = self._to_api_error(error, scope)
            if began:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            await api_error.response()(scope, receive, send)

    # The endpoints.

    async def _list_models(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        models = [self._model(model) for model in self._frontend.list_models()]
        await _send_json(send, json.dumps({"object": "list", "data": models}))

    async def _get_model(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        name = scope["path_params"]["model"]
        for model in self._frontend.list_models():
            if model.model_id == name:
                await _send_json(send, json.dumps(self._model(model)))
                return
        raise ApiError(404, f"{name!r} is not served", param="model", code="model_not_found")

    async def _complete(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = await self._bodies.read(scope, receive)
        parsed = requests.parse(schema.CompletionRequest, body)
        if parsed.echo and parsed.logprobs is not None and (parsed.n or 1) > 1:
            raise ApiError(
                400,
                "echo with logprobs is not supported with n > 1",
                param="n",
                code="unsupported_parameter",
            )
        wants_report = requests.wants_report(parsed)
        prompts = requests.prompts_of(parsed)
        tokenizer = self._tokenizer_of(parsed.model)
        if parsed.logprobs is not None and tokenizer is not None:
            encoded = []
            for prompt in prompts:
                encoded.append(await _encode(tokenizer, prompt))
                # Many short ones together would block the event loop.
                await asyncio.sleep(0)
            prompts = encoded
        job = _Job(
            form=CompletionForm(),
            model=parsed.model,
            generate=requests.completion_requests(
                parsed, prompts, trace=wants_report and self._frontend.allows_trace
            ),
            choices=[
                choice
                for prompt in zip(requests.prompts_of(parsed), prompts, strict=True)
                for choice in await self._completion_choices(parsed, tokenizer, *prompt)
            ],
            is_stream=bool(parsed.stream),
            includes_usage=_includes_usage(parsed),
            reports=[
                _report(tokenizer, prompt)
                for prompt in prompts
                for _ in range(parsed.n or 1)
                if wants_report
            ],
        )
        await self._run(job, principal, receive, send)

    async def _chat(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._bodies.read(scope, receive)
        parsed = requests.parse(schema.ChatCompletionRequest, body)
        template = self._chat_template
        if template is None:
            raise ApiError(
                400,
                f"the model {parsed.model} has no chat template; /v1/completions takes any prompt",
                param="messages",
                code="no_chat_template",
            )
        render = functools.partial(chat.render, parsed, template)
        prompt = await _call(render, in_thread=len(body) > _MAX_INLINE_BYTES)
        wants_token_ids, wants_report = (
            bool(parsed.return_token_ids),
            requests.wants_report(parsed),
        )
        tokenizer = self._tokenizer_of(parsed.model)
        choice = ChatChoice(
            self._texts, wants_logprobs=bool(parsed.logprobs), wants_token_ids=wants_token_ids
        )
        job = _Job(
            form=ChatForm(),
            model=parsed.model,
            generate=[
                requests.chat_request(
                    parsed, prompt, trace=wants_report and self._frontend.allows_trace
                )
            ],
            choices=[choice] * (parsed.n or 1),
            is_stream=bool(parsed.stream),
            includes_usage=_includes_usage(parsed),
            reports=[_report(tokenizer, prompt) for _ in range(parsed.n or 1) if wants_report],
        )
        try:
            await self._run(job, principal, receive, send)
        except Exception as error:
            raise to_api_error(error, prompt_param="messages") from error

    # One generation.

    async def _run(self, job: _Job, principal: Principal, receive: Receive, send: Send) -> None:
        envelope = Envelope(
            job.form,
            request_id=logs.request_id(),
            model=job.model,
            is_stream=job.is_stream,
            includes_usage=job.includes_usage,
        )
        streams = [self._frontend.generate(request, principal) for request in job.generate]
        async with (
            ended_by_disconnect(receive),
            contextlib.aclosing(merged_events.merge(streams)) as events,
        ):
            if job.is_stream:
                await self._stream(job, envelope, events, send)
            else:
                await self._collect(job, envelope, events, send)

    async def _stream(self, job: _Job, envelope: Envelope, events: _Events, send: Send) -> None:
        form, usage = job.form, UsageTotal()
        num_starting = len(job.generate)
        # What waits for the status.
        held: list[str] | None = [
            envelope.chunk(first)
            for index in range(len(job.choices))
            if (first := form.first(index))
        ]
        try:
            async for prompt_index, event in events:
                if isinstance(event, Chunk):
                    index = job.index_of(prompt_index, event.choice_index)
                    part = await _read(job.choices[index], event)
                    report = job.reports[index].read(event) if job.reports else ""
                    if not (part.text or part.logprobs or part.token_ids or report):
                        continue
                    message = envelope.chunk(form.delta(index, part), report)
                elif isinstance(event, Finished):
                    index = job.index_of(prompt_index, event.choice_index)
                    usage.add(prompt_index, event.usage)
                    message = envelope.chunk(form.last(index, event.finish_reason))
                else:
                    if isinstance(event, Traced):
                        index = job.index_of(prompt_index, event.choice_index)
                        job.reports[index].add_trace(event.step)
                    num_starting -= isinstance(event, Started)
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
            # The status is sent: the official client raises what this event says.
            api_error = self._to_api_error(error, None)
            await _send_part(send, to_error_event(api_error.body()), is_last=True)
            return
        end = envelope.usage_chunk(usage.to_json()) if job.includes_usage else ""
        await _send_part(send, end + DONE, is_last=True)

    async def _collect(self, job: _Job, envelope: Envelope, events: _Events, send: Send) -> None:
        usage = UsageTotal()
        parts: list[list[Part]] = [[] for _ in job.choices]
        whole = [""] * len(job.choices)
        num_bytes = 0
        async for prompt_index, event in events:
            if isinstance(event, Chunk):
                index = job.index_of(prompt_index, event.choice_index)
                part = await _read(job.choices[index], event)
                parts[index].append(part)
                num_bytes += _num_bytes(part)
                if num_bytes > _MAX_ANSWER_BYTES:
                    raise ApiError(
                        400,
                        f"the answer is over {_MAX_ANSWER_BYTES} bytes; stream it",
                        param="stream",
                        code="answer_too_large",
                    )
            elif isinstance(event, Finished):
                index = job.index_of(prompt_index, event.choice_index)
                usage.add(prompt_index, event.usage)
                whole[index] = job.form.whole(index, _join(parts[index]), event.finish_reason)
        await _send_json(send, envelope.whole(whole, usage.to_json()))

    # Parts of the endpoints.

    def _principal(self, scope: Scope) -> Principal:
        caller = Caller(
            certificate_names=scope["state"]["connection"].certificate_names, token=_token(scope)
        )
        if self._allowed_clients:
            try:
                check_names(caller, self._allowed_clients)
            except CallerNotAllowedError as error:
                raise ApiError(403, error.message, code="not_allowed") from None
        return self._authenticator.authenticate(
            token=caller.token, certificate_names=caller.certificate_names
        )

    def _model(self, model: Model) -> Mapping[str, object]:
        return {
            "id": model.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "max_model_len": model.max_model_len,
        }

    def _tokenizer_of(self, model_id: str) -> Tokenizer | None:
        """The tokenizer, if it is that of the model."""
        tokenizer = self._tokenizer
        for model in self._frontend.list_models():
            if model.model_id == model_id and tokenizer is not None:
                return tokenizer if model.tokenizer_digest in ("", tokenizer.digest) else None
        return None

    async def _completion_choices(
        self,
        parsed: schema.CompletionRequest,
        tokenizer: Tokenizer | None,
        given: str | Sequence[int],
        prompt: str | Sequence[int],
    ) -> list[CompletionChoice]:
        """The choices of one prompt, which was given as text or tokens."""
        echo = ""
        if parsed.echo and isinstance(given, str):
            echo = given
        elif parsed.echo and tokenizer is not None and not isinstance(prompt, str):
            echo = await asyncio.to_thread(tokenizer.decode, prompt)
        choices = []
        for _ in range(parsed.n or 1):
            offsets = None
            if parsed.logprobs is not None:
                context = () if parsed.echo or isinstance(prompt, str) else prompt
                offsets = TextOffsets(None if tokenizer is None else tokenizer.detokenizer(context))
            choices.append(
                CompletionChoice(
                    self._no_texts if tokenizer is None else self._texts,
                    echo=echo,
                    echoes_special=isinstance(given, str),
                    prompt_token_ids=() if isinstance(prompt, str) else prompt,
                    offsets=offsets,
                    wants_token_ids=bool(parsed.return_token_ids),
                )
            )
        return choices

    def _to_api_error(self, error: Exception, scope: Scope | None) -> ApiError:
        api_error = to_api_error(error)
        if api_error.status == 500:
            path = None if scope is None else scope["path"]
            self._logger.error("http_request_failed", path=path, exc_info=error)
        return api_error


_Run = Callable[[Principal, Scope, Receive, Send], Awaitable[None]]


class _Endpoint:
    """One endpoint; an ASGI application."""

    def __init__(self, api: OpenAiApi, run: _Run) -> None:
        self._api = api
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api.answer(scope, receive, send, self._run)


class _Document:
    """`/openapi.json`; an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, document.openapi_json())


def _report(tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> SpeculationReport:
    context = () if isinstance(prompt, str) else prompt
    return SpeculationReport(None if tokenizer is None else tokenizer.detokenizer(context))


def _token(scope: Scope) -> str | None:
    """The bearer token of a request; as gRPC reads it (`servicekit.interceptors.access`)."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        return None
    scheme, _, token = given[0].decode("latin-1").partition(" ")
    return token.strip() if len(given) == 1 and scheme.lower() == "bearer" else ""


def _includes_usage(parsed: schema.CompletionRequest | schema.ChatCompletionRequest) -> bool:
    options = parsed.stream_options
    if options is not None and not parsed.stream:
        raise ApiError(
            400,
            "stream_options needs stream: true",
            param="stream_options",
            code="invalid_value",
        )
    return options is not None and bool(options.include_usage)


async def _encode(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> Sequence[int] | str:
    """The prompt's tokens: the logprobs of a prompt are shown with the tokens' texts."""
    if not isinstance(prompt, str) or not prompt:
        return prompt
    encode = functools.partial(tokenizer.encode, prompt, max_tokens=MAX_PROMPT_LOGPROBS)
    try:
        return await _call(encode, in_thread=len(prompt) > _MAX_INLINE_BYTES)
    except TooManyTokensError as error:
        raise ApiError(
            400,
            f"the prompt of {error.num_tokens} tokens is too long for logprobs",
            param="prompt",
            code="invalid_value",
        ) from None


async def _read(choice: Choice, chunk: Chunk) -> Part:
    num_logprobs = len(chunk.logprobs) + len(chunk.prompt_logprobs)
    if num_logprobs <= _MAX_INLINE_LOGPROBS:
        return choice.read(chunk)
    return await asyncio.to_thread(choice.read, chunk)


def _num_bytes(part: Part) -> int:
    logprobs = part.logprobs or ()
    return len(part.text) + sum(
        len(each) if isinstance(each, str) else sum(map(len, each)) for each in logprobs
    )


def _join(parts: Sequence[Part]) -> Part:
    first = parts[0] if parts else Part("", None, None)
    return Part(
        "".join([part.text for part in parts]),
        None
        if first.logprobs is None
        else [each for part in parts for each in part.logprobs or ()],
        None
        if first.token_ids is None
        else [id_ for part in parts for id_ in part.token_ids or ()],
    )


async def _call(function: Callable[[], _T], *, in_thread: bool) -> _T:
    return await asyncio.to_thread(function) if in_thread else function()


async def _send_json(send: Send, body: str) -> None:
    encoded = body.encode()
    headers = [_JSON, (b"content-length", str(len(encoded)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": encoded})


async def _send_part(send: Send, text: str, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})
