"""The CPU decoder's kernels beside torch, transformers and the memory's bandwidth.

    python -m benchmarks.decoder [--only products] [--threads 1 2] [--rounds 5] [--json FILE]

- products: rows times a packed weight beside `torch.mm`, for shapes of the bundled model and of a
  0.6B and a 1.7B one. One thread.
- attention: the last tokens of a context, heads of Qwen3-0.6B, beside torch's
  `scaled_dot_product_attention` in float32, whose keys and values are repeated beforehand for all
  query heads. One thread.
- step: a plain step of one sequence, random weights of Qwen3-0.6B's shape, context 400; and its
  time over that of reading the weights once, at the bandwidth that a copy in memory reaches.
- families: a plain step of one sequence, context 400, bfloat16, one thread, of a shape that every
  family has; and its time for each parameter that it reads, over Llama's.
- prefill: 2,000 tokens, 512 at a time, of the first four layers; transformers computes the same
  in one piece.

Compared variants alternate within a round; a figure is the median over the rounds. Nothing here
depends on the weights' values.
"""

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.arguments import command_parser, write_figures
from benchmarks.machine import processor
from benchmarks.report import table
from benchmarks.shapes import FAMILIES, QWEN3_0_6B, TINY, Shape, first_layers, write_checkpoint
from servicekit.kernels.memory import address_of
from servicekit.logs import configure_logs
from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.weight_types import LANES, BitsArray
from verifier.cpu.decoder import CpuDecoder
from verifier.cpu.kernels.attention import MAX_TASK_ROWS, attend, scratch_bytes
from verifier.cpu.kernels.products import multiply
from verifier.cpu.kernels.tiles import TABLE_PADDING
from verifier.cpu.loading.loader import load_weights
from verifier.cpu.weights import DecoderWeights

PRODUCTS = ((256, 1536), (768, 256), (1024, 4096), (2048, 6144))
NUM_ROWS = (1, 8, 32, 512)
ATTENTION = ((1024, 256), (4096, 256), (16384, 256), (65536, 64), (4096, 1), (65536, 1))
"""Tokens of context, and how many of them are queries."""
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
CONTEXT, PREFILL, CHUNK = 400, 2000, 512
DTYPES = ("float32", "bfloat16")


def copy_bandwidth() -> float:
    """Bytes per second that one thread reads and writes when it copies in memory."""
    source = np.ones(1 << 28, dtype=np.uint8)
    target = np.empty_like(source)
    best = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    return 2 * source.nbytes / best


def measure_products(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of each product by our kernels and by torch, one thread."""
    torch.set_num_threads(1)
    rows = []
    for depth, outputs in PRODUCTS[:1] if arguments.quick else PRODUCTS:
        stored = torch.randn(outputs, depth).bfloat16()
        weight = stored.float()
        packed = _packed(weight.numpy())
        halves = _packed(stored.view(torch.int16).numpy().view(np.uint16))
        for num_rows in NUM_ROWS:
            x = np.zeros((num_rows, depth + LANES), dtype=np.float32)
            x[:, :depth] = np.random.default_rng(1).standard_normal((num_rows, depth))
            out = np.empty((num_rows, outputs + LANES), dtype=np.float32)
            x_torch = torch.from_numpy(x[:, :depth].copy())
            x_half = x_torch.bfloat16()
            count = max(1, int(1e8 / (num_rows * depth * outputs)))
            variants: dict[str, Callable[[], object]] = {
                "float32": _product(packed, x, out, depth),
                "bfloat16 weights": _product(halves, x, out, depth),
                "torch.mm float32": functools.partial(torch.mm, x_torch, weight.t()),
                "torch.mm bfloat16": functools.partial(torch.mm, x_half, stored.t()),
            }
            medians = _medians(variants, arguments.rounds, count)
            base = medians["torch.mm float32"]
            rows.append(
                {
                    "K x N": f"{depth} x {outputs}",
                    "rows": num_rows,
                    **{f"{name}, us": round(s * 1e6, 1) for name, s in medians.items()},
                    "float32 over torch": round(base / medians["float32"], 2),
                    "bfloat16 over torch float32": round(base / medians["bfloat16 weights"], 2),
                    "bfloat16 over torch bfloat16": round(
                        medians["torch.mm bfloat16"] / medians["bfloat16 weights"], 2
                    ),
                }
            )
    return rows


def measure_attention(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of one layer's attention by our kernel and by torch, one thread."""
    torch.set_num_threads(1)
    rows = []
    for context, num_tokens in ATTENTION[:1] if arguments.quick else ATTENTION:
        variants: dict[str, Callable[[], object]] = {
            **{name: _attention(context, num_tokens, name) for name in DTYPES},
            "torch float32": _torch_attention(context, num_tokens),
        }
        medians = _medians(variants, arguments.rounds)
        pairs = HEADS * num_tokens * (context - num_tokens / 2)
        rows.append(
            {
                "context": context,
                "queries": num_tokens,
                **{f"{name}, ms": round(s * 1e3, 2) for name, s in medians.items()},
                "float32, GF/s": round(4 * HEAD_DIM * pairs / medians["float32"] / 1e9),
                **{
                    f"{name} over torch": round(medians["torch float32"] / medians[name], 2)
                    for name in DTYPES
                },
            }
        )
    return rows


def measure_steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Plain steps beside the reading of the weights."""
    rows = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as parent:
            weights = _weights(_checkpoint(_shape(arguments), parent), dtype)
        for num_threads in arguments.threads:
            decoder = _decoder(weights, num_threads)
            layout = _layout(decoder, CONTEXT, 1)
            decoder.forward(layout)
            steps, bandwidths = [], []
            for _ in range(arguments.rounds):
                steps.append(_seconds(functools.partial(decoder.forward, layout), 5))
                bandwidths.append(copy_bandwidth())
            decoder.close()
            bandwidth = statistics.median(bandwidths)
            num_bytes = _shape(arguments).step_weights_bytes(getattr(torch, dtype).itemsize)
            rows.append(
                {
                    "dtype": dtype,
                    "threads": num_threads,
                    "ms": round(statistics.median(steps) * 1e3, 1),
                    "weights, GB": round(num_bytes / 1e9, 2),
                    "copy of one thread, GB/s": round(bandwidth / 1e9, 1),
                    "time over reading the weights": round(
                        statistics.median(steps) * bandwidth / num_bytes, 2
                    ),
                }
            )
    return rows


def measure_families(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Plain steps of families, beside the first one."""
    shapes = [first_layers(each, 2) for each in FAMILIES[2:4]] if arguments.quick else FAMILIES
    variants: dict[str, Callable[[], object]] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as parent:
            decoder = _decoder(_weights(_checkpoint(shape, parent), "bfloat16"), 1)
        # Recurrent states begin with the prompt, and go on with it.
        decoder.forward(_layout(decoder, 0, CONTEXT))
        variants[shape.name] = functools.partial(_decode, decoder, itertools.count(CONTEXT))
    medians = _medians(variants, arguments.rounds, 5)
    millions = {shape.name: shape.step_weights_bytes(1) / 1e6 for shape in shapes}
    for_each = {name: medians[name] / millions[name] for name in medians}
    return [
        {
            "family": name,
            "parameters read, millions": round(millions[name]),
            "ms": round(medians[name] * 1e3, 1),
            "for each, over the first": round(for_each[name] / for_each[shapes[0].name], 2),
        }
        for name in medians
    ]


def measure_prefill(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Prefill beside transformers."""
    rows = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as parent:
            shape = TINY if arguments.quick else first_layers(QWEN3_0_6B, 4)
            folder = _checkpoint(shape, parent)
            weights = _weights(folder, dtype)
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            model = loaded.eval()
        token_ids = torch.arange(PREFILL)[None]
        for num_threads in arguments.threads:
            torch.set_num_threads(num_threads)
            decoder = _decoder(weights, num_threads)
            with torch.inference_mode():
                medians = _medians(
                    {
                        "own": functools.partial(_prefill, decoder),
                        "transformers": functools.partial(model, token_ids, logits_to_keep=1),
                    },
                    arguments.rounds,
                )
            decoder.close()
            rows.append(
                {
                    "dtype": dtype,
                    "threads": num_threads,
                    "ms": round(medians["own"] * 1e3),
                    "transformers, ms": round(medians["transformers"] * 1e3),
                    "ratio": round(medians["transformers"] / medians["own"], 2),
                }
            )
    return rows


def _shape(arguments: argparse.Namespace) -> Shape:
    return TINY if arguments.quick else QWEN3_0_6B


def _checkpoint(shape: Shape, parent: str) -> Path:
    return write_checkpoint(shape, Path(parent), device=torch.device("cpu"), dtype=torch.bfloat16)


def _weights(folder: Path, dtype: str) -> DecoderWeights:
    return load_weights(describe_decoder(folder), dtype=dtype, quantization="none")


def _random_bits(generator: np.random.Generator, size: tuple[int, ...], dtype: str) -> BitsArray:
    """Values of some hundredths, as bits."""
    values = generator.standard_normal(size, dtype=np.float32) * np.float32(0.02)
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype("u2")


def _packed(weight: BitsArray) -> BitsArray:
    outputs, depth = weight.shape
    return np.ascontiguousarray(weight.reshape(outputs // LANES, LANES, depth).transpose(0, 2, 1))


def _product(packed: BitsArray, x: BitsArray, out: BitsArray, depth: int) -> Callable[[], object]:
    marker = np.empty(0, dtype=packed.dtype)
    addresses = address_of(x), address_of(packed), address_of(out)

    def call() -> None:
        multiply(
            marker, addresses[0], x.strides[0], 0, len(x), addresses[1], depth, 0,
            len(packed), addresses[2], out.strides[0],
        )  # fmt: skip

    return call


def _attention(context: int, num_tokens: int, dtype: str) -> Callable[[], object]:
    """Of the last tokens of a sequence whose blocks lie anywhere in the cache."""
    group = HEADS // KV_HEADS
    generator = np.random.default_rng(0)
    cache = _random_bits(generator, (context // LANES, 2 * KV_HEADS, LANES * HEAD_DIM), dtype)
    table = np.pad(generator.permutation(len(cache)).astype(np.int32), (0, TABLE_PADDING))
    queries = _random_bits(generator, (KV_HEADS, num_tokens * group, HEAD_DIM), "float32")
    out = np.empty((num_tokens, HEADS, HEAD_DIM), dtype=np.float32)
    scratch = np.empty(scratch_bytes(HEAD_DIM), dtype=np.uint8)
    marker = np.empty(0, dtype=cache.dtype)

    def call() -> None:
        for head in range(KV_HEADS):
            for first in range(0, num_tokens * group, MAX_TASK_ROWS):
                attend(
                    marker, address_of(out) + head * group * out.strides[1], out.strides[0],
                    address_of(queries) + head * queries.strides[0] + first * queries.strides[1],
                    address_of(cache) + head * cache.strides[1],
                    address_of(cache) + (KV_HEADS + head) * cache.strides[1], address_of(table),
                    cache.strides[0], min(MAX_TASK_ROWS, num_tokens * group - first), group, first,
                    context - num_tokens, HEAD_DIM, 0, np.float32(HEAD_DIM**-0.5),
                    np.float32(0), 0, address_of(scratch),
                )  # fmt: skip

    return call


def _torch_attention(context: int, num_tokens: int) -> Callable[[], object]:
    queries, keys, values = (
        torch.randn(1, HEADS, length, HEAD_DIM) for length in (num_tokens, context, context)
    )
    mask = torch.full((num_tokens, context), -torch.inf).triu(context - num_tokens + 1)
    return functools.partial(
        torch.nn.functional.scaled_dot_product_attention, queries, keys, values, attn_mask=mask
    )


def _decoder(weights: DecoderWeights, num_threads: int) -> CpuDecoder:
    return CpuDecoder(
        weights,
        num_blocks=PREFILL // LANES + 1,
        block_size=LANES,
        num_threads=num_threads,
        max_num_tokens=CHUNK,
    )


def _layout(decoder: CpuDecoder, start: int, num_tokens: int) -> Any:
    end = start + num_tokens
    return lay_out(
        [
            ScheduledTokens(
                token_ids=[i % decoder.vocab_size for i in range(start, end)],
                draft_token_ids=[],
                num_computed_tokens=start,
                block_table=list(range(-(-end // LANES))),
            )
        ],
        block_size=LANES,
    )


def _decode(decoder: CpuDecoder, positions: Iterator[int]) -> None:
    decoder.forward(_layout(decoder, next(positions), 1))


def _prefill(decoder: CpuDecoder) -> None:
    for start in range(0, PREFILL, CHUNK):
        decoder.forward(_layout(decoder, start, min(CHUNK, PREFILL - start)))


def _seconds(call: Callable[[], object], count: int = 1) -> float:
    """Of one call; the mean of `count`."""
    started_s = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started_s) / count


def _medians(
    variants: dict[str, Callable[[], object]], rounds: int, count: int = 1
) -> dict[str, float]:
    """Seconds of one call of each variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, call in variants.items():
            seconds = _seconds(call, count)
            if number:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


MEASURES = {
    "products": measure_products,
    "attention": measure_attention,
    "step": measure_steps,
    "families": measure_families,
    "prefill": measure_prefill,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("decoder", __doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.threads, arguments.rounds = [1], 1
    print(processor())
    result: dict[str, Any] = {}
    for name in arguments.only:
        result[name] = MEASURES[name](arguments)
        print(f"\n{name}\n\n{table(result[name])}", flush=True)
    write_figures("decoder", arguments, result)


if __name__ == "__main__":
    # stdout is the tables'.
    configure_logs("warning", "benchmark")
    main()
