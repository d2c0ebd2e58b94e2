"""Plumbing that every gRPC service needs and that belongs to none of them.

Knows nothing of what the services do: it could be its own project.

    serving/        a server process: `process` has its signals, drain and exit code, `server` its
                    listening ports; `client_waits` ends calls whose clients do not read
    interceptors/   request ids, RPC metrics, bounds and errors, around every call
    channels/       client channels that notice a dead peer and use the certificate that the files
                    hold now; `peer_stream` keeps one stream open; `discovery` finds replicas by DNS
    telemetry/      the Prometheus endpoint and fast histograms for it; spans where they are on
    kernels/        compiles and caches numeric kernels; needs numba, so not every service has it
    gguf/           a GGUF file as the folder of documents that models are read from
    message_limits  limits that .proto files state, enforced; unknown_fields finds what they lack
    probe           a command that asks a server for its health
    config          flags, environment and YAML into one validated model; yaml_file reads
                    what operators write
    errors          domain exceptions to gRPC statuses and back
    shares          how much of a room one of several parties may take
    cores           how many this process may use; control_groups finds the groups that limit it
    address, logs   listening_socket is a TCP port that serves both families, as gRPC's do;
                    progress_log has log lines that say how far a long start is
"""

import os

#: Of Tandem; pyproject.toml has the same.
VERSION = "0.1.0"

# By default gRPC's core writes a line to stderr for every connection that ends. It reads this
# variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
