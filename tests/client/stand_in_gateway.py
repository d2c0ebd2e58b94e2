"""A stand-in for the gateway: a grpc.aio server on loopback that streams what a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.v1 import gateway_pb2, gateway_pb2_grpc, sampling_pb2

Context = grpc.aio.ServicerContext[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse]
Failure = Callable[[Context], Awaitable[None]]


class StandInGateway(gateway_pb2_grpc.GenerationServiceServicer):
    """Streams `script`, then fails as `failure` says, or waits forever with `hang`.

    A request that has output already gets the script without it. Each of `interruptions` ends one
    call, after so many responses.
    """

    def __init__(self) -> None:
        self.script: list[gateway_pb2.GenerateResponse] = rename_script()
        self.failure: Failure | None = None
        self.interruptions: list[tuple[int, Failure]] = []
        self.hang = False
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.loaded: list[gateway_pb2.LoadPoolRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cancelled = asyncio.Event()
        self.address = ""
        self.server = grpc.aio.server()

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        has_output = len(request.output_token_ids)
        script = [
            response
            for response in self.script
            if not response.HasField("chunk") or response.chunk.offset >= has_output
        ]
        try:
            if self.interruptions:
                num_responses, interrupt = self.interruptions.pop(0)
                for response in script[:num_responses]:
                    yield response
                await interrupt(context)
            for response in script:
                yield response
            if self.hang:
                await asyncio.Event().wait()
            if self.failure is not None:
                await self.failure(context)
        except (asyncio.CancelledError, GeneratorExit):
            # grpc.aio cancels a handler that waits, and closes one that is about to write.
            self.cancelled.set()
            raise

    async def LoadPool(
        self, request: gateway_pb2.LoadPoolRequest, context: Context
    ) -> gateway_pb2.LoadPoolResponse:
        self.loaded.append(request)
        return gateway_pb2.LoadPoolResponse(num_tokens=len(request.text))

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if self.interruptions:
            await self.interruptions.pop(0)[1](context)
        if self.hang:
            await asyncio.Event().wait()
        return gateway_pb2.ListModelsResponse(
            models=[gateway_pb2.Model(model_id="demo", vocab_size=2048, num_verifiers=2)]
        )


@contextlib.asynccontextmanager
async def stand_in_gateway() -> AsyncIterator[StandInGateway]:
    servicer = StandInGateway()
    server = servicer.server
    gateway_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)


def rename_script() -> list[gateway_pb2.GenerateResponse]:
    """Two steps, the second with three drafts of which two were accepted."""
    return [
        gateway_pb2.GenerateResponse(
            started=gateway_pb2.Started(request_id="r-1", seed=2**64 - 1, num_prompt_tokens=4)
        ),
        gateway_pb2.GenerateResponse(
            chunk=gateway_pb2.Chunk(offset=0, token_ids=[7], text="né", num_steps=1)
        ),
        gateway_pb2.GenerateResponse(
            chunk=gateway_pb2.Chunk(
                offset=1,
                token_ids=[8, 9, 10],
                text="w\nname",
                num_draft_tokens=3,
                num_accepted_tokens=2,
                num_steps=1,
            )
        ),
        gateway_pb2.GenerateResponse(
            finished=gateway_pb2.Finished(
                finish_reason=sampling_pb2.FINISH_REASON_STOP,
                usage=gateway_pb2.Usage(
                    prompt_tokens=4,
                    output_tokens=4,
                    num_steps=2,
                    num_drafts=1,
                    num_draft_tokens=3,
                    num_accepted_tokens=2,
                    accepted_per_position=[1, 1, 0],
                    by_match_length=[
                        gateway_pb2.MatchAcceptance(
                            matched_ngram_length=2,
                            num_drafts=1,
                            num_draft_tokens=3,
                            num_accepted_tokens=2,
                        )
                    ],
                    num_sequence_drafts=1,
                ),
            )
        ),
    ]


def refusal(code: grpc.StatusCode, message: str, *, field: str = "", retry_ms: int = 0) -> Failure:
    """A failure with the details that a gateway attaches."""

    async def fail(context: Context) -> None:
        status = status_pb2.Status(code=code.value[0], message=message)
        if field:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=field, description=message
            )
            status.details.append(
                _packed(error_details_pb2.BadRequest(field_violations=[violation]))
            )
        if retry_ms:
            delay = duration_pb2.Duration()
            delay.seconds, rest_ms = divmod(retry_ms, 1000)  # also what no Duration may be
            delay.nanos = 1_000_000 * rest_ms
            status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        await context.abort_with_status(rpc_status.to_status(status))

    return fail


def _packed(detail: error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
