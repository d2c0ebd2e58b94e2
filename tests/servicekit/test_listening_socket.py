"""Listening sockets: who reaches them."""

import asyncio
import socket

import pytest

from servicekit.address import parse_address
from servicekit.listening_socket import listening_socket

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=20).close()
    except ConnectionRefusedError:
        return False
    return True


WILDCARDS = pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])


@needs_ipv6
def test_another_address_is_reached_by_its_own_family_alone() -> None:
    with listening_socket(parse_address("127.0.0.1:0"), backlog=5) as listener:
        port = listener.getsockname()[1]
        assert reaches("127.0.0.1", port)
        assert not reaches("::1", port)


@WILDCARDS
def test_a_machine_without_ipv6_serves_ipv4(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listening_socket(parse_address(listen), backlog=5) as listener:
        assert reaches("127.0.0.1", listener.getsockname()[1])


async def test_its_connections_send_small_messages_at_once() -> None:
    accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: socket.socket = writer.get_extra_info("socket")
        accepted.set_result(bool(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        writer.close()

    listener = listening_socket(parse_address("127.0.0.1:0"), backlog=5)
    async with await asyncio.start_server(accept, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 20)
        writer.close()
