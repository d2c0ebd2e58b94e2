"""Spans of OpenTelemetry on over off: tokens per second with all services traced, over none traced.

Every request is sampled, as it is by default. The spans go by OTLP to a receiver on this machine,
a real gRPC server in this process that counts them and reads none.
"""

import asyncio
from collections.abc import Sequence
from concurrent import futures

import grpc

from benchmarks.ratios import median_interval, ratios
from benchmarks.serving.setting import EXPORT_INTERVAL_S, Setting
from benchmarks.serving.turns import Goal, Measure, RowResult, Variant, by_turns
from tandem.client import Usage

GOALS = dict.fromkeys((1, 16, 64), 0.95)
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_PATIENCE_S = 60.0


async def measure(setting: Setting) -> RowResult:
    _, plain = await setting.stack()
    receiver = Receiver()
    setting.exits.callback(receiver.stop)
    _, traced = await setting.stack(spans_to=receiver.address)
    measures: list[Measure] = []
    variants: list[Variant] = []
    for streams, goal in setting.chosen(GOALS).items():
        tasks = setting.renames(streams)
        num_requests = 0

        def count(usages: Sequence[Usage]) -> None:
            nonlocal num_requests
            num_requests += len(usages)

        on = setting.through_services(
            traced, tasks, streams, speculate=True, name="spans", observe=count
        )
        off = setting.through_services(plain, tasks, streams, speculate=True, name="no spans")
        num_bytes_before = receiver.num_bytes
        await by_turns([on, off], setting.amount.rounds, setting.say)
        num_bytes = await receiver.all_bytes_after(num_bytes_before)
        measures.append(
            Measure(
                row="spans",
                what="spans / none, renames",
                streams=streams,
                dtype=setting.dtype,
                value=median_interval(ratios(on.figures, off.figures)),
                goal=Goal(value=goal),
                note=f"{on.median:,.0f} and {off.median:,.0f} tokens/s (spans, none), "
                f"{num_bytes / num_requests / 1e3:.1f} kB of spans per request",
            )
        )
        variants += [on, off]
    return RowResult(measures=measures, variants=variants)


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
        export = grpc.unary_unary_rpc_method_handler(self._export)
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
