"""Peers of the HTTPS port that do not end their TLS handshake, or do not even begin it; and what
cannot be accepted, with TLS or without.
"""

import contextlib
import errno
import os
import socket
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.api import acceptor
from tests.gateway.running_listener import HttpsClient, Pair, Run, is_answered, until_closed
from tests.gateway.scripted_server import PATIENCE_S

# The first bytes of a TLS record with a ClientHello of 512 bytes.
BEGINNING = bytes.fromhex("1603010200010001fc0303")


@pytest.mark.parametrize("sent", [b"", BEGINNING])
def test_a_handshake_that_does_not_end_is_closed_in_time(run: Run, sent: bytes) -> None:
    async def scenario(client: HttpsClient) -> None:
        async with client.connection(has_tls=False) as (reader, writer):
            writer.write(sent)
            await until_closed(reader)
        assert await client.is_served()

    run(scenario, request_timeout_s=0.3)


def test_handshakes_count_as_connections_and_the_oldest_makes_room(run: Run) -> None:
    async def scenario(client: HttpsClient) -> None:
        async with contextlib.AsyncExitStack() as stack:

            async def connect(*, has_tls: bool) -> Pair:
                return await stack.enter_async_context(client.connection(has_tls=has_tls))

            silent, begun = await connect(has_tls=False), await connect(has_tls=False)
            begun[1].write(BEGINNING)
            served = await connect(has_tls=True)
            assert await is_answered(*served)
            another = await connect(has_tls=True)
            await until_closed(silent[0])
            assert await is_answered(*another)
            await connect(has_tls=False)
            await until_closed(begun[0])
            # The next one that waits for longest is one that was served.
            await connect(has_tls=False)
            await until_closed(served[0])
            assert await is_answered(*another)

    run(scenario, max_concurrent_calls=3, request_timeout_s=10 * PATIENCE_S)


def fail_accepting(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[float]:
    """Lets the next calls of accept raise; returns when each did, in seconds."""
    raised_at_s: list[float] = []
    accept = socket.socket.accept

    def accept_later(listener: socket.socket) -> tuple[socket.socket, Any]:
        if len(raised_at_s) == times:
            return accept(listener)
        raised_at_s.append(time.monotonic())
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    return raised_at_s


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize(
    "number", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETUNREACH]
)
def test_an_error_of_one_connection_delays_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, has_tls: bool
) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_S", 10 * PATIENCE_S)
    raised_at_s = fail_accepting(monkeypatch, number, times=150)

    async def scenario(client: HttpsClient) -> None:
        assert await client.is_served()

    with capture_logs() as log:
        run(scenario, has_tls=has_tls)
    assert len(raised_at_s) == 150
    assert not [each for each in log if each["event"] == "accepting_paused"]


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_a_lack_of_descriptors_or_memory_pauses_accepting_with_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, has_tls: bool
) -> None:
    pause_s = 0.05
    monkeypatch.setattr(acceptor, "_PAUSE_S", pause_s)
    raised_at_s = fail_accepting(monkeypatch, number, times=3)

    async def scenario(client: HttpsClient) -> None:
        assert await client.is_served()

    with capture_logs() as log:
        run(scenario, has_tls=has_tls)
    paused = [each for each in log if each["event"] == "accepting_paused"]
    assert len(paused) == len(raised_at_s) == 3
    assert all(each["log_level"] == "warning" for each in paused)
    assert all(os.strerror(number) in each["reason"] for each in paused)
    # Timers of a loop may be a clock's tick early.
    assert raised_at_s[-1] - raised_at_s[0] > 1.8 * pause_s
