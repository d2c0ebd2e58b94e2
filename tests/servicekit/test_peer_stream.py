"""Reconnecting: a stream that lasted is replaced at once, one that broke early is not.

Why a peer was not up in time.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import trustme

from servicekit.channels.channel import open_channel
from servicekit.channels.peer_stream import PeerError, PeerStream
from servicekit.config import ChannelOptions
from servicekit.logs import Logger, get_logger


@pytest.fixture
def logger() -> Logger:
    """A logger whose lines nobody reads."""
    return get_logger("test")


class EndedCall:
    def cancel(self) -> bool:
        return True


class Refusing:
    """A handler whose peer ends every stream after `lasts_s` of a simulated clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lasts_s: float) -> None:
        self.now_s = 0.0
        self.lasts_s = lasts_s
        loop.time = lambda: self.now_s  # type: ignore[method-assign]

    async def greet(self, call: object) -> None:
        self.now_s += self.lasts_s
        raise PeerError("not now")

    def on_up(self) -> None: ...

    def next_request(self) -> None: ...

    def on_response(self, response: object) -> None: ...

    def on_down(self, reason: str) -> None: ...

    def on_unreachable(self, reason: str) -> None: ...


class SilentCall(EndedCall):
    """Its peer says nothing."""

    async def read(self) -> None:
        await asyncio.get_running_loop().create_future()


class Greeted:
    """A handler whose peer greets and then says nothing."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.reasons: asyncio.Queue[str] = asyncio.Queue()

    async def greet(self, call: object) -> None: ...

    def on_up(self) -> None:
        self.up.set()

    def next_request(self) -> None: ...

    def on_response(self, response: object) -> None: ...

    def on_down(self, reason: str) -> None:
        self.reasons.put_nowait(reason)

    def on_unreachable(self, reason: str) -> None: ...


async def test_a_stream_that_is_to_fail_ends_though_its_peer_is_silent(logger: Logger) -> None:
    handler = Greeted()
    stream = PeerStream[Any, Any](
        channel=cast(Any, None),
        open_call=lambda **_: cast(Any, SilentCall()),
        handler=handler,
        greet_timeout_s=20.0,
        on_internal_error=lambda error: pytest.fail(repr(error)),
        logger=logger,
    )
    running = asyncio.ensure_future(stream.run())
    async with asyncio.timeout(20):
        await handler.up.wait()
        await asyncio.sleep(0)
        for reason in ("too late", "too late again"):
            stream.fail(PeerError(reason))
        assert await handler.reasons.get() == "too late"
    running.cancel()
    await asyncio.wait([running])
    assert handler.reasons.empty()


async def pauses_between_streams(
    lasts_s: float, monkeypatch: pytest.MonkeyPatch, logger: Logger
) -> list[float]:
    """The first four pauses of a stream whose peer ends each after `lasts_s`."""
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    loop = asyncio.get_running_loop()
    time = loop.time
    stream = PeerStream[Any, Any](
        channel=cast(Any, None),
        open_call=lambda **_: cast(Any, EndedCall()),
        handler=Refusing(loop, lasts_s),
        greet_timeout_s=1000.0,
        on_internal_error=lambda error: pytest.fail(repr(error)),
        logger=logger,
    )
    with monkeypatch.context() as patch, contextlib.suppress(asyncio.CancelledError):
        patch.setattr(asyncio, "sleep", sleep)
        try:
            await stream.run()
        finally:
            loop.time = time  # type: ignore[method-assign]
    return pauses


async def test_a_peer_that_ends_every_stream_at_once_is_called_twice_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch, logger: Logger
) -> None:
    pauses = await pauses_between_streams(0.0, monkeypatch, logger)
    assert all(0.5 <= pause_s <= 1 for pause_s in pauses)
    assert len(set(pauses)) == 4, "gateways do not call at the same times"


async def test_a_stream_that_lasted_is_replaced_at_once(
    monkeypatch: pytest.MonkeyPatch, logger: Logger
) -> None:
    pauses = await pauses_between_streams(2.0, monkeypatch, logger)
    assert all(pause_s <= 0 for pause_s in pauses)


class Unreached(Greeted):
    """A handler that tells why its peer was not reached."""

    async def greet(self, call: Any) -> None:
        await call.read()

    def on_unreachable(self, reason: str) -> None:
        self.reasons.put_nowait(reason)


async def reason_unreached(address: str, options: ChannelOptions, logger: Logger) -> str:
    handler = Unreached()
    async with open_channel(address, options) as channel:
        stream = PeerStream[Any, Any](
            channel=channel,
            open_call=channel.stream_stream("/test.v1.Peer/Session"),
            handler=handler,
            greet_timeout_s=0.5,
            on_internal_error=lambda error: pytest.fail(repr(error)),
            logger=logger,
        )
        running = asyncio.ensure_future(stream.run())
        try:
            async with asyncio.timeout(20):
                return await handler.reasons.get()
        finally:
            running.cancel()
            await asyncio.wait([running])


@contextlib.asynccontextmanager
async def silent_peer(credentials: grpc.ServerCredentials | None) -> AsyncIterator[str]:
    """A server that accepts streams and says nothing on them."""

    async def say_nothing(requests: object, context: object) -> None:
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(say_nothing)
    server.add_registered_method_handlers("test.v1.Peer", {"Session": handler})
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_connection_that_fails_for_its_tls_is_told_from_a_peer_that_is_silent(
    logger: Logger, tmp_path: Path
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    ca, other_ca, chain, key = (tmp_path / name for name in ("ca", "other-ca", "chain", "key"))
    authority.cert_pem.write_to_path(ca)
    stranger.cert_pem.write_to_path(other_ca)
    own.cert_chain_pems[0].write_to_path(chain)
    own.private_key_pem.write_to_path(key)
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), chain.read_bytes())], ca.read_bytes(), require_client_auth=True
    )
    known = ChannelOptions(peer_tls_ca=ca, peer_tls_cert=chain, peer_tls_key=key)
    distrustful = known.model_copy(update={"peer_tls_ca": other_ca})
    anonymous, plaintext = ChannelOptions(peer_tls_ca=ca), ChannelOptions()
    async with silent_peer(credentials) as address, silent_peer(None) as plain:
        for reached, options in ((address, known), (plain, plaintext)):
            assert await reason_unreached(reached, options, logger) == "no answer within 0.5 s"
        unreached = (
            (address, plaintext, "Socket closed"),
            (address, anonymous, "Socket closed"),
            (address, distrustful, "CERTIFICATE_VERIFY_FAILED"),
            (plain, anonymous, "WRONG_VERSION_NUMBER"),
            ("127.0.0.1:1", plaintext, "Connection refused"),
        )
        reasons = await asyncio.gather(
            *(reason_unreached(each, options, logger) for each, options, _ in unreached)
        )
        for (_, _, why), reason in zip(unreached, reasons, strict=True):
            assert reason.startswith("not connected within 0.5 s, ")
            assert why in reason
            assert "--peer-tls" in reason


async def test_a_peer_that_lets_a_connection_hang_is_not_connected(logger: Logger) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        reason = await reason_unreached(address, ChannelOptions(), logger)
    assert reason == "not connected within 0.5 s"
