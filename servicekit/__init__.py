"""Plumbing that every gRPC service needs and that belongs to none of them.

Knows nothing of what the services do: it could be its own project.

    process         signals, drain and exit code of a server process
    client_waits    ends calls whose clients do not read; at a drain, those that await a message
    server          its listening ports; grpc_stop stops one of them
    interceptors/   request ids, RPC metrics, bounds and errors, around every call
    message_limits  limits that .proto files state, enforced; unknown_fields finds what they lack
    kernels/        compiles and caches numeric kernels; needs numba, so not every service has it
    health, probe   grpc.health.v1, and a command that asks it
    metrics         the Prometheus endpoint; tally_histogram is a fast histogram for it
    channel         client channels that notice a dead peer; peer_stream keeps one stream open on it
    renewed_channel a channel whose calls use the certificate that the files hold now
    watched_files   files that are read again when they change
    discovery       the replicas that DNS names stand for
    tls             credentials from files; plaintext only on loopback or where a flag allows it
    tracing, spans  OpenTelemetry, where it is on; trace_context is the caller's span
    config          flags, environment and YAML into one validated model; yaml_file reads
                    what operators write
    errors          domain exceptions to gRPC statuses and back
    shares          how much of a room one of several parties may take
    cores           how many this process may use; control_groups finds the groups that limit it
    address, limits, logs; listening_socket is a TCP port that serves both families, as gRPC's do;
                    progress_log has log lines that say how far a long start is
"""

import os

#: Of Tandem; pyproject.toml has the same.
VERSION = "0.1.0"

# By default gRPC's core writes a line to stderr for every connection that ends. It reads this
# variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
