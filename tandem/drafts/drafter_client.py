"""The clients of a drafter, for engines that verify drafts by themselves: `DrafterClient` blocks,
`AsyncDrafterClient` is for asyncio. They need a drafter with a known address, such as the one that
`python -m drafter` starts; those of `tandem up` use free ports.

    from tandem.client import DrafterClient, NgramParams

    token_ids = [11, 12, 13, 14, 15, 11, 12]
    with DrafterClient("127.0.0.1:50051") as drafter:
        sequence = drafter.open(params=NgramParams(min_ngram=1, max_ngram=3))
        draft = drafter.propose(sequence, token_ids, max_draft_tokens=3)
        print(draft.token_ids)  # (13, 14, 15): verify them, append what is right, ask again
        drafter.release(sequence)

Each call is given the whole history. The client finds and sends the part that the drafter lacks,
also after the drafter has lost all of it. A draft is a hint: it may be empty or wrong, so check it
against the model. A failed call raises `TandemError`; it may be repeated at any time.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import Self

from tandem import wire
from tandem.drafts import draft_exchange
from tandem.drafts.drafting import Draft, DraftedSequence, DrafterLoad, DraftQuery
from tandem.drafts.propose_stream import ProposeStream
from tandem.generation import TandemError
from tandem.messages import from_message
from tandem.transport.channel import TlsOptions, open_async_channel, open_channel
from tandem.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.values import Keep, NgramParams

# How long `close` may take to release sequences; the drafter also expires them by itself.
_CLOSE_TIMEOUT_S = 1.0


class DrafterClient:
    """Blocking client; threads may share it if each sequence is used by one at a time.

    Args:
        target: HOST:PORT of the drafter.
        tls: None speaks plaintext.
    """

    def __init__(self, target: str, *, tls: TlsOptions | None = None) -> None:
        self._channel = open_channel(target, tls)
        self._stub = drafter_pb2_grpc.DrafterServiceStub(self._channel)
        self._sequences: dict[str, DraftedSequence] = {}
        self._closed = threading.Event()

    def open(
        self,
        *,
        params: NgramParams = NgramParams(),  # noqa: B008 - immutable
        prompt_length: int | None = None,
        max_length: int = 0,
    ) -> DraftedSequence:
        """Makes a sequence; nothing is sent before its first history.

        Args:
            params: how to make drafts for it.
            prompt_length: how many of its tokens are prompt; None is the first history.
            max_length: the model's limit, which no draft exceeds; 0 is none.
        """
        return _open(self._sequences, params, prompt_length, max_length)

    def propose(
        self,
        sequence: DraftedSequence,
        token_ids: Sequence[int],
        *,
        max_draft_tokens: int,
        timeout_s: float | None = None,
    ) -> Draft:
        """Returns tokens that may follow `token_ids`, the sequence's whole history.

        Args:
            sequence: made by `open`.
            token_ids: a list or an array; only its new tokens are read.
            max_draft_tokens: maximum length of the draft; 0 only sends the history.
            timeout_s: of each call that is made.

        Raises:
            TandemError: the call failed, or the drafter refuses this sequence.
        """
        query = DraftQuery(
            sequence=sequence, token_ids=token_ids, max_draft_tokens=max_draft_tokens
        )
        return _only(self.propose_batch([query], timeout_s=timeout_s))

    def propose_batch(
        self, queries: Sequence[DraftQuery], *, timeout_s: float | None = None
    ) -> tuple[Draft, ...]:
        """Returns one draft per query, in order; a refused sequence has its draft's `error`.

        Raises:
            TandemError: the call failed as a whole.
        """
        exchange = draft_exchange.exchange(queries)
        try:
            with _calling(self._closed):
                request = next(exchange)
            while True:
                with _calling(self._closed):
                    request = exchange.send(self._stub.Propose(request, timeout=timeout_s))
        except StopIteration as end:
            drafts: tuple[Draft, ...] = end.value
            return drafts

    def release(
        self,
        sequence: DraftedSequence,
        *,
        keep: Keep = Keep.NOTHING,
        feed_id: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Ends a sequence, which the drafter then forgets. May be called again.

        Args:
            sequence: made by `open`; it cannot be used afterwards.
            keep: which part of its text its pool gets.
            feed_id: a pool that is fed twice with one id gets the text once.
            timeout_s: of the call.

        Raises:
            TandemError: the call failed; the drafter expires the sequence by itself.
        """
        for request in _release(self._sequences, [sequence], keep, feed_id):
            with _calling(self._closed):
                self._stub.Release(request, timeout=timeout_s)

    def load(self, *, timeout_s: float | None = None) -> DrafterLoad:
        """Returns how full the drafter is.

        Raises:
            TandemError: the call failed.
        """
        with _calling(self._closed):
            response = self._stub.GetDrafterLoad(
                drafter_pb2.GetDrafterLoadRequest(), timeout=timeout_s
            )
        return from_message(DrafterLoad, response)

    def close(self) -> None:
        """Releases every sequence, if the drafter can be reached, and closes the channel.

        Calls still open end with CANCELLED, as do later ones.
        """
        self._closed.set()
        requests = _release(self._sequences, list(self._sequences.values()), Keep.NOTHING, "")
        with contextlib.suppress(TandemError), wire.own_errors(self._closed.is_set):
            for request in requests:
                self._stub.Release(request, timeout=_CLOSE_TIMEOUT_S)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncDrafterClient:
    """Asyncio client; belongs to the event loop that it was made in.

    Args:
        target: HOST:PORT of the drafter.
        tls: None speaks plaintext.
        streaming: sends batches over one ProposeStream instead of one call each, which takes about
            half the round trip. The stream is opened at the first batch and again after a failure.
            One batch is in flight at a time, and the drafter forgets the sequences 30 s after the
            client vanishes.
    """

    def __init__(
        self, target: str, *, tls: TlsOptions | None = None, streaming: bool = False
    ) -> None:
        self._channel = open_async_channel(target, tls)
        self._stub: drafter_pb2_grpc.DrafterServiceAsyncStub = drafter_pb2_grpc.DrafterServiceStub(
            self._channel
        )
        self._stream = ProposeStream(self._stub) if streaming else None
        self._sequences: dict[str, DraftedSequence] = {}
        self._closed = threading.Event()

    def open(
        self,
        *,
        params: NgramParams = NgramParams(),  # noqa: B008 - immutable
        prompt_length: int | None = None,
        max_length: int = 0,
    ) -> DraftedSequence:
        """See `DrafterClient.open`."""
        return _open(self._sequences, params, prompt_length, max_length)

    async def propose(
        self,
        sequence: DraftedSequence,
        token_ids: Sequence[int],
        *,
        max_draft_tokens: int,
        timeout_s: float | None = None,
    ) -> Draft:
        """See `DrafterClient.propose`."""
        query = DraftQuery(
            sequence=sequence, token_ids=token_ids, max_draft_tokens=max_draft_tokens
        )
        return _only(await self.propose_batch([query], timeout_s=timeout_s))

    async def propose_batch(
        self, queries: Sequence[DraftQuery], *, timeout_s: float | None = None
    ) -> tuple[Draft, ...]:
        """See `DrafterClient.propose_batch`. Tasks may call it at once with different sequences."""
        exchange = draft_exchange.exchange(queries)
        try:
            with _calling(self._closed):
                request = next(exchange)
            while True:
                with _calling(self._closed):
                    request = exchange.send(await self._exchange(request, timeout_s))
        except StopIteration as end:
            drafts: tuple[Draft, ...] = end.value
            return drafts

    async def release(
        self,
        sequence: DraftedSequence,
        *,
        keep: Keep = Keep.NOTHING,
        feed_id: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """See `DrafterClient.release`."""
        for request in _release(self._sequences, [sequence], keep, feed_id):
            with _calling(self._closed):
                await self._stub.Release(request, timeout=timeout_s)

    async def load(self, *, timeout_s: float | None = None) -> DrafterLoad:
        """See `DrafterClient.load`."""
        with _calling(self._closed):
            response = await self._stub.GetDrafterLoad(
                drafter_pb2.GetDrafterLoadRequest(), timeout=timeout_s
            )
        return from_message(DrafterLoad, response)

    async def close(self) -> None:
        """See `DrafterClient.close`."""
        self._closed.set()
        try:
            requests = _release(self._sequences, list(self._sequences.values()), Keep.NOTHING, "")
            with contextlib.suppress(TandemError), wire.own_errors(self._closed.is_set):
                for request in requests:
                    await self._stub.Release(request, timeout=_CLOSE_TIMEOUT_S)
        finally:
            if self._stream is not None:
                self._stream.drop()
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _exchange(
        self, request: drafter_pb2.ProposeRequest, timeout_s: float | None
    ) -> drafter_pb2.ProposeResponse:
        if self._stream is not None:
            return await self._stream.exchange(request, timeout_s)
        return await self._stub.Propose(request, timeout=timeout_s)


def _calling(closed: threading.Event) -> contextlib.AbstractContextManager[None]:
    """What each step of a call is made in; none begins after the client was closed."""
    if closed.is_set():
        raise wire.closed_error()
    return wire.own_errors(closed.is_set)


def _open(
    sequences: dict[str, DraftedSequence],
    params: NgramParams,
    prompt_length: int | None,
    max_length: int,
) -> DraftedSequence:
    sequence = DraftedSequence(params=params, prompt_length=prompt_length, max_length=max_length)
    sequences[sequence.sequence_id] = sequence
    return sequence


def _release(
    sequences: dict[str, DraftedSequence],
    released: Sequence[DraftedSequence],
    keep: Keep,
    feed_id: str,
) -> list[drafter_pb2.ReleaseRequest]:
    """Removes sequences from the client's; returns the requests that release them."""
    held = [sequence for sequence in released if sequences.pop(sequence.sequence_id, None)]
    for sequence in held:
        sequence.is_released = True
    return list(draft_exchange.release_requests(held, keep=keep, feed_id=feed_id))


def _only(drafts: tuple[Draft, ...]) -> Draft:
    (draft,) = drafts
    if draft.error is not None:
        raise draft.error
    return draft
