"""Connects the other ranks to rank 0, through torchrun's store.

Rank 0 listens on loopback and puts its port and a token into the store; it accepts only peers with
that token. The same store then serves torch.distributed.
"""

import contextlib
import datetime
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from servicekit.config import ConfigError
from verifier.tensor_parallel.connection import Connection, Kind, read_frame
from verifier.tensor_parallel.launch import Launch

_KEY = "tandem/rank0"
_HOST = "127.0.0.1"

# The slowest process has imported everything by then.
_START_TIMEOUT_S = 300.0
_HELLO_TIMEOUT_S = 5.0
_POLL_S = 0.2


def torchrun_store(launch: Launch) -> Any:
    """The store of this start; a restart by torchrun has another one."""
    rendezvous = dist.rendezvous(  # type: ignore[attr-defined]
        "env://",
        launch.rank,
        launch.size,
        timeout=datetime.timedelta(seconds=_START_TIMEOUT_S),
    )
    store, _, _ = next(rendezvous)
    return store


def accept_ranks(
    store: Any, launch: Launch, *, on_lost: Callable[[str], None], is_ending: Callable[[], bool]
) -> dict[int, Connection]:
    """Rank 0's connections to all others, by rank.

    Args:
        is_ending: polled while waiting; true ends the wait.

    Raises:
        ConfigError: a rank did not connect.
    """
    token = secrets.token_hex(16)
    connections: dict[int, Connection] = {}
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    with socket.create_server((_HOST, 0), backlog=launch.size) as listener:
        listener.settimeout(_POLL_S)
        store.set(_KEY, json.dumps([listener.getsockname()[1], token]))
        while len(connections) < launch.size - 1:
            if is_ending() or time.monotonic() > deadline_s:
                for connection in connections.values():
                    connection.close()
                missing = set(range(1, launch.size)) - connections.keys()
                raise ConfigError(
                    "--tensor-parallel-size",
                    f"{launch.size}: nothing was heard of rank {min(missing)}",
                )
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            rank = _greeted_rank(peer, token)
            if rank is None or rank in connections:
                peer.close()
                continue
            connections[rank] = Connection(_ready(peer), peer_rank=rank, on_lost=on_lost)
    return connections


def connect_to_rank_0(store: Any, launch: Launch, *, on_lost: Callable[[str], None]) -> Connection:
    """Another rank's connection to rank 0.

    Raises:
        ConfigError: rank 0 cannot be reached.
    """
    try:
        port, token = json.loads(store.get(_KEY))
        peer = socket.create_connection((_HOST, port), timeout=_HELLO_TIMEOUT_S)
    except (dist.DistError, OSError) as error:
        raise ConfigError(
            "--tensor-parallel-size", f"{launch.size}: rank 0 cannot be reached: {error}"
        ) from error
    connection = Connection(_ready(peer), peer_rank=0, on_lost=on_lost)
    connection.send(Kind.HELLO, rank=launch.rank, token=token)
    return connection


def _greeted_rank(peer: socket.socket, token: str) -> int | None:
    # Any process on this machine may connect and send anything.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        hello = read_frame(peer, until_s=time.monotonic() + _HELLO_TIMEOUT_S)
        if hello is None or hello.kind is not Kind.HELLO:
            return None
        if secrets.compare_digest(hello.values["token"], token):
            return int(hello.values["rank"])
    return None


def _ready(peer: socket.socket) -> socket.socket:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer
