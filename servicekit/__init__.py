"""Plumbing that every gRPC service needs and that belongs to none of them.

Owns configuration, the server's life cycle, TLS, channels, errors on the wire, interceptors,
health, metrics and logs. Knows nothing of what the services do: it could be its own project.

    config        flags, environment and YAML into one validated model
    server        bind, announce, serve, drain, stop
    channel       client channels that notice a dead peer
    tls           credentials from files; plaintext only where it is harmless or asked for
    address       HOST:PORT
    errors        domain exceptions to gRPC statuses and back
    interceptors  request ids, RPC metrics, errors
    health        grpc.health.v1
    metrics       the Prometheus exporter
    logs          JSON lines on stderr
"""

import os

# gRPC's core writes to stderr by itself, and reads how much when it is first imported; its remarks
# on every connection that ends do not belong between the log lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
