"""Processor time of the gateway per message that it streams to a client, at steady load.

The verifier's model only waits (`benchmarks.paced_verifier`) and takes 25 ms per step, so each of
64 sequences gets 40 messages per second, of one token and without text. How many such streams one
process can hold follows: a gateway is one thread.
"""

import asyncio
import statistics

from benchmarks.metrics import read_metrics
from benchmarks.paced_verifier import STEP_S
from benchmarks.ratios import median_interval
from benchmarks.serving.host import cpu_s, decoding
from benchmarks.serving.setting import Setting
from benchmarks.serving.turns import Measure, RowResult, Variant, by_turns

STREAMS = 64
_MESSAGES = "tandem_inter_token_latency_seconds_count"


async def measure(setting: Setting) -> RowResult:
    if STREAMS not in setting.streams:
        return RowResult(measures=[], variants=[])
    stack, client = await setting.stack(
        verifier_module="benchmarks.paced_verifier", serves_text=False
    )
    gateway = stack.services["gateway"]
    rates: list[float] = []

    async def turn() -> float:
        async with decoding(client, STREAMS, speculate=False):
            before = await asyncio.to_thread(read_metrics, gateway.metrics)
            cpu_before_s = cpu_s(gateway.pid)
            await asyncio.sleep(setting.amount.host_s)
            spent_s = cpu_s(gateway.pid) - cpu_before_s
            after = await asyncio.to_thread(read_metrics, gateway.metrics)
        num_messages = after.total(_MESSAGES) - before.total(_MESSAGES)
        rates.append(num_messages / setting.amount.host_s)
        return spent_s / num_messages * 1e6

    variant = Variant(name="gateway", streams=STREAMS, turn=turn, unit="us/message")
    await by_turns([variant], setting.amount.rounds, setting.say)
    per_core = 1e6 / variant.median if variant.median else 0.0
    value = Measure(
        row="gateway",
        what="processor time of the gateway per streamed message",
        streams=STREAMS,
        dtype="any",
        value=median_interval(variant.figures),
        unit="us",
        note=f"{statistics.median(rates):.0f} messages/s here; a core holds {per_core:.0f}, "
        f"or {per_core * STEP_S:.0f} such streams",
    )
    return RowResult(measures=[value], variants=[variant])
