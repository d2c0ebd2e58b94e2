"""The same requests over HTTP and over gRPC: tokens per second, and the time to the first token.

Both clients are of the same kind: asyncio, a connection or a channel that is kept, every message
parsed. The official client takes several times as long as either, which says nothing about the
gateway.
"""

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from benchmarks.ratios import median_interval
from benchmarks.report import Goal, Measure, ratio
from benchmarks.serving.setting import Setting
from benchmarks.turns import Variant, by_turns
from benchmarks.workloads import Task
from tandem.client import AsyncTandemClient, GenerationRequest, SamplingParams
from tandem.generation import Chunk, Finished

GOAL = 0.95
MAX_TTFT_MS = 5.0


async def measure(setting: Setting) -> AsyncIterator[Measure]:
    gateway, client = await setting.stack()
    for streams in setting.streams:
        tasks = setting.renames(streams)
        # The turns' median times to the first token.
        http_ms: list[float] = []
        grpc_ms: list[float] = []

        async def over_http(
            tasks: Sequence[Task] = tasks, streams: int = streams, kept: list[float] = http_ms
        ) -> float:
            async with contextlib.AsyncExitStack() as exits:
                connections = [
                    await exits.enter_async_context(_connected(gateway.http))
                    for _ in range(streams)
                ]
                workers = [_HttpStream(each, setting.model.name) for each in connections]
                return await _turn(workers, tasks, kept)

        async def over_grpc(
            tasks: Sequence[Task] = tasks, streams: int = streams, kept: list[float] = grpc_ms
        ) -> float:
            return await _turn([_GrpcStream(client)] * streams, tasks, kept)

        http = Variant(name="HTTP", streams=streams, turn=over_http)
        grpc = Variant(name="gRPC", streams=streams, turn=over_grpc)
        await by_turns([http, grpc], setting.amount.rounds)
        dtype = setting.dtype
        yield ratio("http", "HTTP / gRPC, renames", http, grpc, dtype=dtype, goal=Goal(value=GOAL))
        # Without the warm-up.
        later_ms = [a - b for a, b in zip(http_ms[1:], grpc_ms[1:], strict=True)]
        yield Measure(
            row="http",
            what="first token over HTTP, later than over gRPC",
            streams=streams,
            dtype=dtype,
            value=median_interval(later_ms),
            unit="ms",
            goal=Goal(value=MAX_TTFT_MS, is_most=True),
            note=f"{statistics.median(http_ms):.1f} and {statistics.median(grpc_ms):.1f} ms",
        )


class _HttpStream:
    """One stream of requests over a connection that is kept."""

    def __init__(
        self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], model: str
    ) -> None:
        self._reader, self._writer = connection
        self._model = model

    async def run(self, task: Task) -> tuple[float, int]:
        """When the first token came, by the clock `perf_counter`, and the number of tokens."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": list(task.prompt_token_ids),
                "max_tokens": task.max_new_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        first_at_s, usage = 0.0, None
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                first_at_s = first_at_s or time.perf_counter()
                usage = event["usage"] or usage
        assert usage is not None
        return first_at_s, usage["completion_tokens"]

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        pending = b""
        while size := int(await self._reader.readline(), 16):
            pending += (await self._reader.readexactly(size + 2))[:-2]
            *events, pending = pending.split(b"\n\n")
            for event in events:
                if event != b"data: [DONE]":
                    yield json.loads(event[len(b"data: ") :])
        await self._reader.readline()


class _GrpcStream:
    """One stream of requests over the client's channel."""

    def __init__(self, client: AsyncTandemClient) -> None:
        self._client = client

    async def run(self, task: Task) -> tuple[float, int]:
        """When the first token came, by the clock `perf_counter`, and the number of tokens."""
        request = GenerationRequest(
            prompt=task.prompt_token_ids,
            max_new_tokens=task.max_new_tokens,
            sampling=SamplingParams(temperature=0.0),
        )
        first_at_s, num_tokens = 0.0, 0
        async with contextlib.aclosing(self._client.stream(request)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    first_at_s = first_at_s or time.perf_counter()
                elif isinstance(event, Finished):
                    num_tokens += event.usage.output_tokens
        return first_at_s, num_tokens


async def _turn(
    workers: Sequence[_HttpStream | _GrpcStream], tasks: Sequence[Task], ttfts_ms: list[float]
) -> float:
    """All tasks, one at a time per worker: tokens per second. Keeps the median first token.

    A request's time begins when its worker is free. So the client's own time to write it counts:
    the requests of all workers begin together, and the verifier's queue orders them by arrival.
    """
    waiting, firsts_s, num_tokens = list(tasks), list[float](), 0

    async def work(worker: _HttpStream | _GrpcStream) -> None:
        nonlocal num_tokens
        free_at_s = started_at_s
        while waiting:
            first_at_s, of_task = await worker.run(waiting.pop())
            firsts_s.append(first_at_s - free_at_s)
            num_tokens += of_task
            free_at_s = time.perf_counter()

    started_at_s = time.perf_counter()
    await asyncio.gather(*map(work, workers))
    duration_s = time.perf_counter() - started_at_s
    ttfts_ms.append(statistics.median(firsts_s) * 1e3)
    return num_tokens / duration_s


@contextlib.asynccontextmanager
async def _connected(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()
