"""Gateway, drafter and verifier as processes over gRPC, beside the engine in this process."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from benchmarks.client_load import run_tasks
from benchmarks.gpu.bench import REPLAYED, Bench, counting_down
from benchmarks.gpu.engines import drafts_in, tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.services import running_stack
from benchmarks.serving.turns import Goal, Measure, Variant
from benchmarks.workloads import Task
from tandem.client import AsyncTandemClient, SpeculationParams

GOAL = 0.95


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Replayed code edits through both, with drafts and without."""
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
            for num_left, speculate in counting_down((True, False)):
                services = _through_services(client, tasks, streams, speculate=speculate)
                alone = bench.generating("in process", engine, tasks, streams, speculate=speculate)
                await bench.compare(services, alone, num_left=num_left)
                yield bench.ratio(
                    "stack",
                    f"{bench.size.small.name}: whole stack over gRPC / engine in process, "
                    f"code edits, {drafts_in(speculate)}",
                    services,
                    alone,
                    Goal(value=GOAL),
                    REPLAYED,
                )


def _through_services(
    client: AsyncTandemClient, tasks: Sequence[Task], streams: int, *, speculate: bool
) -> Variant:
    async def tokens_per_s() -> float:
        started_at_s = time.perf_counter()
        num_tokens, _ = await run_tasks(
            client, tasks, streams, SpeculationParams(enabled=speculate)
        )
        return num_tokens / (time.perf_counter() - started_at_s)

    return Variant(name="services", streams=streams, turn=tokens_per_s)
