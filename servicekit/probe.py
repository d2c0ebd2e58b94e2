"""Checks the health of a server once: `python -m servicekit.probe HOST:PORT [--service NAME]`.

For container engines that can only run a command; Kubernetes makes the call itself. Exits with 0 if
the answer is SERVING, else prints one line and exits with 1. Speaks no TLS: it is for the port of
`--health-listen`.
"""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m servicekit.probe", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--service", default="", help="service to check; the server if empty")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="for the answer, in seconds")
    options = parser.parse_args(argv)
    # The environment's HTTP proxy is meant for the internet, not for services.
    arguments = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(options.address, options=arguments) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=options.service), timeout=options.timeout_s
            )
        except grpc.RpcError as error:
            print(f"{options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        print(f"{options.address}: {state}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
