"""Gateway, drafter and verifier as processes over gRPC, beside the engine in this process."""

from collections.abc import AsyncIterator

from benchmarks.client_load import through_services
from benchmarks.gpu.bench import REPLAYED, Bench
from benchmarks.gpu.engines import tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.in_process import through_engine
from benchmarks.report import Goal, Measure
from benchmarks.services import running_stack
from tandem.client import AsyncTandemClient, SpeculationParams

GOAL = 0.95


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Replayed code edits through both, with drafts and without."""
    streams = bench.size.streams[1]
    tasks = tasks_for(replays(bench.size.max_new_tokens), streams)
    flags = bench.flags(bench.size.small)
    model = bench.checkpoint(bench.size.small)
    del flags["model"], flags["prefix_cache"]
    words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items()]
    with (
        bench.engine(bench.size.small) as engine,
        running_stack(
            model=model,
            verifier_module="benchmarks.gpu.forced_verifier",
            verifier_flags=[*(word for pair in words for word in pair), "--no-prefix-cache"],
            serves_text=False,
        ) as gateway,
    ):
        async with AsyncTandemClient(gateway.address, retry=None) as client:
            for speculate in (True, False):
                speculation = SpeculationParams(enabled=speculate)
                services = through_services(client, tasks, streams, speculation=speculation)
                alone = through_engine(engine, tasks, streams, speculate=speculate)
                await bench.compare(services, alone)
                yield bench.ratio(
                    "stack",
                    f"{bench.size.small.name}: whole stack over gRPC / engine in process, "
                    f"code edits, {'with' if speculate else 'without'} drafts",
                    services,
                    alone,
                    Goal(value=GOAL),
                    REPLAYED,
                )
