"""What `--numerics strict` costs: in whole engines, and in products, the only part that differs."""

import math
from collections.abc import AsyncIterator, Sequence

import torch

from benchmarks.gpu.bench import Bench, counting_down, variant
from benchmarks.gpu.engines import tasks_for
from benchmarks.gpu.texts import replays
from benchmarks.serving.turns import Measure, Variant
from servicekit.config import ConfigError
from verifier.cpu.loading.refusals import CheckpointError
from verifier.gpu.operations import operations_for

# Rows of a decode, of verified drafts, and of a prefill chunk; the first two have tiles of their
# own (verifier/gpu/kernels/product.py).
_NUM_ROWS = (1, 16, 64, 512)


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Products of a layer of the large model; then engines without drafts. Strict over fast."""
    # No product of torch is strict on a CPU.
    if bench.device.type == "cuda":
        async for each in measure_products(bench):
            yield each
    async for each in _measure_engines(bench):
        yield each


async def _measure_engines(bench: Bench) -> AsyncIterator[Measure]:
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


async def measure_products(bench: Bench) -> AsyncIterator[Measure]:
    """Weights read per second, as if a product read each once."""
    weights = _weights(bench)
    for num_left, num_rows in counting_down(_NUM_ROWS):
        above, below = (
            _multiplying(bench, weights, num_rows, is_strict=is_strict)
            for is_strict in (True, False)
        )
        # The engines' comparisons follow.
        await bench.compare(above, below, num_left=num_left + len(bench.size.streams[:2]))
        what = f"products of a layer of {bench.size.large.name}, {num_rows} rows: strict / fast"
        yield bench.ratio("strict", what, above, below)


def _weights(bench: Bench) -> list[torch.Tensor]:
    """Of a dense layer's four products; [outputs, inputs] each."""
    config = bench.size.large.config()
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads, kv_heads, head_dim = (int(getattr(config, name)) for name in names)
    hidden, size = (int(getattr(config, name)) for name in ("hidden_size", "intermediate_size"))
    shapes = (
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * size, hidden),
        (hidden, size),
    )
    dtype, device = bench.size.dtype, bench.device
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def _multiplying(
    bench: Bench, weights: Sequence[torch.Tensor], num_rows: int, *, is_strict: bool
) -> Variant:
    operations = operations_for(bench.device, is_strict=is_strict)
    rows = [each.new_ones(num_rows, each.shape[1]) for each in weights]
    read_bytes = sum(math.prod(each.shape) * each.itemsize for each in weights)

    @torch.inference_mode()
    def multiply() -> None:
        for of_weight, weight in zip(rows, weights, strict=True):
            operations.linear(of_weight, weight)

    multiply()  # compiles
    name = "strict" if is_strict else "fast"
    return variant(name, 1, lambda: read_bytes / bench.seconds(multiply), unit="bytes/s")
