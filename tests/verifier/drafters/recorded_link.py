"""A link to a drafter on a real socket, and everything that it reports."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from servicekit.config import ChannelOptions
from servicekit.logs import get_logger
from tandem.v1 import drafter_pb2 as pb
from verifier.drafters.addresses import AdmittedDrafters
from verifier.drafters.link import DrafterLink
from verifier.drafters.messages import DrafterAnswered, DrafterMessage, DrafterUp

PATIENCE_S = 60.0

MessageT = TypeVar("MessageT", bound=DrafterMessage)


class RecordedLink:
    """Plays the engine's part; on the event loop."""

    def __init__(
        self, address: str, *, deadline_s: float, admitted: AdmittedDrafters | None = None
    ) -> None:
        self.messages: list[DrafterMessage] = []
        self.link = DrafterLink(
            address,
            admitted=admitted or AdmittedDrafters([address]),
            loop=asyncio.get_running_loop(),
            options=ChannelOptions(),
            post=self._post,
            deadline_s=deadline_s,
            logger=get_logger("test"),
        )
        self._arrived = asyncio.Event()
        self._batch_id = 0

    def _post(self, message: DrafterMessage) -> None:
        assert message.link is self.link
        self.messages.append(message)
        self._arrived.set()

    def of(self, kind: type[MessageT]) -> list[MessageT]:
        """The messages of a kind, in order."""
        return [message for message in self.messages if isinstance(message, kind)]

    async def wait(self, kind: type[MessageT], count: int = 1) -> MessageT:
        """The `count`th message of a kind, waited for."""
        await self.until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def up(self, count: int = 1) -> int:
        """Waits until the `count`th stream is up; its epoch."""
        return (await self.wait(DrafterUp, count)).epoch

    def send(self, epoch: int, *deltas: pb.SequenceDelta, max_answer_bytes: int = 1000) -> int:
        """Sends a batch; returns its id."""
        self._batch_id += 1
        request = pb.ProposeRequest(batch_id=self._batch_id, sequences=deltas)
        self.link.send(epoch, request.SerializeToString(), max_answer_bytes)
        return self._batch_id

    @property
    def answered(self) -> list[int]:
        """Ids of the batches whose answers were reported, in order."""
        return [
            pb.ProposeResponse.FromString(message.data).batch_id
            for message in self.of(DrafterAnswered)
        ]
