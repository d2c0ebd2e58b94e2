"""VerifierService over gRPC: exchanges messages with the engine thread and computes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc

from tandem.v1 import verifier_pb2, verifier_pb2_grpc
from verifier.engine.engine import Engine
from verifier.errors import (
    DrainingError,
    NotReadyError,
    OverloadedError,
    UnsupportedFieldError,
)
from verifier.service import score_wire
from verifier.service.score_call import ScoreCall
from verifier.service.sequence_spans import SequenceSpans
from verifier.service.served_model import ServedModel
from verifier.service.session import Session
from verifier.structured.grammars import Grammars

if TYPE_CHECKING:
    from servicekit.telemetry.spans import Spans

# Over all concurrent Score calls; a single call may exceed it.
MAX_SCORED_TOKENS = 1 << 20
# Distributions and hidden states in the responses of all concurrent Score calls.
MAX_SCORED_TENSOR_BYTES = 64 << 20

_Context = grpc.aio.ServicerContext[Any, Any]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Owned by the event loop. Until `open`, the model is loading and RPCs are refused."""

    def __init__(
        self,
        *,
        admits_drafter: Callable[[str], bool],
        max_session_event_bytes: int,
        max_waiting_tokens: int,
        allow_score: bool,
        spans: "Spans | None" = None,
    ) -> None:
        """Refuses RPCs until `open`.

        Args:
            max_waiting_tokens: of the sequences that wait for their grammars, in all sessions;
                the engine, which does not know them, bounds its own by the same number.
            spans: where they are recorded; None: there are none.
        """
        self._spans = spans
        self._opened: tuple[Engine, ServedModel, Grammars | None] | None = None
        self._admits_drafter = admits_drafter
        self._max_session_event_bytes = max_session_event_bytes
        self._max_waiting_tokens = max_waiting_tokens
        self._allow_score = allow_score
        self._sessions: set[Session] = set()
        self._num_scored_tokens = 0
        self._num_scored_tensor_bytes = 0
        self._is_draining = False

    def open(self, engine: Engine, served: ServedModel, grammars: Grammars | None) -> None:
        """Answers RPCs from now on. The caller starts and stops the engine.

        Args:
            grammars: None: structured output is refused.
        """
        self._opened = (engine, served, grammars)

    async def Session(
        self, request_iterator: AsyncIterator[verifier_pb2.SessionRequest], context: _Context
    ) -> AsyncIterator[verifier_pb2.SessionResponse]:
        engine, served, grammars = self._loaded()
        session = Session(
            engine,
            served,
            grammars,
            admits_drafter=self._admits_drafter,
            may_wait=self._may_wait,
            max_event_bytes=self._max_session_event_bytes,
            spans=None if self._spans is None else SequenceSpans(self._spans),
        )
        if self._is_draining:
            session.drain()
        self._sessions.add(session)
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            async for response in session.responses():
                yield response
        finally:
            reader.cancel()
            session.close()
            self._sessions.discard(session)

    async def Score(
        self, request: verifier_pb2.ScoreRequest, context: _Context
    ) -> verifier_pb2.ScoreResponse:
        if not self._allow_score:
            raise UnsupportedFieldError("Score is not enabled on this server")
        engine, served, _ = self._loaded()
        if self._is_draining:
            raise DrainingError("the verifier is shutting down", retry_after_ms=1000)
        query = score_wire.score_query(request, served)
        num_tokens = query.num_tokens
        if self._num_scored_tokens and self._num_scored_tokens + num_tokens > MAX_SCORED_TOKENS:
            raise OverloadedError(
                f"{self._num_scored_tokens} tokens are being scored already", retry_after_ms=1000
            )
        if self._num_scored_tensor_bytes + query.num_tensor_bytes > MAX_SCORED_TENSOR_BYTES:
            raise OverloadedError(
                f"{self._num_scored_tensor_bytes} bytes of distributions and hidden states are "
                "being computed already",
                retry_after_ms=1000,
            )
        self._num_scored_tokens += num_tokens
        self._num_scored_tensor_bytes += query.num_tensor_bytes
        call = ScoreCall(engine, query.sequences, query.options)
        try:
            scored = await asyncio.wrap_future(call.result)
            # Writing tens of thousands of logprobs would block the event loop, and hints with it.
            return await asyncio.to_thread(score_wire.score_response, query, scored)
        finally:
            # Also after a cancellation: the call's blocks are free within one step.
            call.close()
            self._num_scored_tokens -= num_tokens
            self._num_scored_tensor_bytes -= query.num_tensor_bytes

    async def GetModelInfo(
        self, request: verifier_pb2.GetModelInfoRequest, context: _Context
    ) -> verifier_pb2.GetModelInfoResponse:
        _, served, _ = self._loaded()
        return served.model_info()

    async def GetVerifierLoad(
        self, request: verifier_pb2.GetVerifierLoadRequest, context: _Context
    ) -> verifier_pb2.GetVerifierLoadResponse:
        engine, served, _ = self._loaded()
        load = engine.load
        return verifier_pb2.GetVerifierLoadResponse(
            instance_id=served.instance_id,
            num_running=load.num_running,
            # The engine does not know of those that wait for their grammar.
            num_waiting=load.num_waiting + sum(len(each.uncompiled) for each in self._sessions),
            num_kv_blocks_used=load.num_kv_blocks_used,
            num_kv_blocks_total=load.num_kv_blocks_total,
            num_steps=load.num_steps,
            step_duration_s=load.step_duration_s,
            hop_duration_s=load.hop_duration_s,
            hop_p50_s=engine.hop_quantile_s(0.5),
            hop_p99_s=engine.hop_quantile_s(0.99),
        )

    async def drain(self) -> None:
        """Refuses new sequences, waits until the last one has ended, ends the sessions."""
        engine, _, _ = self._loaded()
        self._is_draining = True
        for session in self._sessions:
            session.drain()
        for session in list(self._sessions):
            await session.uncompiled.join()
        await asyncio.wrap_future(engine.when_idle())
        for session in self._sessions:
            session.end()

    def _may_wait(self, num_tokens: int) -> bool:
        num_waiting = sum(each.uncompiled.num_tokens for each in self._sessions)
        return not num_waiting or num_waiting + num_tokens <= self._max_waiting_tokens

    def _loaded(self) -> tuple[Engine, ServedModel, Grammars | None]:
        if self._opened is None:
            raise NotReadyError("the model is being loaded", retry_after_ms=1000)
        return self._opened
