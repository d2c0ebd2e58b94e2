"""A started drafter with a client."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from drafter.budgets import MIN_UNINDEXED
from drafter.history.history import History
from drafter.history.store import HistoryStore
from drafter.server import DrafterServer
from drafter.service import SERVICE_NAME, STREAM_METHOD
from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import drafter_pb2_grpc as rpc

StartDrafter = Callable[..., Awaitable["RunningDrafter"]]
BytesStream = grpc.aio.StreamStreamCall[bytes, bytes]
ProposeCall = grpc.aio.StreamStreamCall[pb.ProposeRequest, pb.ProposeResponse]


class FakeClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class RunningDrafter:
    """A started drafter and a client of it."""

    drafter: DrafterServer
    channel: grpc.aio.Channel
    stub: "rpc.DrafterServiceAsyncStub"
    registry: CollectorRegistry
    clock: FakeClock
    log: Sequence[Mapping[str, object]]
    """Entries of its log."""
    streams: list[grpc.aio.StreamStreamCall[Any, Any]] = field(default_factory=list)

    @property
    def histories(self) -> dict[str, History]:
        """All known histories by their sequences' ids."""
        return histories_by_id(self.drafter.store)

    def open_stream(self) -> ProposeCall:
        """A stream that is cancelled at the end of the test, if it is still open then."""
        stream = self.stub.ProposeStream()
        self.streams.append(stream)
        return stream

    def open_bytes_stream(self) -> BytesStream:
        """A stream of messages as bytes, which is cancelled like the others."""
        stream: BytesStream = self.channel.stream_stream(f"/{SERVICE_NAME}/{STREAM_METHOD}")()
        self.streams.append(stream)
        return stream

    async def propose(self, *deltas: pb.SequenceDelta, batch_id: int = 0) -> list[pb.Proposal]:
        """By the unary call."""
        response = await self.stub.Propose(pb.ProposeRequest(batch_id=batch_id, sequences=deltas))
        assert response.batch_id == batch_id
        return list(response.proposals)

    async def indexed(self) -> None:
        """Returns when the indexer has no text left.

        It may start on a batch's texts only after the client has the answer.
        """
        async with asyncio.timeout(20):
            while self._has_unindexed_text():  # noqa: ASYNC110 - the indexer has no event to wait for
                await asyncio.sleep(0.001)

    def _has_unindexed_text(self) -> bool:
        indexing = self.drafter.servicer.engine.indexer.task
        return (indexing is not None and not indexing.done()) or any(
            history.num_unindexed >= MIN_UNINDEXED for history in self.drafter.store.by_id.values()
        )

    async def load(self) -> pb.GetDrafterLoadResponse:
        return await self.stub.GetDrafterLoad(pb.GetDrafterLoadRequest())

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value."""
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, f"{name}{labels} is not measured"
        return value


def histories_by_id(store: HistoryStore) -> dict[str, History]:
    return dict(store.by_id)


async def exchange(stream: ProposeCall, request: pb.ProposeRequest) -> pb.ProposeResponse:
    """Sends a request, and returns its response."""
    await stream.write(request)
    response = await stream.read()
    assert isinstance(response, pb.ProposeResponse), "the stream has ended"
    return response
