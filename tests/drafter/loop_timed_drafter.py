"""A drafter that measures how long its event loop was blocked; a process of its own.

    python -m tests.drafter.loop_timed_drafter SNAPSHOT_FOLDER

Prints its address. Then answers each line on stdin by one on stdout: `settle` when all texts are
indexed, `snapshot` when one is written, `times` with two numbers of seconds since the last such
line: the longest for which nothing else on the loop could run, and all for which it ran.

They are processor time of the loop's thread, so that other load on the machine does not count.
"""

import asyncio
import gc
import sys
import time
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from servicekit.config import ServerOptions

SAMPLE_EVERY_S = 0.001


class LoopTimer:
    """Owned by the event loop that it measures."""

    def __init__(self) -> None:
        self.longest_s = self.total_s = 0.0

    async def run_forever(self) -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - last_s)
            self.total_s += now_s - last_s
            last_s = now_s


async def settle(drafter: DrafterServer) -> None:
    await drafter.pool_keeper.settle()
    indexing = drafter.servicer.engine.indexer.task
    if indexing is not None:
        await asyncio.wait([indexing])


async def main() -> None:
    config = DrafterConfig(
        server=ServerOptions(listen="127.0.0.1:0"),
        max_sequence_bytes=128 << 20,
        max_pool_bytes=256 << 20,
        max_pools_bytes=1 << 30,
        snapshot_dir=Path(sys.argv[1]),
    )
    logger = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
    drafter = DrafterServer(config, registry=CollectorRegistry(), logger=logger)
    await drafter.start()
    gc.freeze()  # as the real process does
    print(drafter.server.address, flush=True)
    timer = LoopTimer()
    timing = asyncio.create_task(timer.run_forever())
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := (await lines.readline()).decode().strip():
        answer = "done"
        if line == "settle":
            await settle(drafter)
        elif line == "snapshot":
            assert drafter.snapshotter is not None
            await drafter.snapshotter.write()
        else:
            assert line == "times"
            answer = f"{timer.longest_s} {timer.total_s}"
            timer.longest_s = timer.total_s = 0.0
        print(answer, flush=True)
    timing.cancel()
    await drafter.server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
