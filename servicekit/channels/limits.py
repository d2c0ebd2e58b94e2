"""Message sizes and keepalive, which both ends of a connection must agree on.

Owns the values; `server` and `channel` apply them.
"""

#: The largest message that services accept.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

#: The largest message that the transport accepts. gRPC answers a larger one with
#: RESOURCE_EXHAUSTED, which callers read as overload. So a service itself refuses a message within
#: this margin, with INVALID_ARGUMENT and the name of the field.
MAX_RECEIVE_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024

_PING_INTERVAL_MS = 10_000
_PING_TIMEOUT_MS = 5_000

#: A peer that stops without closing its connections (a frozen process, a cut cable) is noticed
#: within the sum of the two. Without `ping_timeout_ms`, keepalive was measured to wait far longer.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Keeps checking idle connections: by default gRPC stops after two pings without traffic.
    ("grpc.http2.max_pings_without_data", 0),
)

#: A server closes a connection that pings more often than this; clients that go on elsewhere ping
#: every 0.8 s.
PING_TOLERANCE: tuple[tuple[str, int], ...] = (
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
)
