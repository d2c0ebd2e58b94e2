"""Several streams at once from a gateway, with the asyncio client.

    tandem up                             # in another terminal
    python examples/stream_async.py

Renames each name of a method in a request of its own, and prints each result when it is there. A
request that fails or takes longer than --timeout-s ends alone.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

from tandem.client import AsyncTandemClient, Chunk, GenerationRequest, TandemError

CODE = """\
    def push(self, item):
        self.items.append(item)
        return item
"""
RENAMES = (("push", "add"), ("items", "values"), ("item", "value"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="127.0.0.1:50050", metavar="HOST:PORT")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of each request")
    arguments = parser.parse_args()
    return asyncio.run(rename_all(arguments.target, arguments.timeout_s))


async def rename_all(target: str, timeout_s: float) -> int:
    """Returns the number of requests that failed."""
    async with AsyncTandemClient(target) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(rename(client, names, timeout_s)) for names in RENAMES]
    return sum(not task.result() for task in tasks)


async def rename(client: AsyncTandemClient, names: Sequence[str], timeout_s: float) -> bool:
    """Prints the renamed code; returns whether it is complete."""
    old, new = names
    request = GenerationRequest(
        prompt=f"<|code|>{CODE}<|rename|>{old}<|to|>{new}<|out|>", max_new_tokens=128
    )
    text = ""
    try:
        # When the time is over, `aclosing` ends the stream, and with it the request.
        async with (
            asyncio.timeout(timeout_s),
            contextlib.aclosing(client.stream(request)) as events,
        ):
            async for event in events:
                if isinstance(event, Chunk):
                    text += event.text
    except (TandemError, TimeoutError) as error:
        print(f"{old} -> {new} failed: {error!r}", file=sys.stderr)
        return False
    print(f"# {old} -> {new}\n{text}")
    return True


if __name__ == "__main__":
    sys.exit(main())
