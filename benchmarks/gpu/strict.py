"""What `--numerics strict` costs in whole engines; `products.py` has the only part that differs."""

from collections.abc import AsyncIterator

import torch

from benchmarks.gpu.bench import Bench, counting_down
from benchmarks.gpu.engines import tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.serving.turns import Measure
from verifier.cpu.processor import unsupported_reason
from verifier.model import support


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Engines without drafts: strict over fast."""
    shape = bench.size.small
    if refusal := _refusal(bench.device):
        yield bench.measure("strict", "strict / fast", 1, None, note=f"not offered: {refusal}")
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


def _refusal(device: torch.device) -> str | None:
    """Why there is no `strict` on this device; None: there is. Whether it holds, its load says."""
    if device.type == "cuda":
        features = support.on_gpu(torch.cuda.get_device_capability(device))
    else:
        features = support.on_cpu(unsupported_reason())
    [refusal] = (each["refusal"] for each in features if each["value"] == "strict")
    return refusal
