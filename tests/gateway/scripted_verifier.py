"""A STAND-IN for the verifier: the real VerifierService over real gRPC, but no model behind it.

It serves any number of sessions at a time and records every command of all of them. It is driven
by hand (`send`), or plays a target model by itself: after `play` it steps through a known
continuation. For a sequence with a drafter, it verifies drafts of the last two tokens' latest
earlier occurrence; no drafter is there.
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


class ScriptedVerifier(ScriptedServer, verifier_pb2_grpc.VerifierServiceServicer):
    """See the module.

    Attributes:
        messages: those of all sessions, in order.
        first_events: what it sends together with each Welcome.
        steps_elsewhere: whether it makes a step between two calls of GetVerifierLoad.
        instance_id: "" if each session finds a new process.
        num_elsewhere: sequences of other clients that it reports.
        is_frozen: whether it answers no GetVerifierLoad.
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
        self.allows_trace = True
        self.messages: list[verifier_pb2.SessionRequest] = []
        self.first_events: list[verifier_pb2.Event] = []
        self.steps_elsewhere = False
        self.num_elsewhere = 0
        self.is_frozen = False
        self.numerics_digest = ""
        self.instance_id = ""
        self.num_steps = 0
        self.num_load_calls = 0
        self.num_sessions = 0
        self.num_ended_sessions = 0
        self._sessions: list[ScriptedSession] = []
        self._continuation: Continuation | None = None
        self._played: dict[str, PlayedSequence] = {}
        self._playing: set[asyncio.Task[None]] = set()

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
        if self.is_frozen:
            await asyncio.Event().wait()
        self.num_steps += self.steps_elsewhere
        return verifier_pb2.GetVerifierLoadResponse(
            num_steps=self.num_steps,
            num_running=self.num_elsewhere + sum(len(each.opened) for each in self._sessions),
            step_duration_s=0.001,
        )

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

    def send_response(self, response: verifier_pb2.SessionResponse) -> None:
        """Sends a whole message, on the last session."""
        self._sessions[-1].responses.put_nowait(response)

    def end_session(self) -> None:
        """Ends every session."""
        for session in self._sessions:
            session.responses.put_nowait(None)

    def tell_step(
        self,
        *,
        num_tokens: int = 1,
        duration_s: float = 0.001,
        num_waiting: int = 0,
        num_kv_blocks_used: int = 0,
    ) -> None:
        """Tells every session of a step."""
        self.num_steps += 1
        step = verifier_pb2.StepStats(
            step_id=self.num_steps,
            num_scheduled_tokens=num_tokens,
            duration_s=duration_s,
            num_waiting=num_waiting,
            num_kv_blocks_used=num_kv_blocks_used,
        )
        for session in self._sessions:
            session.responses.put_nowait(verifier_pb2.SessionResponse(step=step))

    @staticmethod
    def decided(
        sequence_id: str,
        base_length: int,
        token_ids: Sequence[int],
        *,
        drafts: int = 0,
        accepted: int = 0,
        finish: Any = 0,
        with_logprobs: bool = False,
    ) -> verifier_pb2.Event:
        return verifier_pb2.Event(
            decided=verifier_pb2.Decided(
                sequence_id=sequence_id,
                base_length=base_length,
                token_ids=token_ids,
                num_draft_tokens=drafts,
                num_accepted_tokens=accepted,
                finish_reason=finish,
                logprobs=logprobs_of(token_ids) if with_logprobs else (),
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

    @staticmethod
    def draining() -> verifier_pb2.Event:
        return verifier_pb2.Event(draining=verifier_pb2.Draining())

    @staticmethod
    def drafter_status(address: str, state: Any) -> verifier_pb2.Event:
        return verifier_pb2.Event(
            drafter_status=verifier_pb2.DrafterStatus(drafter_address=address, state=state)
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
                    instance_id=self.instance_id or f"instance-{self.num_sessions}",
                    model_id=self.model_id,
                    model_digest=self.model_digest,
                    numerics_digest=self.numerics_digest,
                    tokenizer_digest=self.tokenizer_digest,
                    allows_trace=self.allows_trace,
                    limits=verifier_pb2.Limits(**self.limits),
                )
            ),
            *self.first_events,
        )

    def _play(self, session: ScriptedSession, command: verifier_pb2.Command) -> None:
        kind = command.WhichOneof("command")
        if kind == "open":
            self._start(session, command.open)
        elif kind == "close" and self._played.pop(command.close.sequence_id, None) is not None:
            session.send(self.decided(command.close.sequence_id, 0, [], finish=CANCELLED))

    def _start(self, session: ScriptedSession, opened: verifier_pb2.Open) -> None:
        assert self._continuation is not None
        played = PlayedSequence(
            session=session,
            open=opened,
            tokens=list(opened.token_ids),
            to_come=list(self._continuation(opened)),
            num_output=len(opened.token_ids) - (opened.prompt_length or len(opened.token_ids)),
        )
        self._played[opened.sequence_id] = played
        session.send(self.opened(opened.sequence_id))
        if opened.sampling.HasField("prompt_logprobs"):
            prompt = opened.token_ids[: opened.prompt_length or None]
            scored = verifier_pb2.PromptScored(
                sequence_id=opened.sequence_id, base_length=1, logprobs=logprobs_of(prompt[1:])
            )
            session.send(verifier_pb2.Event(prompt_scored=scored))
        task = asyncio.ensure_future(self._step_to_the_end(played))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    async def _step_to_the_end(self, played: PlayedSequence) -> None:
        while played.open.sequence_id in self._played:
            self._advance(played)
            await asyncio.sleep(0)

    def _advance(self, played: PlayedSequence) -> None:
        room = min(played.open.max_new_tokens - played.num_output, len(played.to_come)) - 1
        draft = look_up(played.tokens) if played.open.drafter_address else []
        draft = draft[: max(0, min(played.open.num_speculative_tokens, room))]
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
                with_logprobs=played.open.sampling.HasField("logprobs"),
            )
        )


def logprobs_of(token_ids: Sequence[int]) -> list[sampling_pb2.TokenLogprob]:
    """Logprobs without alternatives."""
    return [sampling_pb2.TokenLogprob(token_id=each, logprob=-0.5, rank=2) for each in token_ids]


def look_up(tokens: Sequence[int]) -> list[int]:
    """What followed the last two tokens where they occurred last before."""
    for start in range(len(tokens) - 3, -1, -1):
        if tokens[start : start + 2] == tokens[-2:]:
            return list(tokens[start + 2 :])
    return []
