"""A client that announces large requests and sends as much of them as the server's windows take."""

import asyncio
import struct

from tests.drills.http2_flood import (
    ACK,
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    call_headers,
    frame,
)

_RST_STREAM, _PING, _WINDOW_UPDATE = 3, 6, 8
_FIRST_WINDOW = 65_535
_FRAME_BYTES = 16_384
_INITIAL_WINDOW_SIZE = 4


async def bytes_taken(
    address: str, method: str, *, num_calls: int, message_bytes: int, enough: int, quiet_s: float
) -> int:
    """How many bytes of all requests together the server takes, each of them but for its last byte.

    Args:
        enough: ends when it has taken more.
        quiet_s: ends when it has taken none for so long.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = call_headers(address, method)
    streams = range(1, 2 * num_calls, 2)
    windows = dict.fromkeys((0, *streams), _FIRST_WINDOW)
    first_window = _FIRST_WINDOW
    left = {stream: struct.pack(">BI", 0, message_bytes) for stream in streams}
    num_left = dict.fromkeys(streams, 5 + message_bytes - 1)
    taken = 0
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
    writer.write(b"".join(frame(HEADERS, END_HEADERS, stream, headers) for stream in streams))
    try:
        while taken <= enough:
            for stream in tuple(num_left):
                count = min(windows[0], windows[stream], num_left[stream], _FRAME_BYTES)
                if count < 5:
                    continue
                payload = left.pop(stream, b"")
                writer.write(frame(DATA, 0, stream, payload.ljust(count, b"\0")))
                windows[0] -= count
                windows[stream] -= count
                num_left[stream] -= count
                taken += count
            await writer.drain()
            try:
                async with asyncio.timeout(quiet_s):
                    header = await reader.readexactly(9)
            except TimeoutError:
                break
            payload = await reader.readexactly(int.from_bytes(header[:3]))
            kind, flags, stream = header[3], header[4], int.from_bytes(header[5:])
            if kind == SETTINGS and not flags & ACK:
                writer.write(frame(SETTINGS, ACK, 0, b""))
                for name, value in struct.iter_unpack(">HI", payload):
                    if name == _INITIAL_WINDOW_SIZE:
                        for each in streams:
                            windows[each] += value - first_window
                        first_window = value
            elif kind == _PING and not flags & ACK:
                writer.write(frame(_PING, ACK, 0, payload))
            elif kind == _WINDOW_UPDATE:
                windows[stream] += int.from_bytes(payload)
            elif kind in (HEADERS, _RST_STREAM):
                num_left.pop(stream, None)  # it was refused
    finally:
        writer.close()
    return taken
