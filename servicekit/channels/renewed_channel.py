"""A channel whose calls begin with the credentials that the files hold now.

gRPC fixes a channel's credentials when it is made. Here, once the files have changed, the next call
begins on a new channel. Calls in flight end on the old one, which is closed after the last of them:
a connection is authenticated once, when it begins.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import grpc

from servicekit.channels.watched_files import WatchedFiles


@dataclasses.dataclass(slots=True, eq=False)
class _Opened:
    """One of gRPC's channels."""

    channel: grpc.aio.Channel
    credentials: grpc.ChannelCredentials
    num_calls: int = 0


class RenewedChannel(grpc.aio.Channel):
    """A grpc.aio.Channel for generated stubs. Owned by the event loop's thread."""

    def __init__(
        self,
        credentials: WatchedFiles[grpc.ChannelCredentials],
        open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
    ) -> None:
        """Opens the first channel.

        Args:
            credentials: looked at when a call begins.
            open_channel: makes a channel with these credentials.
        """
        self._credentials = credentials
        self._open_channel = open_channel
        self._current = self._open()
        # The others that have calls in flight.
        self._retired: set[_Opened] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._begin("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._begin("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._begin("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._begin("stream_stream", arguments, options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for opened in (self._current, *self._retired):
            await opened.channel.close(grace)
        self._retired.clear()
        await asyncio.gather(*self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _begin(self, shape: str, arguments: Any, options: Any) -> Callable[..., Any]:
        """What calls a method: the call begins on the channel of that moment."""

        def begin(*call_arguments: Any, **call_options: Any) -> Any:
            opened = self._renewed()
            method = getattr(opened.channel, shape)(*arguments, **options)
            call = method(*call_arguments, **call_options)
            opened.num_calls += 1
            call.add_done_callback(lambda _: self._on_done(opened))
            return call

        return begin

    def _renewed(self) -> _Opened:
        self._credentials.refresh()
        if self._credentials.value is not self._current.credentials:
            old, self._current = self._current, self._open()
            self._retired.add(old)
            self._close_if_idle(old)
        return self._current

    def _open(self) -> _Opened:
        credentials = self._credentials.value
        return _Opened(self._open_channel(credentials), credentials)

    def _on_done(self, opened: _Opened) -> None:
        opened.num_calls -= 1
        self._close_if_idle(opened)

    def _close_if_idle(self, opened: _Opened) -> None:
        if opened in self._retired and not opened.num_calls:
            self._retired.discard(opened)
            task = asyncio.ensure_future(opened.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
