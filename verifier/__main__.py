"""`python -m verifier`."""

import os
import sys

from servicekit.config import ConfigError, load_config, warn_of_unknown_variables
from servicekit.logs import configure_logs, get_logger
from servicekit.serving.process import end, open_standard_streams, run
from servicekit.telemetry.tracing import tracing
from verifier.config import SERVICE, VerifierConfig
from verifier.server import serve
from verifier.tensor_parallel.launch import loopback_variables, read_launch


def main() -> int:
    open_standard_streams()
    config = load_config(VerifierConfig, service=SERVICE)
    configure_logs(config.server.log_level, SERVICE)
    warn_of_unknown_variables(VerifierConfig, service=SERVICE, logger=get_logger(SERVICE))
    try:
        launch = read_launch(os.environ, config.tensor_parallel_size)
        if launch is not None:
            os.environ.update(
                loopback_variables(os.environ, allow_plaintext=config.server.allow_plaintext)
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if launch is not None and launch.rank > 0:
        # With torch, which a process of its own may never need.
        from verifier.follower import follow

        return follow(config, launch)

    async def main() -> None:
        with tracing(SERVICE, os.environ) as spans:
            await serve(config, launch, spans)

    return run(main)


if __name__ == "__main__":
    end(main())
