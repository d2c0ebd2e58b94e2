"""Channels that follow their certificate's files, for both clients.

gRPC fixes a channel's credentials when it is made, and authenticates a connection once, when it
begins. Here, once the files have changed, the next call begins on a new channel. Calls in flight
end on the old one, which is closed when a call begins after the last of them. So a client outlives
its certificate.

Owns the channels of one target. Knows no service.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import grpc

ChannelT = TypeVar("ChannelT")

#: How often the files are looked at, at most, in seconds.
CHECK_INTERVAL_S = 1.0

# A file's device, inode, size and time of change; None: it cannot be found.
_Stamp = tuple[int, int, int, int] | None


class _Opened(Generic[ChannelT]):
    """One of gRPC's channels, and how many calls it has."""

    def __init__(self, channel: ChannelT) -> None:
        self.channel = channel
        self.num_calls = 0


class _Renewal(Generic[ChannelT]):
    """Which channel a call begins on; threads may share it."""

    def __init__(
        self,
        files: Sequence[Path],
        open_channel: Callable[[], ChannelT],
        check: Callable[[], None],
        close: Callable[[ChannelT], None],
    ) -> None:
        """Opens the first channel.

        Args:
            files: what `open_channel` and `check` read.
            open_channel: makes a channel; raises OSError while a file cannot be read.
            check: raises OSError while the files do not belong together, as when only some of them
                have been replaced.
            close: closes one without calls; returns at once.
        """
        self._files = files
        self._open_channel = open_channel
        self._check = check
        self._close = close
        self._lock = threading.Lock()
        self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
        # Taken before reading, so that a change during it is noticed later.
        self._stamps = self._stamp()
        self._current = _Opened(open_channel())
        self._retired: set[_Opened[ChannelT]] = set()

    @property
    def channel(self) -> ChannelT:
        """The one that calls begin on now."""
        return self._current.channel

    def begin(self) -> _Opened[ChannelT]:
        """The channel of a call that begins now, and must `end`."""
        with self._lock:
            self._renew()
            opened = self._current
            opened.num_calls += 1
            # Not where the last call ends: there a thread of gRPC would wait for itself.
            idle = [each for each in self._retired if not each.num_calls]
            self._retired.difference_update(idle)
        for each in idle:
            self._close(each.channel)
        return opened

    def end(self, opened: _Opened[ChannelT]) -> None:
        """A call is over."""
        with self._lock:
            opened.num_calls -= 1

    def take_all(self) -> list[ChannelT]:
        """All channels, which the caller closes."""
        with self._lock:
            opened = [self._current, *self._retired]
            self._retired.clear()
        return [each.channel for each in opened]

    def _renew(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        stamps = self._stamp()
        if stamps == self._stamps:
            return
        try:
            self._check()
            renewed = _Opened(self._open_channel())
        except OSError:
            # Just being replaced: the last ones are used until they can be read.
            return
        if self._stamp() != stamps:
            # Replaced meanwhile: what was read may be none of what was checked.
            self._close(renewed.channel)
            return
        self._stamps = stamps
        self._retired.add(self._current)
        self._current = renewed

    def _stamp(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp_of(path) for path in self._files)


class RenewedChannel(grpc.Channel):
    """A grpc.Channel for generated stubs; threads may share it."""

    def __init__(
        self,
        files: Sequence[Path],
        open_channel: Callable[[], grpc.Channel],
        *,
        check: Callable[[], None],
    ) -> None:
        """See `_Renewal`."""
        self._renewal = _Renewal(
            files, open_channel, check=check, close=lambda channel: channel.close()
        )

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        def call(*call_arguments: Any, **call_options: Any) -> Any:
            opened = self._renewal.begin()
            try:
                method: Any = opened.channel.unary_unary(*arguments, **options)
                return method(*call_arguments, **call_options)
            finally:
                self._renewal.end(opened)

        return call

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._stream("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("no service of Tandem has such a method")

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._stream("stream_stream", arguments, options)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        self._renewal.channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        self._renewal.channel.unsubscribe(callback)

    def close(self) -> None:
        for channel in self._renewal.take_all():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, shape: str, arguments: Any, options: Any) -> Callable[..., Any]:
        def call(*call_arguments: Any, **call_options: Any) -> Any:
            opened = self._renewal.begin()
            begun = None
            try:
                method = getattr(opened.channel, shape)(*arguments, **options)
                begun = method(*call_arguments, **call_options)
                return begun
            finally:
                # Not called back: it did not begin, or is over already.
                if begun is None or not begun.add_callback(lambda: self._renewal.end(opened)):
                    self._renewal.end(opened)

        return call


class RenewedAsyncChannel(grpc.aio.Channel):
    """A grpc.aio.Channel for generated stubs; on the event loop."""

    def __init__(
        self,
        files: Sequence[Path],
        open_channel: Callable[[], grpc.aio.Channel],
        *,
        check: Callable[[], None],
    ) -> None:
        """See `_Renewal`."""
        self._renewal = _Renewal(files, open_channel, check=check, close=self._close_soon)
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
        return self._renewal.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._renewal.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._renewal.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for channel in self._renewal.take_all():
            await channel.close(grace)
        await asyncio.gather(*self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _begin(self, shape: str, arguments: Any, options: Any) -> Callable[..., Any]:
        def call(*call_arguments: Any, **call_options: Any) -> Any:
            opened = self._renewal.begin()
            begun = None
            try:
                method = getattr(opened.channel, shape)(*arguments, **options)
                begun = method(*call_arguments, **call_options)
                begun.add_done_callback(lambda _: self._renewal.end(opened))
                return begun
            finally:
                if begun is None:
                    self._renewal.end(opened)

        return call

    def _close_soon(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _stamp_of(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
