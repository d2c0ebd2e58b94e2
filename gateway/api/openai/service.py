"""The endpoints: who asks, the body, the request, the generation, the answer.

Owns this order. What a body asks for is found in `jobs.py`; its answer is written in
`answer_writer.py`; errors of the gateway become answers in `errors.py`.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gateway.api.frontend import Frontend
from gateway.api.openai import document, merged_events
from gateway.api.openai.body import BodyReader, ended_by_disconnect
from gateway.api.openai.errors import ApiError, name_of_code, to_api_error
from gateway.api.openai.jobs import Job, chat_job, completion_job, response_job
from gateway.api.openai.reading import requests, schema
from gateway.api.openai.responses.schema import ResponsesRequest
from gateway.api.openai.writing.answer_writer import AnswerWriter, send_json
from gateway.api.turns import ClientGoneError
from gateway.errors import shutting_down
from gateway.messages.response import Model
from gateway.requests.authenticator import Authenticator
from gateway.requests.principal import Principal
from gateway.text.model_text import ModelText, ModelTexts
from gateway.text.tokenizer_threads import TokenizerThreads
from servicekit.interceptors.access import CallerNotAllowedError, check_names
from servicekit.interceptors.callers import Caller, bearer_token
from servicekit.logs import Logger

# Counted, parsed and made a job in some milliseconds, whatever it holds.
_SHORT_BODY_BYTES = 64 * 1024

_P = ParamSpec("_P")
_R = TypeVar("_R", bound=schema.CommonRequest)


class OpenAiApi:
    """The OpenAI API of one gateway."""

    def __init__(
        self,
        *,
        frontend: Frontend,
        authenticator: Authenticator,
        allowed_clients: Sequence[str],
        texts: ModelTexts,
        threads: TokenizerThreads,
        body_timeout_s: float,
        max_connections: int,
        on_shed: Callable[[str], None],
        logger: Logger,
    ) -> None:
        """Args:
        frontend: runs the requests.
        authenticator: knows the clients.
        allowed_clients: names of certificates that may call; empty: all.
        texts, threads: the frontend's.
        body_timeout_s: how long the body of a request may take.
        max_connections: of the listener.
        on_shed: called with the reason for each request whose body finds no room.
        logger: for errors that callers do not see.
        """
        self._frontend = frontend
        self._authenticator = authenticator
        self._allowed_clients = allowed_clients
        self._texts = texts
        self._threads = threads
        self._writer = AnswerWriter(texts=texts, threads=threads)
        self._bodies = BodyReader(
            timeout_s=body_timeout_s, max_connections=max_connections, on_shed=on_shed
        )
        self._long_bodies = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._logger = logger
        self._created = int(time.time())

    def routes(self) -> Sequence[BaseRoute]:
        """The routes, for Starlette."""
        return [
            Route("/v1/models", _Endpoint(self, self._list_models), methods=["GET"]),
            Route("/v1/models/{model:path}", _Endpoint(self, self._get_model), methods=["GET"]),
            Route("/v1/completions", _Endpoint(self, self._complete), methods=["POST"]),
            Route("/v1/chat/completions", _Endpoint(self, self._chat), methods=["POST"]),
            Route("/v1/responses", _Endpoint(self, self._respond), methods=["POST"]),
            Route("/openapi.json", _Document(), methods=["GET"]),
        ]

    def close(self) -> None:
        """The server shuts down: ends the requests whose bodies are not here yet."""
        self._bodies.close()

    async def answer(self, scope: Scope, receive: Receive, send: Send, run: "_Run") -> None:
        """Runs an endpoint; its errors become the answer if none has begun."""
        began = False
        principal: Principal | None = None

        async def tracked_send(message: Mapping[str, object]) -> None:
            nonlocal began
            began = True
            await send(dict(message))

        try:
            principal = self._principal(scope)
            await run(principal, scope, receive, tracked_send)
        except ClientGoneError:
            await scope["state"]["connection"].cut_off(receive)
        except asyncio.CancelledError:
            # The server stops: a client that is gone or does not read ends its request otherwise.
            if began:
                raise
            await self._to_api_error(shutting_down()).response()(scope, receive, send)
        except Exception as error:
            if principal is None and scope["method"] == "POST":
                self._frontend.count_refused(name_of_code(error))
            api_error = self._to_api_error(error)
            if began:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            await api_error.response()(scope, receive, send)

    def refuse(self, scope: Scope) -> Response | None:
        """The answer to a request of one who is no client; None if it is one."""
        try:
            self._principal(scope)
        except Exception as error:
            return self._to_api_error(error).response()
        return None

    # The endpoints.

    async def _list_models(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        models = [self._model(model) for model in self._frontend.models.list()]
        await send_json(send, json.dumps({"object": "list", "data": models}))

    async def _get_model(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        name = scope["path_params"]["model"]
        models = {model.model_id: model for model in self._frontend.models.list()}
        if (model := models.get(name)) is None:
            raise ApiError(404, f"{name!r} is not served", param="model", code="model_not_found")
        await send_json(send, json.dumps(self._model(model)))

    async def _complete(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        with self._refusals_counted(principal):
            job = await self._completion_job(scope, receive, principal.tenant)
            if job.num_prompts > 1:
                # Admission would refuse the last of them after the first ones have begun, and say
                # when to repeat that.
                self._frontend.check_batch(len(job.choices), principal)
        await self._run(job, principal, scope, receive, send)

    async def _chat(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        with self._refusals_counted(principal):
            job = await self._chat_job(scope, receive, principal.tenant)
        await self._run(job, principal, scope, receive, send)

    async def _respond(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        with self._refusals_counted(principal):
            job = await self._response_job(scope, receive, principal.tenant)
        await self._run(job, principal, scope, receive, send)

    # Not in the endpoints: while an answer is written, nothing keeps its request's body.

    async def _completion_job(self, scope: Scope, receive: Receive, tenant: str) -> Job:
        parsed, num_bytes = await self._parse(schema.CompletionRequest, scope, receive, tenant)
        model = self._frontend.models.find(parsed.model)
        return await self._make(
            num_bytes,
            completion_job,
            parsed,
            text=None if model is None else self._texts.find(model.tokenizer_digest),
            allows_trace=self._frontend.models.allows_trace(model),
        )

    async def _chat_job(self, scope: Scope, receive: Receive, tenant: str) -> Job:
        parsed, num_bytes = await self._parse(schema.ChatCompletionRequest, scope, receive, tenant)
        model = self._frontend.models.find(parsed.model)
        text = self._chat_text(model, param="messages")
        return await self._make(
            num_bytes,
            chat_job,
            parsed,
            is_served=model is not None,
            text=text,
            num_bytes=num_bytes,
            allows_trace=self._frontend.models.allows_trace(model),
        )

    async def _response_job(self, scope: Scope, receive: Receive, tenant: str) -> Job:
        parsed, num_bytes = await self._parse(ResponsesRequest, scope, receive, tenant)
        model = self._frontend.models.find(parsed.model)
        text = self._chat_text(model, param="input")
        return await self._make(
            num_bytes,
            response_job,
            parsed,
            is_served=model is not None,
            text=text,
            num_bytes=num_bytes,
        )

    async def _make(
        self, body_bytes: int, make: Callable[_P, Job], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Job:
        """The job of a parsed body; of a long one, it is made in a thread, since a conversation's
        messages and calls take as long as parsing it, and longer.
        """
        if body_bytes <= _SHORT_BODY_BYTES:
            return make(*args, **kwargs)
        return await self._threads.run(body_bytes, make, *args, **kwargs)

    def _chat_text(self, model: Model | None, *, param: str) -> ModelText | None:
        """The model's tokenizer and chat template, if its tokenizer is known.

        Args:
            param: holds the conversation.

        Raises:
            ApiError: it has no chat template.
        """
        text = None if model is None else self._texts.find(model.tokenizer_digest)
        if model is not None and text is not None and text.chat_template is None:
            raise ApiError(
                400,
                f"the model {model.model_id} has no chat template; /v1/completions takes any "
                "prompt",
                param=param,
                code="no_chat_template",
            )
        return text

    async def _parse(
        self, model: type[_R], scope: Scope, receive: Receive, tenant: str
    ) -> tuple[_R, int]:
        """The request that a body holds, and the body's length."""
        is_gone = scope["state"]["connection"].is_gone
        async with self._bodies.read(scope, receive, tenant) as body:
            if len(body) <= _SHORT_BODY_BYTES:
                await self._frontend.turns.take(is_gone)
                requests.check_size(body)
                return self._on_model(requests.parse(model, body)), len(body)
            # Each step has an iteration of the event loop of its own, and no other long body takes
            # any in between: all that are ready run in one iteration.
            async with self._long_bodies:
                await self._frontend.turns.take(is_gone)
                requests.check_size(body)
                await asyncio.sleep(0)
                parsed = requests.parse(model, body)
                await asyncio.sleep(0)
                await self._frontend.turns.take(is_gone)
                return self._on_model(parsed), len(body)

    def _on_model(self, parsed: _R) -> _R:
        """The request, with the id of a model where it names an alias."""
        model_id = self._frontend.models.choose(
            parsed.model, requests.affinity_key_of(parsed), lambda: requests.beginning_of(parsed)
        )
        return parsed if model_id == parsed.model else parsed.model_copy(update={"model": model_id})

    async def _run(
        self, job: Job, principal: Principal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # Of an error in writing the answer: the streams end with it, and do not know it.
        failed_with = ""

        def to_error(error: Exception) -> ApiError:
            nonlocal failed_with
            failed_with = name_of_code(error)
            return self._to_api_error(error, renamed_params=job.renamed_params)

        streams = [
            self._frontend.generate(
                each,
                principal,
                is_gone=scope["state"]["connection"].is_gone,
                failure=lambda: failed_with,
            )
            for each in job.take_requests()
        ]
        try:
            async with (
                ended_by_disconnect(receive),
                contextlib.aclosing(merged_events.merge(streams, self._starting)) as events,
            ):
                try:
                    if job.is_stream:
                        await self._writer.stream(job, events, send, to_error)
                    else:
                        await self._writer.collect(job, events, send)
                except Exception as error:
                    failed_with = name_of_code(error)
                    raise
        except ClientGoneError:
            raise
        except Exception as error:
            raise to_api_error(error, renamed_params=job.renamed_params) from error

    # Parts of the endpoints.

    @contextlib.contextmanager
    def _refusals_counted(self, principal: Principal) -> Iterator[None]:
        """Around what may refuse a request that the frontend then never sees."""
        try:
            yield
        except ClientGoneError:
            raise
        except Exception as error:
            self._frontend.count_refused(name_of_code(error), principal)
            raise

    def _principal(self, scope: Scope) -> Principal:
        given = [
            value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"
        ]
        caller = Caller(
            certificate_names=scope["state"]["connection"].certificate_names,
            token=bearer_token(given),
        )
        if self._allowed_clients:
            try:
                check_names(caller, self._allowed_clients)
            except CallerNotAllowedError as error:
                raise ApiError(403, error.message, code="not_allowed") from None
        return self._authenticator.authenticate(caller)

    def _model(self, model: Model) -> Mapping[str, object]:
        return {
            "id": model.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "max_model_len": model.max_model_len,
            "sampling_defaults": dataclasses.asdict(self._frontend.models.sampling_defaults(model)),
            **({"alias_of": list(model.alias_of)} if model.alias_of else {}),
        }

    def _to_api_error(
        self, error: Exception, *, renamed_params: Mapping[str, str] | None = None
    ) -> ApiError:
        api_error = to_api_error(error, renamed_params=renamed_params)
        if api_error.status == 500:
            self._logger.error("http_request_failed", exc_info=error)
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
        await send_json(send, document.openapi_json())
