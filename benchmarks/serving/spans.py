"""Spans of OpenTelemetry on over off: tokens per second, and processor time of the services.

Every request is sampled, as it is by default. The spans go by OTLP to a receiver on this machine,
a real gRPC server in this process that counts them and reads none.
"""

import asyncio
import dataclasses
import statistics
from collections.abc import Sequence
from concurrent import futures

import grpc

from benchmarks.ratios import median_interval, ratios
from benchmarks.services import Stack
from benchmarks.serving.host import cpu_s
from benchmarks.serving.setting import EXPORT_INTERVAL_S, Setting
from benchmarks.serving.turns import Goal, Measure, RowResult, Variant, by_turns
from benchmarks.workloads import Task
from tandem.client import AsyncTandemClient, Usage

GOALS = dict.fromkeys((1, 16, 64), 0.95)
MAX_PROCESSOR_TIME = 1.05
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_PATIENCE_S = 60.0


async def measure(setting: Setting) -> RowResult:
    receiver = Receiver()
    setting.exits.callback(receiver.stop)
    traced = await setting.stack(spans_to=receiver.address)
    plain = await setting.stack()
    measures: list[Measure] = []
    variants: list[Variant] = []
    for streams, goal in setting.chosen(GOALS).items():
        num_bytes_before = receiver.num_bytes
        tasks = setting.renames(streams)
        on = _Traced(setting, *traced, tasks, streams, "spans")
        off = _Traced(setting, *plain, tasks, streams, "no spans")
        pair = [on.variant, off.variant]
        await by_turns(pair, setting.amount.rounds, setting.say)
        num_bytes = await receiver.all_bytes_after(num_bytes_before)
        for what, value, wanted, note in (
            (
                "spans / none, renames",
                ratios(on.variant.figures, off.variant.figures),
                Goal(value=goal),
                f"{on.variant.median:,.0f} and {off.variant.median:,.0f} tokens/s (spans, none), "
                f"{num_bytes / on.num_requests / 1e3:.1f} kB of spans per request",
            ),
            (
                "processor time of the services, spans / none",
                # Without the warm-up.
                ratios(on.ms_per_token[1:], off.ms_per_token[1:]),
                Goal(value=MAX_PROCESSOR_TIME, is_most=True),
                f"{statistics.median(on.ms_per_token[1:]):.3f} and "
                f"{statistics.median(off.ms_per_token[1:]):.3f} ms per token",
            ),
        ):
            measures.append(
                Measure(
                    row="spans",
                    what=what,
                    streams=streams,
                    dtype=setting.dtype,
                    value=median_interval(value),
                    goal=wanted,
                    note=note,
                )
            )
        variants += pair
    return RowResult(measures=measures, variants=variants)


class _Traced:
    """Renames through one stack.

    Attributes:
        variant: its turns give tokens per second.
        ms_per_token: of each turn, the processor time of all services per token.
        num_requests: in all turns.
    """

    def __init__(
        self,
        setting: Setting,
        stack: Stack,
        client: AsyncTandemClient,
        tasks: Sequence[Task],
        streams: int,
        name: str,
    ) -> None:
        self.ms_per_token: list[float] = []
        self.num_requests = 0
        self._num_tokens = 0
        self._pids = [service.pid for service in stack.services.values()]
        through = setting.through_services(
            client, tasks, streams, speculate=True, name=name, observe=self._count
        )
        self._turn = through.turn
        self.variant = dataclasses.replace(through, turn=self._timed_turn)

    async def _timed_turn(self) -> float:
        before_s = self._processor_s()
        tokens_per_s = await self._turn()
        # Until its spans are sent.
        await asyncio.sleep(2 * EXPORT_INTERVAL_S)
        self.ms_per_token.append((self._processor_s() - before_s) / self._num_tokens * 1e3)
        return tokens_per_s

    def _processor_s(self) -> float:
        return sum(map(cpu_s, self._pids))

    def _count(self, usages: Sequence[Usage]) -> None:
        self.num_requests += len(usages)
        self._num_tokens = sum(usage.output_tokens for usage in usages)


class Receiver:
    """An OTLP receiver on 127.0.0.1 that discards what it gets.

    Attributes:
        address: HOST:PORT.
        num_bytes: of the messages so far.
    """

    def __init__(self) -> None:
        """Starts it, in threads of its own: services send their last spans while they are stopped,
        when this process's event loop waits for their end.
        """
        self.num_bytes = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
        # Without a deserializer, messages stay bytes. The empty answer is a success.
        export: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
            self._export
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Export": export}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    async def all_bytes_after(self, before: int) -> int:
        """The bytes that came after the first `before`, once no more come.

        Raises:
            TimeoutError: none came.
        """
        async with asyncio.timeout(_PATIENCE_S):
            last = before
            while last == before or self.num_bytes > last:
                last = self.num_bytes
                await asyncio.sleep(5 * EXPORT_INTERVAL_S)
        return last - before

    def stop(self) -> None:
        self._server.stop(0).wait()

    def _export(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.num_bytes += len(request)
        return b""
