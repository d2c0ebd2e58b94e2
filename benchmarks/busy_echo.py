"""What a message from a busy engine's thread through a stream and back takes at best.

    python -m benchmarks.busy_echo --server HOST:PORT --step-us 1200 --request-bytes 80

A thread works for a step's time without the GIL, hands a message to the event loop, which writes
it to a stream of `benchmarks.echo_server`, and waits for the answer, as a verifier's engine waits
for a hint; the loop hands it back. Prints the seconds of each round trip as one JSON list.
"""

import argparse
import asyncio
import json
import queue
import sys
import threading
import time

import grpc
import numpy as np

from benchmarks.echo_server import METHOD

# As the verifier's: the loop should not wait long for the engine's Python.
_SWITCH_INTERVAL_S = 0.00005
# Larger than the caches nearest to the core, as weights are.
_WEIGHTS = np.ones(2_000_000, dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--server", required=True, help="address of an echo server")
    parser.add_argument("--step-us", type=float, default=1000.0, help="work between two messages")
    parser.add_argument("--request-bytes", type=int, default=64)
    parser.add_argument("--response-bytes", type=int, default=256)
    parser.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        import uvloop
    except ImportError:
        loop_factory = None
    else:
        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        took_s = runner.run(
            measure_echo(
                arguments.server,
                step_s=arguments.step_us / 1e6,
                request_bytes=arguments.request_bytes,
                response_bytes=arguments.response_bytes,
                count=arguments.count,
            )
        )
    print(json.dumps(took_s))


async def measure_echo(
    server: str, *, step_s: float, request_bytes: int, response_bytes: int, count: int
) -> list[float]:
    """Seconds from a thread's message to its answer, for each of `count` messages."""
    loop = asyncio.get_running_loop()
    outgoing: asyncio.Queue[bytes] = asyncio.Queue()
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    took_s: list[float] = []
    done = asyncio.Event()
    # A message of 8 bytes sets the answers' size.
    request = bytes(max(9, request_bytes))

    def engine() -> None:
        passes = _passes(step_s)
        for _ in range(count):
            _work(passes)
            started_at_s = time.perf_counter()
            loop.call_soon_threadsafe(outgoing.put_nowait, request)
            answers.get()
            took_s.append(time.perf_counter() - started_at_s)
        loop.call_soon_threadsafe(done.set)

    async with grpc.aio.insecure_channel(server) as channel:
        stream: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        await stream.write(response_bytes.to_bytes(8, "little"))
        await stream.read()

        async def write() -> None:
            while True:
                await stream.write(await outgoing.get())

        async def read() -> None:
            while isinstance(answer := await stream.read(), bytes):
                answers.put(answer)

        tasks = [asyncio.create_task(each) for each in (write(), read(), done.wait())]
        # A daemon: it would wait for ever if the server ended.
        threading.Thread(target=engine, name="engine", daemon=True).start()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        stream.cancel()
    if not done.is_set():
        raise ConnectionError("the echo server ended the stream")
    return took_s


def _passes(step_s: float) -> int:
    """How often to read the weights for a step's time."""
    started_at_s = time.perf_counter()
    _work(20)
    return max(1, round(step_s * 20 / (time.perf_counter() - started_at_s)))


def _work(passes: int) -> None:
    # One call, which holds no GIL.
    np.broadcast_to(_WEIGHTS, (passes, len(_WEIGHTS))).sum(axis=1)


if __name__ == "__main__":
    main()
