"""Links that go nowhere: the test reads what was sent, and answers when it wants to."""

import queue
import time
from collections.abc import Callable
from typing import Any

from tandem.v1 import drafter_pb2 as pb
from tests.verifier.drafters.scripted_drafter import appended
from verifier.drafters.messages import (
    DrafterAnswered,
    DrafterBack,
    DrafterDown,
    DrafterLate,
    DrafterMessage,
    DrafterUp,
)

PATIENCE_S = 60.0

Propose = Callable[[pb.SequenceDelta], pb.Proposal]


class FakeLink:
    """Implements `Link` for the engine thread; the rest is for the test's thread.

    Attributes:
        sent: everything that was sent, in order.
        failed: (epoch, reason) of each stream that was to end.
    """

    def __init__(self, address: str, post: Callable[[DrafterMessage], None]) -> None:
        self.address = address
        self.sent: list[pb.ProposeRequest] = []
        self.failed: list[tuple[int, str]] = []
        self.is_closed = False
        self.epoch = 0
        self._post = post
        self._player: Propose | None = None
        self._unread: queue.SimpleQueue[tuple[int, pb.ProposeRequest]] = queue.SimpleQueue()

    def send(self, epoch: int, data: bytes, max_answer_bytes: int) -> None:
        request = pb.ProposeRequest.FromString(data)
        assert not self.is_closed
        self.sent.append(request)
        if self._player is None:
            self._unread.put((epoch, request))
        else:
            self.answer(request, self._player, epoch=epoch)

    def fail(self, epoch: int, reason: str) -> None:
        self.failed.append((epoch, reason))

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    # What the drafter's stream does.

    def up(self) -> None:
        self.epoch += 1
        self._post(DrafterUp(link=self, epoch=self.epoch))

    def down(self, reason: str = "gone") -> None:
        self._post(DrafterDown(link=self, reason=reason))

    def late(self, *, is_aside: bool) -> None:
        self._post(DrafterLate(link=self, is_aside=is_aside))

    def back(self) -> None:
        self._post(DrafterBack(link=self))

    def receive(self) -> pb.ProposeRequest:
        """The next batch, waited for, of the current stream."""
        while True:
            epoch, request = self._unread.get(timeout=PATIENCE_S)
            if epoch == self.epoch:
                return request

    def play(self, propose: Propose) -> None:
        """Answers every batch from now on at once; none was sent yet."""
        self._player = propose

    @property
    def has_unread(self) -> bool:
        return not self._unread.empty()

    def answer(
        self,
        request: pb.ProposeRequest,
        propose: Propose = appended,
        *,
        epoch: int | None = None,
        received_at_s: float | None = None,
    ) -> None:
        """Answers each of a batch's deltas."""
        proposals = [propose(delta) for delta in request.sequences]
        response = pb.ProposeResponse(batch_id=request.batch_id, proposals=proposals)
        self.answer_bytes(response.SerializeToString(), epoch=epoch, received_at_s=received_at_s)

    def answer_bytes(
        self, data: bytes, *, epoch: int | None = None, received_at_s: float | None = None
    ) -> None:
        self._post(
            DrafterAnswered(
                link=self,
                epoch=self.epoch if epoch is None else epoch,
                data=data,
                received_at_s=time.monotonic() if received_at_s is None else received_at_s,
            )
        )

    def exchange(self, propose: Propose = appended, **fields: Any) -> pb.ProposeRequest:
        """Answers the next batch; returns it."""
        request = self.receive()
        self.answer(request, propose, **fields)
        return request

    def hint_for(self, length: int, propose: Propose = appended) -> pb.ProposeRequest:
        """Answers batches up to the one that requests a draft for this length."""
        while True:
            request = self.exchange(propose)
            if any(
                delta.base_length + len(delta.token_ids) == length and delta.max_draft_tokens
                for delta in request.sequences
            ):
                return request


class FakeLinks:
    """All links that were opened, by address, in order."""

    def __init__(self, post: Callable[[DrafterMessage], None] | None = None) -> None:
        self.opened: list[FakeLink] = []
        # Set before the first link is opened.
        self.post = post or _to_nobody

    def open(self, address: str) -> FakeLink:
        link = FakeLink(address, lambda message: self.post(message))
        self.opened.append(link)
        return link

    def __getitem__(self, address: str) -> FakeLink:
        """The last link to an address."""
        return [link for link in self.opened if link.address == address][-1]


def _to_nobody(message: DrafterMessage) -> None:
    raise AssertionError("nobody is listening")
