"""A STAND-IN for the verifier: the real VerifierService over real gRPC, but no model behind it.

It serves any number of sessions at a time and records every command of all of them. It is driven
by hand (`send`), or plays a target model by itself: after `play` it verifies hints against a known
continuation, one step per hint, as the real verifier with DRAFT_WAIT_ALWAYS would.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from tandem.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from tests.gateway.scripted_server import ScriptedServer

STOP = sampling_pb2.FINISH_REASON_STOP
LENGTH = sampling_pb2.FINISH_REASON_LENGTH
CANCELLED = sampling_pb2.FINISH_REASON_CANCELLED

Continuation = Callable[[verifier_pb2.Open], Sequence[int]]


class ScriptedSession:
    """One gateway's session: what is sent on it, and the sequences that were opened on it."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[verifier_pb2.SessionResponse | None] = asyncio.Queue()
        self.opened: set[str] = set()

    def send(self, *events: verifier_pb2.Event) -> None:
        self.responses.put_nowait(verifier_pb2.SessionResponse(events=events))


@dataclasses.dataclass
class PlayedSequence:
    """One sequence of a verifier that plays by itself."""

    session: ScriptedSession
    open: verifier_pb2.Open
    tokens: list[int]
    to_come: list[int]
    num_output: int
    is_drafted: bool


class ScriptedVerifier(ScriptedServer, verifier_pb2_grpc.VerifierServiceServicer):
    """See the module.

    Attributes:
        messages: those of all sessions, in order.
        steps_elsewhere: whether it makes a step between two calls of GetVerifierLoad.
    """

    def __init__(self, **limits: int) -> None:
        super().__init__()
        self.limits = {
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "max_num_speculative_tokens": 7,
            "vocab_size": 2048,
            **limits,
        }
        self.model_id = "scripted"
        self.model_digest = "digest"
        self.tokenizer_digest = ""
        self.messages: list[verifier_pb2.SessionRequest] = []
        self.steps_elsewhere = False
        self.num_steps = 0
        self.num_load_calls = 0
        self.num_sessions = 0
        self.num_ended_sessions = 0
        self._sessions: list[ScriptedSession] = []
        self._continuation: Continuation | None = None
        self._played: dict[str, PlayedSequence] = {}

    def register(self, server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    async def Session(
        self,
        request_iterator: AsyncIterator[verifier_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verifier_pb2.SessionResponse]:
        session = ScriptedSession()
        self._sessions.append(session)
        reader = asyncio.ensure_future(self._read(session, request_iterator))
        try:
            while (response := await session.responses.get()) is not None:
                yield response
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the script ends the session")
        finally:
            reader.cancel()
            self._sessions.remove(session)
            for sequence_id in session.opened:
                self._played.pop(sequence_id, None)
            self.num_ended_sessions += 1

    async def Score(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")

    async def GetVerifierLoad(self, request: Any, context: Any) -> Any:
        self.num_load_calls += 1
        self.num_steps += self.steps_elsewhere
        return verifier_pb2.GetVerifierLoadResponse(num_steps=self.num_steps)

    # Recorded commands

    def commands(self, kind: str) -> list[Any]:
        """All commands of a kind, of all sessions, in order."""
        return [
            getattr(command, kind)
            for message in self.messages
            for command in message.commands
            if command.WhichOneof("command") == kind
        ]

    async def nth(self, kind: str, n: int) -> Any:
        """Waits for the n-th command of a kind, from 0."""
        await self.until(lambda: len(self.commands(kind)) > n)
        return self.commands(kind)[n]

    # Events by hand

    def send(self, *events: verifier_pb2.Event) -> None:
        """Sends events in one message: on the session of the first event's sequence, or on the
        last session if none has it.
        """
        kind = events[0].WhichOneof("event") if events else None
        sequence_id = getattr(getattr(events[0], kind), "sequence_id", "") if kind else ""
        owners = [session for session in self._sessions if sequence_id in session.opened]
        (owners or self._sessions)[-1].send(*events)

    def end_session(self) -> None:
        """Ends every session."""
        for session in self._sessions:
            session.responses.put_nowait(None)

    @staticmethod
    def decided(
        sequence_id: str,
        base_length: int,
        token_ids: Sequence[int],
        *,
        drafts: int = 0,
        accepted: int = 0,
        wanted: int = 24,
        finish: Any = 0,
    ) -> verifier_pb2.Event:
        return verifier_pb2.Event(
            decided=verifier_pb2.Decided(
                sequence_id=sequence_id,
                base_length=base_length,
                token_ids=token_ids,
                num_draft_tokens=drafts,
                num_accepted_tokens=accepted,
                num_wanted_draft_tokens=wanted,
                finish_reason=finish,
            )
        )

    @staticmethod
    def rejected(sequence_id: str, **fields: Any) -> verifier_pb2.Event:
        return verifier_pb2.Event(rejected=verifier_pb2.Rejected(sequence_id=sequence_id, **fields))

    @staticmethod
    def opened(sequence_id: str, num_cached_tokens: int = 0) -> verifier_pb2.Event:
        return verifier_pb2.Event(
            opened=verifier_pb2.Opened(sequence_id=sequence_id, num_cached_tokens=num_cached_tokens)
        )

    # Events by itself

    def play(self, continuation: Continuation) -> None:
        """From now on plays a target that continues each prompt by `continuation`."""
        self._continuation = continuation

    @property
    def num_live(self) -> int:
        """Sequences that it plays and that have not ended."""
        return len(self._played)

    async def _read(
        self, session: ScriptedSession, requests: AsyncIterator[verifier_pb2.SessionRequest]
    ) -> None:
        async for request in requests:
            self.messages.append(request)
            for command in request.commands:
                kind = command.WhichOneof("command")
                if kind == "hello":
                    self._welcome(session)
                elif kind == "open":
                    session.opened.add(command.open.sequence_id)
                if self._continuation is not None:
                    self._play(session, command)
            await self.notify()

    def _welcome(self, session: ScriptedSession) -> None:
        self.num_sessions += 1
        session.send(
            verifier_pb2.Event(
                welcome=verifier_pb2.Welcome(
                    protocol_version=1,
                    instance_id=f"instance-{self.num_sessions}",
                    model_id=self.model_id,
                    model_digest=self.model_digest,
                    tokenizer_digest=self.tokenizer_digest,
                    limits=verifier_pb2.Limits(**self.limits),
                )
            )
        )

    def _play(self, session: ScriptedSession, command: verifier_pb2.Command) -> None:
        kind = command.WhichOneof("command")
        if kind == "open":
            self._start(session, command.open)
        elif kind == "draft":
            self._step(command.draft.sequence_id, command.draft)
        elif kind == "update" and command.update.sequence_id in self._played:
            self._played[command.update.sequence_id].is_drafted = command.update.drafting
            if not command.update.drafting:
                self._run_undrafted(command.update.sequence_id)
        elif kind == "close" and self._played.pop(command.close.sequence_id, None) is not None:
            session.send(self.decided(command.close.sequence_id, 0, [], finish=CANCELLED))

    def _start(self, session: ScriptedSession, opened: verifier_pb2.Open) -> None:
        assert self._continuation is not None
        num_given = len(opened.token_ids) - (opened.prompt_length or len(opened.token_ids))
        played = PlayedSequence(
            session=session,
            open=opened,
            tokens=list(opened.token_ids),
            to_come=list(self._continuation(opened)),
            num_output=num_given,
            is_drafted=opened.drafting,
        )
        self._played[opened.sequence_id] = played
        session.send(self.opened(opened.sequence_id))
        self._advance(played, [])
        self._run_undrafted(opened.sequence_id)

    def _run_undrafted(self, sequence_id: str) -> None:
        while (played := self._played.get(sequence_id)) is not None and not played.is_drafted:
            self._advance(played, [])

    def _step(self, sequence_id: str, draft: verifier_pb2.Draft) -> None:
        played = self._played.get(sequence_id)
        if played is None or not played.is_drafted or draft.base_length != len(played.tokens):
            return
        room = played.open.max_new_tokens - played.num_output - 1
        k = min(played.open.num_speculative_tokens, room, len(played.to_come) - 1)
        self._advance(played, list(draft.token_ids[: max(0, k)]))

    def _advance(self, played: PlayedSequence, draft: list[int]) -> None:
        accepted = 0
        while accepted < len(draft) and draft[accepted] == played.to_come[accepted]:
            accepted += 1
        base_length = len(played.tokens)
        tokens, played.to_come = played.to_come[: accepted + 1], played.to_come[accepted + 1 :]
        played.tokens += tokens
        played.num_output += len(tokens)
        is_full = played.num_output == played.open.max_new_tokens
        finish = LENGTH if is_full else 0 if played.to_come else STOP
        if finish:
            del self._played[played.open.sequence_id]
        played.session.send(
            self.decided(
                played.open.sequence_id,
                base_length,
                tokens,
                drafts=len(draft),
                accepted=accepted,
                finish=finish,
            )
        )
