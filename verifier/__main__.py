"""`python -m verifier`."""

import sys

from servicekit.config import load_config
from servicekit.logs import configure_logs
from servicekit.server import run
from verifier.config import SERVICE, VerifierConfig
from verifier.server import serve


def main() -> int:
    config = load_config(VerifierConfig, service=SERVICE)
    configure_logs(config.server.log_level, SERVICE)
    return run(lambda: serve(config))


if __name__ == "__main__":
    sys.exit(main())
