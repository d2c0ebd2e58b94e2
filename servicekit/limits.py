"""What both ends of a connection must agree on: message sizes and keepalive.

Owns the figures; `server` and `channel` apply them.
"""

#: The largest message that the services' own rules let pass.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

#: What the transport still takes. gRPC answers a larger message with RESOURCE_EXHAUSTED, which
#: callers read as overload; the margin lets a service refuse what is slightly too large itself,
#: with INVALID_ARGUMENT and the name of the field.
MAX_RECEIVE_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024

_PING_INTERVAL_MS = 10_000
_PING_TIMEOUT_MS = 5_000

#: A peer that is stopped, not closed (a frozen process, a cut cable), is noticed within the sum of
#: the two: without `ping_timeout_ms` keepalive alone was seen to wait far longer.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Idle connections keep being checked: without this gRPC stops after two pings without traffic.
    ("grpc.http2.max_pings_without_data", 0),
)

#: A server takes pings from clients at twice the agreed rate before it calls them a flood.
PING_TOLERANCE: tuple[tuple[str, int], ...] = (
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS // 2),
)
