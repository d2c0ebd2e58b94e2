"""A blocking client with the methods of an asyncio client, so that one test covers both."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from tandem.client import DraftedSequence, DrafterClient, Event, TandemClient


class InThread:
    """Runs each call of a blocking client in a thread; the server runs in the test's loop."""

    def __init__(self, client: TandemClient | DrafterClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.client, name)
        return lambda *args, **options: asyncio.to_thread(method, *args, **options)

    def open(self, **options: Any) -> DraftedSequence:
        """A drafter client's only method that does not call the server."""
        assert isinstance(self.client, DrafterClient)
        return self.client.open(**options)

    async def stream(self, *args: Any, **options: Any) -> AsyncIterator[Event]:
        """The events of a gateway's client."""
        assert isinstance(self.client, TandemClient)
        events = self.client.stream(*args, **options)
        try:
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                yield event
        finally:
            await asyncio.to_thread(events.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
