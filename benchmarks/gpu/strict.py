"""What `--numerics strict` costs in whole engines; `products.py` has the only part that differs."""

from collections.abc import AsyncIterator

from benchmarks.gpu.bench import Bench, counting_down
from benchmarks.gpu.engines import tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.serving.turns import Measure
from servicekit.config import ConfigError
from verifier.cpu.loading.refusals import CheckpointError


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Engines without drafts: strict over fast."""
    shape = bench.size.small
    try:
        bench.loaded(shape, numerics="strict")
    except (ConfigError, CheckpointError) as error:
        note = f"not offered: {' '.join(str(error).split())}"
        yield bench.measure("strict", "strict / fast", 1, None, note=note)
        return
    with (
        bench.engine(shape, replays=False, numerics="strict") as strict,
        # What "auto" is where there is "strict".
        bench.engine(shape, replays=False) as fast,
    ):
        for num_left, streams in counting_down(bench.size.streams[:2]):
            tasks = tasks_for(replays(bench.size.max_new_tokens), streams)
            above, below = (
                bench.generating(name, engine, tasks, streams, speculate=False)
                for name, engine in (("strict", strict), ("fast", fast))
            )
            await bench.compare(above, below, num_left=num_left)
            yield bench.ratio("strict", "strict / fast, speculation off", above, below)
