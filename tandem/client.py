"""The clients of a Tandem gateway: `TandemClient` blocks, `AsyncTandemClient` is for asyncio.

    from tandem.client import Chunk, GenerationRequest, TandemClient

    # The bundled model renames an identifier: this prints "bill = price + tax", twice.
    prompt = "<|code|>total = price + tax<|rename|>total<|to|>bill<|out|>"
    request = GenerationRequest(prompt=prompt)
    with TandemClient("127.0.0.1:50050") as client:
        print(client.generate(request).text)
        for event in client.stream(request):
            if isinstance(event, Chunk):
                print(event.text, end="", flush=True)

With asyncio:

    import asyncio
    import contextlib

    from tandem.client import AsyncTandemClient, Chunk, GenerationRequest


    async def main() -> None:
        request = GenerationRequest(prompt="import os", max_new_tokens=16)
        async with AsyncTandemClient("127.0.0.1:50050") as client:
            async with contextlib.aclosing(client.stream(request)) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        print(event.text, end="", flush=True)


    asyncio.run(main())

`DrafterClient` and `AsyncDrafterClient` call a drafter without a gateway, for engines that verify
drafts by themselves.

Everything that a caller needs is importable from here. A failed call raises `TandemError` and
nothing else. A stream that is left early (its iterator is closed, an exception, a task's
cancellation) cancels its call, and the servers free its resources within one step of the model.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Self, TypeVar

import grpc

from tandem import wire
from tandem.async_client import AsyncTandemClient
from tandem.continuation import Continuation
from tandem.drafts.drafter_client import AsyncDrafterClient, DrafterClient
from tandem.drafts.drafting import Draft, DraftedSequence, DrafterLoad, DraftQuery
from tandem.generation import (
    Choice,
    Chunk,
    Event,
    EventCollector,
    Finished,
    Generation,
    GenerationRequest,
    Model,
    ReportedToken,
    Started,
    TandemError,
    Traced,
)
from tandem.transport.channel import (
    TlsOptions,
    may_have_several,
    open_channel,
    parse_targets,
    token_metadata,
)
from tandem.transport.retry import Attempts, Failover, RetryPolicy
from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tandem.values import (
    DraftSource,
    FinishReason,
    Keep,
    MatchAcceptance,
    NgramParams,
    ProposalTrace,
    SamplingDefaults,
    SamplingParams,
    SpeculationParams,
    StepTrace,
    StructuredOutput,
    TokenLogprob,
    UndraftedSteps,
    Usage,
)

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")

__all__ = [
    "AsyncDrafterClient",
    "AsyncTandemClient",
    "Choice",
    "Chunk",
    "Draft",
    "DraftQuery",
    "DraftSource",
    "DraftedSequence",
    "DrafterClient",
    "DrafterLoad",
    "Event",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationRequest",
    "Keep",
    "MatchAcceptance",
    "Model",
    "NgramParams",
    "ProposalTrace",
    "ReportedToken",
    "RetryPolicy",
    "SamplingDefaults",
    "SamplingParams",
    "SpeculationParams",
    "Started",
    "StepTrace",
    "StructuredOutput",
    "TandemClient",
    "TandemError",
    "TlsOptions",
    "TokenLogprob",
    "Traced",
    "UndraftedSteps",
    "Usage",
]


class TandemClient:
    """Blocking client; may be shared between threads.

    Args:
        targets: where the gateways' gRPC is: HOST:PORT, several of them (a sequence, or separated
            by commas), or any gRPC name. Calls go to all addresses in turn; those that fail are
            left out for a while.
        tls: None speaks plaintext.
        token: sent with every call, as `authorization: Bearer TOKEN`.
        allow_plaintext_token: sends it without TLS beyond this machine, too.
        retry: how requests get over failures; None raises each failure at once.

    A gateway that vanishes while a call is open is noticed within 2 s if there may be another one
    (several targets, or a name), else within 15 s. A link that is so slow looks the same: the call
    is then repeated or resumed, and goes on until there is no sign of life for 15 s.

    Raises:
        ValueError: an argument cannot be used.
        OSError: a file of `tls` cannot be read.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        tls: TlsOptions | None = None,
        token: str | None = None,
        allow_plaintext_token: bool = False,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008 - immutable
    ) -> None:
        targets = parse_targets(targets)
        self._metadata = token_metadata(token, targets, tls, allow_plaintext=allow_plaintext_token)
        resumes = retry is not None and may_have_several(targets)
        # First those with the short keepalive, if any; last, for each target, one with the long
        # keepalive (`Attempts.is_patient`).
        self._channels = [
            open_channel(target, tls, round_robin=True, resumes=is_short)
            for is_short in ((True, False) if resumes else (False,))
            for target in targets
        ]
        self._stubs = [
            gateway_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels
        ]
        self._num_targets = len(targets)
        self._failover = Failover(len(targets), retry)
        self._closed = threading.Event()

    def stream(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> Generator[Event, None, None]:
        """Yields one Started, then Chunks, then one Finished per choice.

        After a failure, as far as `retry` allows, the stream goes on through another gateway: each
        token comes once and in order. The output is what it would have been without the failure
        where it is greedy or sampled by seed (which `Started` tells) and the verifiers have equal
        numerics; otherwise it goes on as the model may. Another model does not go on with it, nor
        with logprobs of its prompt (FAILED_PRECONDITION); before there is either, another model may
        begin again, which a further Started tells. Several choices are resumed one after the other.
        `Traced` events tell the steps of all calls, and usage what is known of them: a call that
        failed does not tell the match lengths and sources of its drafts.

        Raises:
            TandemError: the request failed; events yielded before stay valid.
        """
        continuation = Continuation(request)
        attempts = self._failover.begin(timeout_s)
        while (wanted := continuation.next_call()) is not None:
            try:
                call = self._next_stub(attempts).Generate(
                    wire.to_request(wanted), timeout=attempts.time_left_s, metadata=self._metadata
                )
            except ValueError as error:
                # Closed by another thread meanwhile: gRPC says so in its own way.
                if self._closed.is_set():
                    raise wire.closed_error() from error
                raise
            try:
                for response in call:
                    if (event := wire.to_event(response)) is None:
                        continue
                    if not isinstance(event, Started):
                        attempts.bring_output()
                    if (shown := continuation.receive(event)) is not None:
                        yield shown
                continuation.end()
                attempts.succeed()
            except grpc.RpcError as error:
                failure = wire.to_error(error)
                pause_s = attempts.fail(failure)
                if pause_s is None:
                    raise failure from error
                yield from continuation.interrupt()
                if self._closed.wait(pause_s):
                    raise wire.closed_error() from error
            finally:
                call.cancel()

    def generate(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Generation:
        """Returns the whole result at once.

        Raises:
            TandemError: the request failed.
        """
        collector = EventCollector()
        for event in self.stream(request, timeout_s=timeout_s):
            collector.add(event)
        return collector.generation()

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Returns the models that the gateway serves.

        Raises:
            TandemError: the call failed.
        """
        request = gateway_pb2.ListModelsRequest()
        return wire.to_models(self._call(lambda stub: stub.ListModels, request, timeout_s))

    def load_pool(
        self, pool: str, text: str, *, model_id: str = "", timeout_s: float | None = None
    ) -> int:
        """Puts a text into a pool of the caller's tenant; returns how many tokens it has.

        Requests that name the pool (`SpeculationParams.pool`) draft from it soon after.

        Args:
            pool: its name.
            text: the same text again changes nothing.
            model_id: whose tokenizer reads it; "": the only model served.

        Raises:
            TandemError: the call failed.
        """
        request = wire.to_load_request(pool, text, model_id)
        return self._call(lambda stub: stub.LoadPool, request, timeout_s).num_tokens

    def close(self) -> None:
        """Closes the channels; calls still open end with CANCELLED, as do later ones."""
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self,
        method: "Callable[[gateway_pb2_grpc.GenerationServiceStub], "
        "grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT]]",
        request: _RequestT,
        timeout_s: float | None,
    ) -> _ResponseT:
        """The answer of a call that may be repeated after failures, as far as `retry` allows."""
        attempts = self._failover.begin(timeout_s)
        while True:
            try:
                response = method(self._next_stub(attempts))(
                    request, timeout=attempts.time_left_s, metadata=self._metadata
                )
            except ValueError as error:
                # As in `stream`.
                if self._closed.is_set():
                    raise wire.closed_error() from error
                raise
            except grpc.RpcError as error:
                failure = wire.to_error(error)
                pause_s = attempts.fail(failure)
                if pause_s is None:
                    raise failure from error
                if self._closed.wait(pause_s):
                    raise wire.closed_error() from error
            else:
                attempts.succeed()
                return response

    def _next_stub(self, attempts: Attempts) -> gateway_pb2_grpc.GenerationServiceStub:
        if self._closed.is_set():
            raise wire.closed_error()
        return self._stubs[attempts.next_gateway() - self._num_targets * attempts.is_patient]
