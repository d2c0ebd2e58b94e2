"""`python -m drafter`: runs one drafter until SIGTERM or SIGINT."""

import asyncio
import gc
import os

from prometheus_client import CollectorRegistry

from drafter.config import SERVICE, DrafterConfig
from drafter.server import DrafterServer
from servicekit.config import load_config, warn_of_unknown_variables
from servicekit.logs import configure_logs, get_logger
from servicekit.serving.process import end, open_standard_streams, run, serve_until_signalled
from servicekit.telemetry.tracing import tracing


async def serve(config: DrafterConfig) -> None:
    """Serves until signalled, or until the upkeep fails."""
    with tracing(SERVICE, os.environ) as spans:
        drafter = DrafterServer(
            config, registry=CollectorRegistry(), logger=get_logger(SERVICE), spans=spans
        )
        await drafter.start()
        # The compiler's hundred thousand objects live as long as the process: each collection would
        # traverse them and stop the event loop for tens of milliseconds.
        gc.freeze()
        upkeep = asyncio.create_task(drafter.run_forever())
        try:
            await serve_until_signalled(drafter.server, drain=drafter.drain, failed=upkeep)
        finally:
            upkeep.cancel()


def main() -> int:
    """Runs the process; returns its exit code."""
    open_standard_streams()
    config = load_config(DrafterConfig, service=SERVICE)
    configure_logs(config.server.log_level, SERVICE)
    warn_of_unknown_variables(DrafterConfig, service=SERVICE, logger=get_logger(SERVICE))
    return run(lambda: serve(config))


if __name__ == "__main__":
    end(main())
