"""The socket between rank 0 and another rank: carries steps, and shows a lost peer to either end.

A frame is its kind and its length (two little-endian uint32), then that many bytes. A thread reads,
so that the end of the peer is noticed at once, whatever this process is doing. A plain socket has
no timeout: hours may pass between two steps.
"""

import contextlib
import enum
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("<II")
_MAX_FRAME_BYTES = 1 << 28
_MAX_HELLO_BYTES = 4096


class Kind(enum.IntEnum):
    HELLO = 1  # to rank 0, first: the sender's rank
    LOAD = 2  # from rank 0: load now
    LOADED = 3  # to rank 0: the loaded model's identity
    BEGIN = 4  # from rank 0: values that all ranks must have in common
    STEP = 5  # from rank 0: a layout
    STOP = 6  # from rank 0: end in order
    FAILED = 7  # both ways: the sender is ending, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    kind: Kind
    payload: bytes

    @property
    def values(self) -> dict[str, Any]:
        """The payload of all kinds but STEP."""
        values: dict[str, Any] = json.loads(self.payload or b"{}")
        return values


class RankLostError(Exception):
    """Another rank is lost; the replica cannot go on without it."""


class Connection:
    """One end. `send` is for any thread, `receive` for one.

    Args:
        peer_rank: the rank at the other end.
        on_lost: called once, by the reading thread, with the reason, when the connection ends
            without a STOP and without `close` here.
    """

    def __init__(
        self, peer: socket.socket, *, peer_rank: int, on_lost: Callable[[str], None]
    ) -> None:
        self._socket = peer
        self._peer_rank = peer_rank
        self._on_lost = on_lost
        self._is_ending = False
        self._sending = threading.Lock()
        # Bounded by the protocol: rank 0 sends a step only after it has computed the one before.
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reason = ""
        self._reader = threading.Thread(target=self._read, name=f"rank{peer_rank}", daemon=True)
        self._reader.start()

    def send(self, kind: Kind, payload: bytes = b"", **values: Any) -> None:
        """Sends one frame. A lost peer is reported by `on_lost`, not here."""
        if values:
            payload = json.dumps(values).encode()
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(_HEADER.pack(kind, len(payload)) + payload)

    def receive(self) -> Message:
        """The next message; waits without a timeout.

        Raises:
            RankLostError: the connection has ended.
        """
        message = self._inbox.get()
        if message is None:
            self._inbox.put(None)  # for the next call
            raise RankLostError(self._reason)
        return message

    def close(self) -> None:
        """Ends the connection, which the peer notices. Idempotent."""
        self._is_ending = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Tells the peer to end in order."""
        self._is_ending = True
        self.send(Kind.STOP)

    def wait_closed(self, timeout_s: float) -> None:
        """Waits until the peer has ended, then ends the connection."""
        self._reader.join(timeout_s)
        self.close()

    def _read(self) -> None:
        reason = f"rank {self._peer_rank} is gone"
        with contextlib.suppress(OSError, ValueError):
            while (message := read_frame(self._socket, _MAX_FRAME_BYTES)) is not None:
                if message.kind is Kind.FAILED:
                    reason = f"rank {self._peer_rank} failed: {message.values['message']}"
                    break
                if message.kind is Kind.STOP:
                    self._is_ending = True
                self._inbox.put(message)
        self._reason = reason
        if not self._is_ending:
            self._on_lost(reason)
        self._inbox.put(None)
        self._socket.close()


def read_frame(
    source: socket.socket, max_bytes: int = _MAX_HELLO_BYTES, *, until_s: float | None = None
) -> Message | None:
    """One frame; None at the end of the stream.

    Args:
        until_s: when the whole frame must be there, by the monotonic clock. None: never.

    Raises:
        OSError: the connection broke.
        ValueError: what came is no frame.
    """
    header = _read_exactly(source, _HEADER.size, until_s)
    if header is None:
        return None
    kind, num_bytes = _HEADER.unpack(header)
    if num_bytes > max_bytes:
        raise ValueError(f"a frame of {num_bytes} bytes")
    payload = _read_exactly(source, num_bytes, until_s)
    return None if payload is None else Message(kind=Kind(kind), payload=bytes(payload))


def _read_exactly(source: socket.socket, num_bytes: int, until_s: float | None) -> bytearray | None:
    read = bytearray(num_bytes)
    view = memoryview(read)
    while view:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            source.settimeout(left_s)
        count = source.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return read
