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

from benchmarks.ratios import median_interval, ratios
from benchmarks.serving.setting import Setting
from benchmarks.serving.turns import Goal, Measure, RowResult, Variant, by_turns
from benchmarks.workloads import Task
from tandem.client import AsyncTandemClient, GenerationRequest, SamplingParams
from tandem.generation import Chunk, Finished

GOALS = dict.fromkeys((1, 16, 64), 0.95)
MAX_TTFT_MS = 5.0


async def measure(setting: Setting) -> RowResult:
    stack, client = await setting.stack()
    address = stack.services["gateway"].http
    measures: list[Measure] = []
    variants: list[Variant] = []
    for streams, goal in setting.chosen(GOALS).items():
        tasks = setting.renames(streams)
        # By variant, the turns' median times to the first token, in milliseconds.
        ttfts_ms: dict[str, list[float]] = {"HTTP": [], "gRPC": []}

        async def over_http(
            tasks: Sequence[Task] = tasks,
            streams: int = streams,
            kept: list[float] = ttfts_ms["HTTP"],
        ) -> float:
            async with contextlib.AsyncExitStack() as exits:
                workers = [
                    _HttpStream(await exits.enter_async_context(_connected(address)), setting)
                    for _ in range(streams)
                ]
                return await _turn(workers, tasks, kept)

        async def over_grpc(
            tasks: Sequence[Task] = tasks,
            streams: int = streams,
            kept: list[float] = ttfts_ms["gRPC"],
        ) -> float:
            return await _turn([_GrpcStream(client)] * streams, tasks, kept)

        http = Variant(name="HTTP", streams=streams, turn=over_http)
        grpc = Variant(name="gRPC", streams=streams, turn=over_grpc)
        await by_turns([http, grpc], setting.amount.rounds, setting.say)
        measures.append(
            Measure(
                row="http",
                what="HTTP / gRPC, renames",
                streams=streams,
                dtype=setting.dtype,
                value=median_interval(ratios(http.figures, grpc.figures)),
                goal=Goal(value=goal),
                note=f"{http.median:,.0f} and {grpc.median:,.0f} tokens/s (HTTP, gRPC)",
            )
        )
        # Without the warm-up.
        http_ms, grpc_ms = (kept[1:] for kept in ttfts_ms.values())
        later_ms = [a - b for a, b in zip(http_ms, grpc_ms, strict=True)]
        measures.append(
            Measure(
                row="http",
                what="first token over HTTP, later than over gRPC",
                streams=streams,
                dtype=setting.dtype,
                value=median_interval(later_ms),
                unit="ms",
                goal=Goal(value=MAX_TTFT_MS, is_most=True),
                note=f"{statistics.median(http_ms):.1f} and {statistics.median(grpc_ms):.1f} ms",
            )
        )
        variants += [http, grpc]
    return RowResult(measures=measures, variants=variants)


class _HttpStream:
    """One stream of requests over a connection that is kept."""

    def __init__(
        self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], setting: Setting
    ) -> None:
        self._reader, self._writer = connection
        self._model = setting.model.name

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
