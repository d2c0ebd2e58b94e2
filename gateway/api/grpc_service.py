"""GenerationService: the gRPC API.

Owns nothing: converts messages to requests, and events to messages. Errors pass through; the
server's interceptor turns them into statuses with `errors.ERROR_TABLE`.
"""

import asyncio
import contextlib
import dataclasses
import math

import grpc

from gateway.api import wire
from gateway.api.frontend import Frontend
from gateway.errors import code_name
from gateway.messages.request import GenerateRequest
from gateway.requests.authenticator import Authenticator
from gateway.routing.aliases import beginning_of_tokens
from servicekit.interceptors.base import metadata_value, time_left_s
from servicekit.interceptors.callers import caller_of
from servicekit.serving.client_waits import ClientWaits
from servicekit.telemetry.trace_context import TRACE_PARENT_KEY, bind_trace_parent
from tandem.v1 import gateway_pb2, gateway_pb2_grpc

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

_GenerateContext = grpc.aio.ServicerContext[
    gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse
]
_ListModelsContext = grpc.aio.ServicerContext[
    gateway_pb2.ListModelsRequest, gateway_pb2.ListModelsResponse
]

_LoadPoolContext = grpc.aio.ServicerContext[
    gateway_pb2.LoadPoolRequest, gateway_pb2.LoadPoolResponse
]


class GenerationServicer(gateway_pb2_grpc.GenerationServiceServicer):
    """The RPCs of gateway.proto."""

    def __init__(
        self, frontend: Frontend, client_waits: ClientWaits, authenticator: Authenticator
    ) -> None:
        self._frontend = frontend
        self._authenticator = authenticator
        self._client_waits = client_waits

    # Not a generator: it writes its responses itself, to know how long each waits.
    async def Generate(  # type: ignore[override]
        self, request: gateway_pb2.GenerateRequest, context: _GenerateContext
    ) -> None:
        """One request; see the proto."""
        principal = self._authenticator.authenticate(caller_of(context))
        bind_trace_parent(metadata_value(context, TRACE_PARENT_KEY))
        failed_with = ""
        events = self._frontend.generate(
            self._on_model(wire.generate_request_from_proto(request)),
            principal,
            expires_at_s=_expires_at_s(context),
            failure=lambda: failed_with,
        )
        # If the client goes away or stops reading, everything the request holds is freed at once.
        async with self._client_waits.open() as call, contextlib.aclosing(events):
            async for event in events:
                try:
                    message = wire.event_to_proto(event)
                except Exception as error:
                    failed_with = code_name(error)
                    raise
                call.begin_write()
                await context.write(message)
                call.go_on()

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: _ListModelsContext
    ) -> gateway_pb2.ListModelsResponse:
        """The models that are served."""
        models = self._frontend.models.list()
        return wire.models_to_proto(
            (
                model,
                self._frontend.models.sampling_defaults(model),
                self._frontend.models.speculation_note(model),
            )
            for model in models
        )

    async def LoadPool(
        self, request: gateway_pb2.LoadPoolRequest, context: _LoadPoolContext
    ) -> gateway_pb2.LoadPoolResponse:
        """Puts a text into a pool; see the proto."""
        principal = self._authenticator.authenticate(caller_of(context))
        num_tokens = await self._frontend.load_pool(
            self._on_model(wire.load_request_from_proto(request)), principal
        )
        return gateway_pb2.LoadPoolResponse(num_tokens=num_tokens)

    def _on_model(self, request: GenerateRequest) -> GenerateRequest:
        """The request, with the id of a model where it names an alias."""
        model_id = self._frontend.models.choose(
            request.model_id,
            request.affinity_key,
            lambda: request.text or beginning_of_tokens(request.prompt_token_ids or ()),
            expected_digest=request.expected_model_digest,
        )
        if model_id == request.model_id:
            return request
        return dataclasses.replace(request, model_id=model_id)


def _expires_at_s(context: _GenerateContext) -> float:
    """From when on the call's end is due to its deadline, by the event loop's clock."""
    left_s = time_left_s(context)
    return math.inf if left_s is None else asyncio.get_running_loop().time() + left_s
