"""Takes texts that one drafter's pool keeps to the same pool of other drafters.

Each verifier has one drafter, and a pool's requests run at several verifiers: so each of their
drafters keeps the whole pool. A copy is sent once, in the background; one that does not arrive
costs drafts and nothing else.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.peers.pool_feeder import Feed, PoolFeeder, PoolFeedError
from servicekit.logs import Logger

#: Tokens that may wait for one drafter, 2 MB; a single text may have more.
MAX_WAITING_TOKENS = 1 << 19

# What drafters need to draft anything from a text.
_MIN_TEXT_TOKENS = 2

# How long a connection is kept for which there are no texts.
_UNUSED_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Lane:
    """Texts on their way to one drafter, each with its pool's id; `idle`: there are none."""

    waiting: "asyncio.Queue[tuple[str, array[int]]]" = field(default_factory=asyncio.Queue)
    num_tokens: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class PoolCopies:
    """On the event loop; `stop` ends it."""

    def __init__(
        self, feeder: PoolFeeder, *, logger: Logger, on_copy: Callable[[str], None]
    ) -> None:
        """Begins with none.

        Args:
            on_copy: called for each copy with its outcome: "sent", "failed" or "dropped".
        """
        self._feeder = feeder
        self._logger = logger
        self._on_copy = on_copy
        self._lanes: dict[str, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, addresses: Iterable[str], pool_id: str, token_ids: Sequence[int]) -> None:
        """Sends a text to drafters soon; returns at once.

        Args:
            addresses: of the feeder's drafters.
            pool_id: with the tenant.
        """
        if len(token_ids) < _MIN_TEXT_TOKENS:
            return
        text = array("I", token_ids)
        for address in addresses:
            lane = self._lanes.get(address)
            if lane is None:
                lane = self._lanes[address] = _Lane()
                task = asyncio.create_task(self._send_all(address, lane))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if lane.num_tokens and lane.num_tokens + len(text) > MAX_WAITING_TOKENS:
                self._on_copy("dropped")
                continue
            lane.num_tokens += len(text)
            lane.waiting.put_nowait((pool_id, text))
            lane.idle.clear()

    async def settle(self) -> None:
        """Returns when no text waits or is on its way."""
        for lane in list(self._lanes.values()):
            await lane.idle.wait()

    async def stop(self) -> None:
        """Gives up what waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_all(self, address: str, lane: _Lane) -> None:
        """Sends a drafter its texts, one by one, until there are none for a while."""
        had_failed = False
        try:
            async with self._feeder.connected(address) as feed:
                while (text := await _next_text(lane)) is not None:
                    reason = await _failure_of(feed, *text)
                    self._on_copy("failed" if reason else "sent")
                    if reason and not had_failed:
                        self._logger.warning("pool_not_copied", drafter=address, reason=reason)
                    had_failed = bool(reason)
                    lane.num_tokens -= len(text[1])
                    if lane.waiting.empty():
                        lane.idle.set()
        except PoolFeedError as error:
            self._logger.warning("pool_not_copied", drafter=address, reason=error.reason)
            for _ in range(lane.waiting.qsize()):
                self._on_copy("failed")
        finally:
            del self._lanes[address]
            lane.idle.set()


async def _next_text(lane: _Lane) -> "tuple[str, array[int]] | None":
    """None: none came for a while."""
    try:
        async with asyncio.timeout(_UNUSED_TIMEOUT_S):
            return await lane.waiting.get()
    except TimeoutError:
        return None if lane.waiting.empty() else lane.waiting.get_nowait()


async def _failure_of(feed: Feed, pool_id: str, text: "array[int]") -> str:
    """Feeds a text; "": the pool has it."""
    try:
        await feed(pool_id, text)
    except PoolFeedError as error:
        return error.reason
    return ""
