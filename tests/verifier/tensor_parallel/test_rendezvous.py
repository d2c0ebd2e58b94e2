"""How ranks connect, and how their connections report an end."""

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from tests.verifier.tensor_parallel.parallel_verifier import PATIENCE_S
from verifier.tensor_parallel import rendezvous
from verifier.tensor_parallel.connection import Connection, Kind, RankLostError
from verifier.tensor_parallel.launch import Launch
from verifier.tensor_parallel.rendezvous import accept_ranks, connect_to_rank_0

LEADER, FOLLOWER = (Launch(rank=rank, size=2) for rank in range(2))


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    frame(Kind.HELLO, b"not JSON"),
    frame(Kind.HELLO, b"[]"),
    frame(Kind.HELLO, b"{}"),
    frame(Kind.HELLO, json.dumps({"rank": 1, "token": "guessed"}).encode()),
    frame(Kind.FAILED, json.dumps({"message": "x"}).encode()),
    frame(99, b""),
    frame(Kind.HELLO, b"[" * 4000),
    struct.pack("<II", Kind.HELLO, 2**32 - 1),
]


@dataclass
class Pair:
    leader: Connection
    follower: Connection
    leader_lost: "queue.SimpleQueue[str]"
    follower_lost: "queue.SimpleQueue[str]"


@contextlib.contextmanager
def connected(strangers: list[bytes]) -> Iterator[Pair]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    leader_lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    follower_lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(
            accept_ranks, store, LEADER, on_lost=leader_lost.put, is_ending=lambda: False
        )
        port, _ = json.loads(store.get("tandem/rank0"))
        for said in strangers:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
        follower = connect_to_rank_0(store, FOLLOWER, on_lost=follower_lost.put)
        [(rank, leader)] = accepting.result(PATIENCE_S).items()
    assert rank == 1
    try:
        yield Pair(leader, follower, leader_lost, follower_lost)
    finally:
        for connection in (leader, follower):
            connection.close()
            connection.wait_closed(PATIENCE_S)


def test_peers_without_the_token_are_disconnected() -> None:
    with connected(STRANGERS) as pair:
        pair.leader.send(Kind.STEP, b"1234")
        message = pair.follower.receive()
        assert (message.kind, message.payload) == (Kind.STEP, b"1234")
        pair.follower.send(Kind.LOADED, num_kv_blocks=7)
        assert pair.leader.receive().values == {"num_kv_blocks": 7}


def test_a_peer_that_sends_byte_by_byte_holds_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_HELLO_TIMEOUT_S", 0.2)
    create_server = socket.create_server
    is_over = threading.Event()

    def with_a_stranger_first(address: tuple[str, int], **options: Any) -> socket.socket:
        listener = create_server(address, **options)
        stranger = socket.create_connection(listener.getsockname())
        stranger.sendall(struct.pack("<II", Kind.HELLO, 4000))

        def drip() -> None:
            with stranger, contextlib.suppress(OSError):
                while not is_over.wait(0.05):
                    stranger.sendall(b"x")

        threading.Thread(target=drip).start()
        return listener

    monkeypatch.setattr(socket, "create_server", with_a_stranger_first)
    try:
        with connected([]) as pair:
            pair.leader.send(Kind.STEP, b"1234")
            assert pair.follower.receive().payload == b"1234"
    finally:
        is_over.set()


def test_a_closed_connection_is_a_lost_rank() -> None:
    with connected([]) as pair:
        pair.follower.send(Kind.LOADED)
        pair.follower.close()
        assert pair.leader_lost.get(timeout=PATIENCE_S) == "rank 1 is gone"
        assert pair.leader.receive().kind is Kind.LOADED
        for _ in range(2):
            with pytest.raises(RankLostError, match="rank 1 is gone"):
                pair.leader.receive()
        pair.leader.send(Kind.STEP, b"nobody reads it")
    assert pair.follower_lost.empty(), "it closed the connection itself"


def test_a_failing_rank_sends_its_reason() -> None:
    with connected([]) as pair:
        pair.leader.send(Kind.FAILED, message="no room")
        assert pair.follower_lost.get(timeout=PATIENCE_S) == "rank 0 failed: no room"
        with pytest.raises(RankLostError, match="rank 0 failed: no room"):
            pair.follower.receive()


def test_an_orderly_end_does_not_count_as_a_lost_rank() -> None:
    with connected([]) as pair:
        pair.leader.stop()
        assert pair.follower.receive().kind is Kind.STOP
        pair.follower.close()
        pair.leader.wait_closed(PATIENCE_S)
    assert pair.leader_lost.empty()
    assert pair.follower_lost.empty()
