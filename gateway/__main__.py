"""`python -m gateway`: runs one gateway until SIGTERM or SIGINT."""

import gc
import sys

from prometheus_client import CollectorRegistry

from gateway.config import SERVICE, GatewayConfig
from gateway.server import GatewayServer
from servicekit.config import load_config
from servicekit.logs import configure_logs, get_logger
from servicekit.process import run, serve_until_signalled

# While a thread makes text of tokens, hints wait for their turn: 5 ms by default.
_SWITCH_INTERVAL_S = 0.0005


async def serve(config: GatewayConfig) -> None:
    """Serves, once a verifier is connected, until signalled."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gateway = GatewayServer(config, registry=CollectorRegistry(), logger=get_logger(SERVICE))
    try:
        await gateway.start()
        # What was loaded lives as long as the process: looking through it again and again would
        # stop the event loop each time.
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
    config = load_config(GatewayConfig, service=SERVICE)
    configure_logs(config.server.log_level, SERVICE)
    return run(lambda: serve(config))


if __name__ == "__main__":
    sys.exit(main())
