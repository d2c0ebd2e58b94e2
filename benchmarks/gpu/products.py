"""A layer's products of the large model: strict's and FP8's over torch's own, by number of rows."""

from collections.abc import AsyncIterator, Callable, Sequence

import torch

from benchmarks.gpu.bench import Bench, counting_down, variant
from benchmarks.serving.turns import Measure, Variant
from verifier.gpu.fp8 import ScaledLinear, quantised
from verifier.gpu.graph_pool import CudaCapture
from verifier.gpu.operations import operations_for
from verifier.gpu.weights import DenseLinear, Linear
from verifier.model.support import MIN_FP8_COMPUTE_CAPABILITY

# Of decodes, of verified drafts, and of a prefill chunk; strict's kernel has tiles of their own for
# each (verifier/gpu/kernels/product.py).
NUM_ROWS = (1, 16, 32, 72, 512)


async def measure(bench: Bench) -> AsyncIterator[Measure]:
    """Rows per second over those of torch's own products."""
    weights = _weights(bench)
    kinds: dict[str, list[Linear]] = {}
    if _has_fp8(bench.device):
        kinds["fp8"] = [_scaled(weight) for weight in weights]
    # No product of torch is strict on a CPU.
    if bench.device.type == "cuda":
        kinds["strict"] = _dense(bench, weights, is_strict=True)
    own = _dense(bench, weights, is_strict=False)
    pairs = [(name, num_rows) for name in kinds for num_rows in NUM_ROWS]
    for num_left, (name, num_rows) in counting_down(pairs):
        above, below = (
            _multiplying(bench, each, layers, weights, num_rows)
            for each, layers in ((name, kinds[name]), (bench.dtype, own))
        )
        await bench.compare(above, below, num_left=num_left)
        what = f"a layer of {bench.size.large.name}, {num_rows} rows: {name} / {bench.dtype}"
        yield bench.ratio("products", what, above, below)


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= MIN_FP8_COMPUTE_CAPABILITY


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


def _dense(bench: Bench, weights: Sequence[torch.Tensor], *, is_strict: bool) -> list[Linear]:
    operations = operations_for(bench.device, is_strict=is_strict)
    return [DenseLinear(operations=operations, weight=weight) for weight in weights]


def _scaled(weight: torch.Tensor) -> Linear:
    values, scale = quantised(weight)
    return ScaledLinear(weight=values, scale=scale)


def _multiplying(
    bench: Bench,
    name: str,
    layers: Sequence[Linear],
    weights: Sequence[torch.Tensor],
    num_rows: int,
) -> Variant:
    rows = [weight.new_ones(num_rows, weight.shape[1]) for weight in weights]

    @torch.inference_mode()
    def multiply() -> None:
        for of_layer, layer in zip(rows, layers, strict=True):
            layer(of_layer)

    multiply()  # compiles
    run: Callable[[], None] = multiply
    if bench.device.type == "cuda":
        # Replayed, as in a step: the host takes longer to launch them one by one.
        run = CudaCapture(bench.device)(multiply).replay
    return variant(name, 1, lambda: num_rows / bench.seconds(run), unit="rows/s")
