"""A started verifier with a client."""

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry

from tandem.v1 import verifier_pb2 as pb
from tandem.v1 import verifier_pb2_grpc as rpc
from verifier.engine.engine import Engine
from verifier.server import VerifierServer

StartVerifier = Callable[..., Awaitable["RunningVerifier"]]
SessionCall = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

PATIENCE_S = 60.0


class ClientSession:
    """A client's end of a session stream."""

    def __init__(self, call: SessionCall) -> None:
        self.call = call
        self.events: list[pb.Event] = []
        self.responses: list[pb.SessionResponse] = []
        # Of those events, sorted as they come: a client that searches all events at each message
        # falls behind.
        self.drafter_statuses: list[tuple[str, int]] = []
        self._decided: dict[str, list[pb.Decided]] = collections.defaultdict(list)
        self._rejected: list[pb.Rejected] = []
        self._finished: set[str] = set()

    async def send(self, *commands: pb.Command) -> None:
        await self.call.write(pb.SessionRequest(commands=commands))

    async def open(self, *opens: pb.Open) -> None:
        await self.send(*(pb.Command(open=command) for command in opens))

    async def draft(self, sequence_id: str, base_length: int, token_ids: Sequence[int]) -> None:
        draft = pb.Draft(sequence_id=sequence_id, base_length=base_length, token_ids=token_ids)
        await self.send(pb.Command(draft=draft))

    async def hello(self) -> pb.Welcome:
        await self.send(pb.Command(hello=pb.Hello(protocol_version=1, gateway_id="test")))
        await self.read()
        assert self.events[0].WhichOneof("event") == "welcome"
        return self.events[0].welcome

    async def read(self) -> pb.SessionResponse:
        """The next message; its events are kept."""
        async with asyncio.timeout(PATIENCE_S):
            response = await self.call.read()
        assert isinstance(response, pb.SessionResponse), "the stream has ended"
        self._add(response)
        return response

    async def read_to_end(self) -> grpc.StatusCode:
        """Reads until the stream ends; its status."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while isinstance(response := await self.call.read(), pb.SessionResponse):
                    self._add(response)
            return await self.call.code()

    def decided(self, sequence_id: str) -> list[pb.Decided]:
        return list(self._decided[sequence_id])

    def rejected(self) -> list[pb.Rejected]:
        return list(self._rejected)

    def output(self, sequence_id: str) -> list[int]:
        return [t for decided in self.decided(sequence_id) for t in decided.token_ids]

    async def wait_decided(self, sequence_id: str, count: int = 1) -> pb.Decided:
        while len(self.decided(sequence_id)) < count:
            await self.read()
        return self.decided(sequence_id)[count - 1]

    async def wait_finished(self, sequence_id: str) -> list[int]:
        """The whole output."""
        while sequence_id not in self._finished:
            rejected = [r for r in self.rejected() if r.sequence_id == sequence_id]
            assert not rejected, rejected
            await self.read()
        return self.output(sequence_id)

    async def wait_rejected(self, count: int = 1) -> pb.Rejected:
        while len(self.rejected()) < count:
            await self.read()
        return self.rejected()[count - 1]

    def _add(self, response: pb.SessionResponse) -> None:
        self.responses.append(response)
        self.events += response.events
        for event in response.events:
            if event.HasField("decided"):
                self._decided[event.decided.sequence_id].append(event.decided)
                if event.decided.finish_reason:
                    self._finished.add(event.decided.sequence_id)
            elif event.HasField("rejected"):
                self._rejected.append(event.rejected)
            elif event.HasField("drafter_status"):
                status = event.drafter_status
                self.drafter_statuses.append((status.drafter_address, status.state))


@dataclass
class RunningVerifier:
    verifier: VerifierServer
    engine: Engine
    channel: grpc.aio.Channel
    stub: "rpc.VerifierServiceAsyncStub"
    registry: CollectorRegistry
    log: Sequence[Mapping[str, object]]
    sessions: list[ClientSession] = field(default_factory=list)

    def session(self) -> ClientSession:
        """A stream without a Hello yet."""
        session = ClientSession(self.stub.Session())
        self.sessions.append(session)
        return session

    async def greeted_session(self) -> ClientSession:
        session = self.session()
        await session.hello()
        return session

    async def load(self) -> pb.GetVerifierLoadResponse:
        return await self.stub.GetVerifierLoad(pb.GetVerifierLoadRequest())

    async def sync(self) -> None:
        """Returns between two steps, when all events of the last one have been published."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wrap_future(self.engine.call(self.engine.check_integrity))

    async def idle(self) -> None:
        """Waits until no sequence is open, and checks that everything is free."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wrap_future(self.engine.when_idle())
        await self.sync()
        load = await self.load()
        assert load.num_running == load.num_waiting == load.num_kv_blocks_used == 0

    async def close(self) -> None:
        """Ends the sessions; checks that nothing is left, broken or logged as an error."""
        for session in self.sessions:
            session.call.cancel()
        await self.idle()
        await self.channel.close()
        self.verifier.close()
        self.engine.stop()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wrap_future(self.engine.stopped)
        assert [entry for entry in self.log if entry["log_level"] in ("error", "critical")] == []
