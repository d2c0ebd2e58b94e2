"""The drafter over the wire: round trips on its stream, and the time of a batch.

Round trips alternate between a drafter process and a bare echo server that moves the same bytes.
In both cases the client sends prepared bytes and does not parse responses.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry

from benchmarks.echo_server import METHOD as ECHO_METHOD
from drafter.batch.batch import Batch
from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from servicekit.logs import get_logger
from tandem.v1 import drafter_pb2 as pb

Stream = grpc.aio.StreamStreamCall[bytes, bytes]

PROPOSE_METHOD = "/tandem.v1.DrafterService/ProposeStream"
TOKENS_PER_STEP = 8
DRAFT_TOKENS = 24
PROMPT_TOKENS = 1000
VOCABULARY = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    num_sequences: int
    pause_ms: float
    """Between a response and the next request, like a verifier's step; 0: none."""
    drafter_p50_ms: float
    drafter_p99_ms: float
    echo_p50_ms: float
    echo_p99_ms: float
    bytes_there: int
    bytes_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    num_streams: int
    num_sequences: int
    proposals_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """Microseconds per batch in the server's own code, without pauses."""

    num_sequences: int
    answer_us: float
    """From request bytes to response bytes; median of all steps."""
    best_answer_us: float
    index_us: float
    """After the response is sent; mean of all steps, of which every fourth indexes."""


async def measure_round_trips(
    drafter: str,
    echo: str,
    num_sequences: int,
    *,
    pause_s: float,
    num_rounds: int,
    num_steps: int,
) -> RoundTrip:
    """Alternates rounds between the two servers."""
    async with grpc.aio.insecure_channel(drafter) as ours, grpc.aio.insecure_channel(echo) as bare:
        stream: Stream = ours.stream_stream(PROPOSE_METHOD)()
        echo_stream: Stream = bare.stream_stream(ECHO_METHOD)()
        steps = Steps(f"rtt{num_sequences}-{pause_s}", num_sequences)
        for request in steps.creations():
            await _exchange(stream, request)
        size, took_ms, echo_ms = 0, [], []
        for _ in range(num_rounds):
            requests = [next(steps) for _ in range(num_steps)]
            sizes = []
            for request in requests:
                await asyncio.sleep(pause_s)
                start_s = time.perf_counter()
                sizes.append(len(await _exchange(stream, request)))
                took_ms.append((time.perf_counter() - start_s) * 1e3)
            size = round(statistics.mean(sizes))
            await _exchange(echo_stream, size.to_bytes(8, "little"))
            for request in requests:
                await asyncio.sleep(pause_s)
                start_s = time.perf_counter()
                await _exchange(echo_stream, request)
                echo_ms.append((time.perf_counter() - start_s) * 1e3)
        there = round(statistics.mean(map(len, requests)))
        stream.cancel()
        echo_stream.cancel()
    return RoundTrip(
        num_sequences=num_sequences,
        pause_ms=pause_s * 1e3,
        drafter_p50_ms=statistics.median(took_ms),
        drafter_p99_ms=statistics.quantiles(took_ms, n=100)[98],
        echo_p50_ms=statistics.median(echo_ms),
        echo_p99_ms=statistics.quantiles(echo_ms, n=100)[98],
        bytes_there=there,
        bytes_back=size,
    )


async def measure_throughput(
    drafter: str, *, num_streams: int, num_sequences: int, num_steps: int
) -> Throughput:
    """Runs all streams at once, each with its next batch after the last response."""
    async with grpc.aio.insecure_channel(drafter) as channel:
        prepared = []
        for i in range(num_streams):
            stream: Stream = channel.stream_stream(PROPOSE_METHOD)()
            steps = Steps(f"tp{i}-{num_sequences}", num_sequences)
            for request in steps.creations():
                await _exchange(stream, request)
            prepared.append((stream, [next(steps) for _ in range(num_steps)]))

        async def run(stream: Stream, requests: list[bytes]) -> None:
            for request in requests:
                await _exchange(stream, request)

        start_s = time.perf_counter()
        await asyncio.gather(*[run(stream, requests) for stream, requests in prepared])
        elapsed_s = time.perf_counter() - start_s
        for stream, _ in prepared:
            stream.cancel()
    return Throughput(
        num_streams=num_streams,
        num_sequences=num_sequences,
        proposals_per_s=num_streams * num_sequences * num_steps / elapsed_s,
    )


async def measure_batch_cost(num_sequences: int, *, num_steps: int) -> BatchCost:
    """The cost of a live batch in this process, without transport."""
    config = DrafterConfig.model_validate({"server": {"listen": "127.0.0.1:0"}})
    server = DrafterServer(config, registry=CollectorRegistry(), logger=get_logger("benchmark"))
    await server.warm_up()
    engine = server.servicer.engine
    batch = Batch(server.store, server.store.start_stream())
    steps = Steps("cost", num_sequences)
    answer_s, index_s = [], []
    for payload in itertools.chain(steps.creations(), itertools.islice(steps, num_steps)):
        start_s = time.perf_counter()
        batch.scan(payload)
        await engine.answer(batch)
        answered_s = time.perf_counter()
        engine.finish(batch)
        if engine.indexer.task is not None:
            await engine.indexer.task
        index_s.append(time.perf_counter() - answered_s)
        answer_s.append(answered_s - start_s)
    await server.server.stop(0)
    return BatchCost(
        num_sequences=num_sequences,
        answer_us=statistics.median(answer_s[-num_steps:]) * 1e6,
        best_answer_us=min(answer_s[-num_steps:]) * 1e6,
        index_us=statistics.mean(index_s[-num_steps:]) * 1e6,
    )


class Steps(Iterator[bytes]):
    """Serialized requests: first those that create the sequences, then one per step."""

    def __init__(self, name: str, num_sequences: int) -> None:
        self._rng = random.Random(name)
        self._ids = [f"{self._rng.getrandbits(128):032x}" for _ in range(num_sequences)]
        self._length = PROMPT_TOKENS
        self._batch_id = 0

    def creations(self) -> Iterator[bytes]:
        """A prompt for each sequence, a few per message."""
        for start in range(0, len(self._ids), 16):
            sequences = [
                pb.SequenceDelta(
                    sequence_id=id_,
                    token_ids=self._text(PROMPT_TOKENS),
                    params=pb.NgramParams(tie=pb.TIE_LONGEST),
                )
                for id_ in self._ids[start : start + 16]
            ]
            yield pb.ProposeRequest(sequences=sequences).SerializeToString()

    def __next__(self) -> bytes:
        self._batch_id += 1
        request = pb.ProposeRequest(batch_id=self._batch_id)
        for id_ in self._ids:
            request.sequences.add(
                sequence_id=id_,
                base_length=self._length,
                token_ids=self._text(TOKENS_PER_STEP),
                max_draft_tokens=DRAFT_TOKENS,
            )
        self._length += TOKENS_PER_STEP
        return request.SerializeToString()

    def _text(self, count: int) -> list[int]:
        # Made of recurring words, so that most proposals hit.
        words: list[int] = []
        while len(words) < count:
            first = self._rng.randrange(60) * 60
            words += range(first, first + 12)
        return words[:count]


async def _exchange(stream: Stream, request: bytes) -> bytes:
    await stream.write(request)
    response = await stream.read()
    assert isinstance(response, bytes), "the stream has ended"
    return response
