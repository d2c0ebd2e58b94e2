"""A service as a process of its own: `python -m drafter`, `verifier` or `gateway`."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_PATIENCE_S = 200


@asynccontextmanager
async def module_process(
    module: str, *flags: str, **environ: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process, killed at the end if it is still there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, cwd=ROOT, env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def read_line(process: asyncio.subprocess.Process) -> str:
    """The next line of its stdout."""
    assert process.stdout is not None
    async with asyncio.timeout(START_PATIENCE_S):
        return (await process.stdout.readline()).decode()


@asynccontextmanager
async def drafter_at(listen: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A drafter that serves, and its address."""
    async with module_process("drafter", "--listen", listen, "--metrics-listen", "") as process:
        yield process, (await read_line(process)).strip().removeprefix("ready grpc=")
