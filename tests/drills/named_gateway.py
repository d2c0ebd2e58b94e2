"""A gateway for which every DNS name has the addresses that a file says.

python -m tests.drills.named_gateway --hosts-file FILE [flags of `python -m gateway`]
"""

import argparse
import functools
import sys
from pathlib import Path
from unittest import mock

from gateway import __main__ as gateway
from gateway.server import GatewayServer
from servicekit.serving.process import end


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hosts-file", type=Path, required=True)
    arguments, flags = parser.parse_known_args()

    async def resolve(host: str, port: int) -> list[str]:
        addresses: str = arguments.hosts_file.read_text()
        return addresses.split()

    with (
        mock.patch.object(sys, "argv", [sys.argv[0], *flags]),
        mock.patch.object(
            gateway, "GatewayServer", functools.partial(GatewayServer, resolve=resolve)
        ),
    ):
        return gateway.main()


if __name__ == "__main__":
    end(main())
