"""Gateway, drafter and verifier as processes over gRPC, beside the engine in this process."""

import contextlib
import time
from collections.abc import AsyncIterator

from benchmarks.client_load import run_tasks
from benchmarks.gpu.bench import REPLAYED, Bench
from benchmarks.gpu.engines import tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.services import running_stack
from benchmarks.serving.turns import Goal, Measure, Variant
from tandem.client import AsyncTandemClient, SpeculationParams

GOAL = 0.95


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Replayed code edits with drafts through both."""
    streams = bench.size.streams[1]
    tasks = tasks_for(replays(bench.size.max_new_tokens), streams)
    flags = bench.flags(bench.size.small)
    model = bench.checkpoint(bench.size.small)
    named = [
        word
        for name in ("device", "numerics", "dtype", "max_model_len", "max_num_seqs")
        for word in (f"--{name.replace('_', '-')}", str(flags[name]))
    ]
    services_running = running_stack(
        model=model,
        verifier_module="benchmarks.gpu.forced_verifier",
        verifier_flags=[
            *named,
            *("--max-num-batched-tokens", str(bench.size.max_num_batched_tokens)),
            *("--kv-memory-fraction", "0.3", "--no-prefix-cache"),
        ],
        serves_text=False,
    )
    with bench.engine(bench.size.small) as engine, contextlib.ExitStack() as entered:
        with bench.loading():
            stack = entered.enter_context(services_running)
        async with AsyncTandemClient(stack.gateway, retry=None) as client:

            async def turn() -> float:
                started_at_s = time.perf_counter()
                num_tokens, _ = await run_tasks(
                    client, tasks, streams, SpeculationParams(enabled=True)
                )
                return num_tokens / (time.perf_counter() - started_at_s)

            services = Variant(name="services", streams=streams, turn=turn)
            alone = bench.generating("in process", engine, tasks, streams, speculate=True)
            await bench.compare(services, alone)
    yield bench.ratio(
        "stack",
        f"{bench.size.small.name}: whole stack over gRPC / engine in process, code edits",
        services,
        alone,
        Goal(value=GOAL),
        REPLAYED,
    )
