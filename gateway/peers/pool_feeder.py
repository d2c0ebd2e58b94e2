"""Feeds pools texts from here.

A drafter gets such a text as it gets a request's: as a sequence, which is released at once and
leaves its text in the pool. Gateways call drafters for this alone. Knows no tenant and no text.
"""

import asyncio
import contextlib
import functools
import hashlib
import secrets
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

import grpc

from gateway.errors import RETRY_AFTER_MS, UnavailableError
from gateway.requests.drafting_policy import TANDEM
from servicekit.channels.channel import open_channel
from servicekit.channels.discovery import Replica
from servicekit.config import ChannelOptions, ConfigError
from servicekit.logs import Logger
from tandem.v1 import drafter_pb2, drafter_pb2_grpc

_MAX_DELTA_TOKENS = 8_192
# A text of a million tokens takes about a second.
_TIMEOUT_S = 30.0
_RELEASE_TIMEOUT_S = 1.0


class PoolFeedError(Exception):
    """A drafter did not take a text.

    Attributes:
        reason: why.
        has_no_room: whether it answered, and has no room for it.
    """

    def __init__(self, reason: str, *, has_no_room: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.has_no_room = has_no_room


#: Returns when a pool, given by its id, has a text, maybe since an earlier call. However it ends,
#: the drafter holds no sequence of the text. Raises PoolFeedError.
Feed = Callable[[str, Sequence[int]], Awaitable[None]]


class PoolFeeder:
    """On the event loop.

    Attributes:
        drafters: those that there are now.
    """

    def __init__(self, options: ChannelOptions, *, logger: Logger) -> None:
        self.drafters: Sequence[Replica] = ()
        self._options = options
        self._logger = logger

    @contextlib.asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[Feed]:
        """What feeds pools of one of `drafters`.

        Raises:
            PoolFeedError: it may not be called.
        """
        server_name = next(
            (each.server_name for each in self.drafters if each.address == address), None
        )
        try:
            channel = open_channel(
                address, self._options, server_name=server_name, user_agent="tandem-gateway"
            )
        except ConfigError as error:
            raise PoolFeedError(str(error)) from error
        async with channel:
            yield functools.partial(_feed, drafter_pb2_grpc.DrafterServiceStub(channel))

    async def load(self, addresses: Iterable[str], pool_id: str, token_ids: Sequence[int]) -> None:
        """Returns when the pool has the text at each of these drafters, maybe since an earlier
        call.

        Args:
            addresses: of `drafters`.
            pool_id: with the tenant.

        Raises:
            UnavailableError: one of them cannot be reached, or has no room.
        """
        loads = (self._load(address, pool_id, token_ids) for address in addresses)
        for error in await asyncio.gather(*loads, return_exceptions=True):
            if error is not None:
                raise error

    async def _load(self, address: str, pool_id: str, token_ids: Sequence[int]) -> None:
        try:
            async with self.connected(address) as feed:
                await feed(pool_id, token_ids)
        except PoolFeedError as error:
            self._logger.warning("pool_not_fed", drafter=address, reason=error.reason)
            if error.has_no_room:
                raise UnavailableError(
                    "a drafter has no room", field="pool", retry_after_ms=RETRY_AFTER_MS
                ) from error
            raise UnavailableError(
                "a drafter cannot be reached", retry_after_ms=RETRY_AFTER_MS
            ) from error


async def _feed(
    stub: "drafter_pb2_grpc.DrafterServiceAsyncStub", pool_id: str, token_ids: Sequence[int]
) -> None:
    """See `Feed`."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            is_kept = await _try_to_feed(stub, pool_id, token_ids)
    except grpc.aio.AioRpcError as error:
        raise PoolFeedError(error.details() or error.code().name) from error
    except TimeoutError:
        raise PoolFeedError("no answer") from None
    if not is_kept:
        raise PoolFeedError("no room", has_no_room=True)


async def _try_to_feed(
    stub: "drafter_pb2_grpc.DrafterServiceAsyncStub", pool_id: str, token_ids: Sequence[int]
) -> bool:
    """Whether the pool has the text."""
    sequence_id = secrets.token_hex(16)
    params = drafter_pb2.NgramParams(
        pool_id=pool_id,
        # Those of requests that name none: the pool's index is to cover them.
        min_ngram=TANDEM.min_ngram,
        max_ngram=TANDEM.max_ngram,
        # Nothing is drafted for it, so it needs no index of its own.
        algorithm=drafter_pb2.ALGORITHM_KMP,
    )
    release = drafter_pb2.Release(
        sequence_id=sequence_id,
        keep=drafter_pb2.KEEP_ALL,
        feed_id=hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).hexdigest(),
    )
    is_whole = False
    try:
        for first in range(0, len(token_ids), _MAX_DELTA_TOKENS):
            delta = drafter_pb2.SequenceDelta(
                sequence_id=sequence_id,
                base_length=first,
                token_ids=token_ids[first : first + _MAX_DELTA_TOKENS],
                params=params,
            )
            answer = await stub.Propose(drafter_pb2.ProposeRequest(sequences=[delta]))
            if answer.proposals[0].status in (
                drafter_pb2.STATUS_OUT_OF_SYNC,
                drafter_pb2.STATUS_INVALID,
            ):
                return False
        is_whole = True
        released = await stub.Release(drafter_pb2.ReleaseRequest(releases=[release]))
        return released.num_kept == 1
    finally:
        if not is_whole:
            release.keep = drafter_pb2.KEEP_NOTHING
            # If the drafter is gone, it forgets the sequence as an idle one.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Release(
                    drafter_pb2.ReleaseRequest(releases=[release]), timeout=_RELEASE_TIMEOUT_S
                )
