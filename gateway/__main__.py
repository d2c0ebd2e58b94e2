"""`python -m gateway`: runs one gateway until SIGTERM or SIGINT."""

import gc
import os
import sys

from prometheus_client import CollectorRegistry

from gateway.config import SERVICE, GatewayConfig
from gateway.server import GatewayServer
from servicekit.config import load_config, warn_of_unknown_variables
from servicekit.logs import configure_logs, get_logger
from servicekit.serving.process import end, open_standard_streams, run, serve_until_signalled
from servicekit.telemetry.tracing import tracing

# The event loop waits this long while a thread detokenises; the default is 5 ms.
_SWITCH_INTERVAL_S = 0.0005


async def serve(config: GatewayConfig) -> None:
    """Serves until signalled; ready once a verifier is connected."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with tracing(SERVICE, os.environ) as spans:
        gateway = GatewayServer(
            config, registry=CollectorRegistry(), logger=get_logger(SERVICE), spans=spans
        )
        try:
            await gateway.start()
            # Objects loaded so far live as long as the process: every garbage collection would
            # scan them and block the event loop.
            gc.freeze()
            await gateway.wait_until_serving()
            await serve_until_signalled(
                gateway.server,
                drain=gateway.drain,
                ready_line=gateway.ready_line,
                failed=gateway.failed,
            )
        finally:
            await gateway.stop()


def main() -> int:
    """Runs the process; returns its exit code."""
    open_standard_streams()
    config = load_config(GatewayConfig, service=SERVICE)
    configure_logs(config.server.log_level, SERVICE)
    warn_of_unknown_variables(GatewayConfig, service=SERVICE, logger=get_logger(SERVICE))
    return run(lambda: serve(config))


if __name__ == "__main__":
    end(main())
