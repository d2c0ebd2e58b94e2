"""Compiles the drafter's kernels into the folder of its source, for an image or a package.

python -m drafter.compile_kernels
"""

import asyncio

from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from servicekit.logs import get_logger


def main() -> None:
    drafter = DrafterServer(
        DrafterConfig(), registry=CollectorRegistry(), logger=get_logger("drafter")
    )
    asyncio.run(drafter.warm_up())


if __name__ == "__main__":
    main()
