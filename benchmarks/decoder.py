"""The CPU decoder's kernels beside torch, transformers and the memory's bandwidth.

    python -m benchmarks.decoder [--threads 1 2] [--rounds 5] [--json FILE]

- products: rows times a packed weight beside `torch.mm`, for shapes of the bundled model and of a
  0.6B and a 1.7B one. One thread.
- attention: the last tokens of a context, heads of Qwen3-0.6B, beside torch's
  `scaled_dot_product_attention` in float32, whose keys and values are repeated beforehand for all
  query heads. One thread.
- step: a plain step of one sequence, random weights of Qwen3-0.6B's shape, context 400; and its
  time over that of reading the weights once, at the bandwidth that a copy in memory reaches.
- prefill: 2,000 tokens, 512 at a time, random weights of a shape between the bundled model and
  0.6B; transformers computes the same shape in one piece.

Compared variants alternate within a round; a figure is the median over the rounds. Nothing here
depends on the weights' values.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.machine import processor
from servicekit.kernels.memory import address_of
from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.cpu.attention import MAX_TASK_ROWS, attend, scratch_bytes
from verifier.cpu.decoder import CpuDecoder
from verifier.cpu.products import multiply
from verifier.cpu.tiles import TABLE_PADDING
from verifier.cpu.weights import (
    LANES,
    Activation,
    BitsArray,
    DecoderWeights,
    Layer,
    Matrix,
    Rotary,
    WeightType,
)

PRODUCTS = ((256, 1536), (768, 256), (1024, 4096), (2048, 6144))
NUM_ROWS = (1, 8, 32, 512)
TYPES = {"float32": WeightType.FLOAT32, "bfloat16": WeightType.BFLOAT16}
ATTENTION = ((1024, 256), (4096, 256), (16384, 256), (65536, 64), (4096, 1), (65536, 1))
"""Tokens of context, and how many of them are queries."""
CONTEXT, PREFILL, CHUNK = 400, 2000, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a Qwen3 model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


SHAPE_06B = Shape(
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
)
SHAPE_PREFILL = Shape(
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=2048,
)


def random_bits(generator: np.random.Generator, size: tuple[int, ...], kind: WeightType) -> Any:
    """Weights of some hundredths, as bits."""
    values = generator.standard_normal(size, dtype=np.float32) * np.float32(0.02)
    return values if kind is WeightType.FLOAT32 else (values.view(np.uint32) >> 16).astype("u2")


def random_weights(shape: Shape, kind: WeightType) -> DecoderWeights:
    """A decoder of random weights."""
    generator = np.random.default_rng(0)

    def matrix(num_outputs: int, depth: int) -> Matrix:
        blocks = random_bits(generator, (num_outputs // LANES, depth, LANES), kind)
        return Matrix(blocks=blocks, num_outputs=num_outputs)

    size, inner = shape.hidden_size, shape.intermediate_size
    attended = shape.num_heads * shape.head_dim
    ones = np.ones(size, dtype=np.float32)
    head_ones = np.ones(shape.head_dim, dtype=np.float32)
    frequencies = 1e6 ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    layers = [
        Layer(
            input_norm=ones,
            qkv=matrix(attended + 2 * shape.num_kv_heads * shape.head_dim, size),
            query_norm=head_ones,
            key_norm=head_ones,
            output=matrix(size, attended),
            attention_output_norm=None,
            mlp_output_norm=None,
            mlp_norm=ones,
            gate_up=matrix(2 * inner, size),
            down=matrix(size, inner),
            experts=None,
            sliding_window=0,
            rotary=0,
        )
        for _ in range(shape.num_layers)
    ]
    return DecoderWeights(
        hidden_size=size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        norm_eps=1e-6,
        attention_scaling=shape.head_dim**-0.5,
        attention_softcap=0.0,
        logits_softcap=0.0,
        embedding_scale=1.0,
        activation=Activation.SILU,
        rotaries=[Rotary(inv_freq=frequencies.astype(np.float32))],
        layers=layers,
        final_norm=ones,
        embeddings=None,
        head=matrix(shape.vocab_size, size),
        linear_type=kind,
        other_type=kind,
    )


def weight_bytes(weights: DecoderWeights) -> int:
    """Of all that a plain step reads once."""
    total = weights.head.blocks.nbytes
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert matrix is not None
            total += matrix.blocks.nbytes
    return total


def copy_bandwidth() -> float:
    """Bytes per second that one thread reads and writes when it copies in memory."""
    source = np.ones(1 << 28, dtype=np.uint8)
    target = np.empty_like(source)
    best = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    return 2 * source.nbytes / best


def measure_products(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of each product by our kernels and by torch, one thread."""
    torch.set_num_threads(1)
    rows = []
    for depth, outputs in PRODUCTS:
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
            medians = _medians(variants, rounds, count)
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


def measure_attention(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of one layer's attention by our kernel and by torch, one thread."""
    torch.set_num_threads(1)
    shape = SHAPE_06B
    rows = []
    for context, num_tokens in ATTENTION:
        variants: dict[str, Callable[[], object]] = {
            **{name: _attention(context, num_tokens, kind) for name, kind in TYPES.items()},
            "torch float32": _torch_attention(context, num_tokens),
        }
        medians = _medians(variants, rounds)
        pairs = shape.num_heads * num_tokens * (context - num_tokens / 2)
        rows.append(
            {
                "context": context,
                "queries": num_tokens,
                **{f"{name}, ms": round(s * 1e3, 2) for name, s in medians.items()},
                "float32, GF/s": round(4 * shape.head_dim * pairs / medians["float32"] / 1e9),
                **{
                    f"{name} over torch": round(medians["torch float32"] / medians[name], 2)
                    for name in TYPES
                },
            }
        )
    return rows


def measure_steps(threads: list[int], rounds: int) -> list[dict[str, Any]]:
    """Plain steps of the 0.6B shape."""
    rows = []
    for dtype, kind in TYPES.items():
        weights = random_weights(SHAPE_06B, kind)
        for num_threads in threads:
            decoder = _decoder(weights, num_threads)
            layout = _layout(decoder, CONTEXT, 1)
            decoder.forward(layout)
            steps, bandwidths = [], []
            for _ in range(rounds):
                steps.append(_seconds(functools.partial(decoder.forward, layout), 5))
                bandwidths.append(copy_bandwidth())
            decoder.close()
            floor = weight_bytes(weights) / statistics.median(bandwidths)
            rows.append(
                {
                    "dtype": dtype,
                    "threads": num_threads,
                    "ms": round(statistics.median(steps) * 1e3, 1),
                    "weights, GB": round(weight_bytes(weights) / 1e9, 2),
                    "copy of one thread, GB/s": round(statistics.median(bandwidths) / 1e9, 1),
                    "time over reading the weights": round(statistics.median(steps) / floor, 2),
                }
            )
    return rows


def measure_prefill(threads: list[int], rounds: int) -> list[dict[str, Any]]:
    """Prefill beside transformers."""
    rows = []
    for dtype, kind in TYPES.items():
        weights = random_weights(SHAPE_PREFILL, kind)
        model = _transformers_model(SHAPE_PREFILL, dtype)
        token_ids = torch.arange(PREFILL)[None] % SHAPE_PREFILL.vocab_size
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            decoder = _decoder(weights, num_threads)
            own, other = [], []
            for _ in range(rounds):
                own.append(_seconds(functools.partial(_prefill, decoder)))
                with torch.inference_mode():
                    other.append(_seconds(functools.partial(model, token_ids, logits_to_keep=1)))
            decoder.close()
            medians = statistics.median(own), statistics.median(other)
            rows.append(
                {
                    "dtype": dtype,
                    "threads": num_threads,
                    "ms": round(medians[0] * 1e3),
                    "transformers, ms": round(medians[1] * 1e3),
                    "ratio": round(medians[1] / medians[0], 2),
                }
            )
    return rows


def _packed(weight: BitsArray) -> BitsArray:
    outputs, depth = weight.shape
    return np.ascontiguousarray(weight.reshape(outputs // LANES, LANES, depth).transpose(0, 2, 1))


def _product(packed: BitsArray, x: BitsArray, out: BitsArray, depth: int) -> Callable[[], object]:
    marker = np.empty(0, dtype=packed.dtype)
    addresses = address_of(x), address_of(packed), address_of(out)

    def call() -> None:
        multiply(
            marker, addresses[0], x.strides[0], len(x), addresses[1], depth, 0, len(packed),
            addresses[2], out.strides[0],
        )  # fmt: skip

    return call


def _attention(context: int, num_tokens: int, kind: WeightType) -> Callable[[], object]:
    """Of the last tokens of a sequence whose blocks lie anywhere in the cache."""
    shape = SHAPE_06B
    heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    generator = np.random.default_rng(0)
    cache = random_bits(generator, (context // LANES, 2 * heads, LANES * shape.head_dim), kind)
    table = np.pad(generator.permutation(len(cache)).astype(np.int32), (0, TABLE_PADDING))
    queries = random_bits(
        generator, (heads, num_tokens * group, shape.head_dim), WeightType.FLOAT32
    )
    out = np.empty((num_tokens, shape.num_heads, shape.head_dim), dtype=np.float32)
    scratch = np.empty(scratch_bytes(shape.head_dim), dtype=np.uint8)
    marker = np.empty(0, dtype=cache.dtype)

    def call() -> None:
        for head in range(heads):
            for first in range(0, num_tokens * group, MAX_TASK_ROWS):
                attend(
                    marker, address_of(out) + head * group * out.strides[1], out.strides[0],
                    address_of(queries) + head * queries.strides[0] + first * queries.strides[1],
                    address_of(cache) + head * cache.strides[1],
                    address_of(cache) + (heads + head) * cache.strides[1], address_of(table),
                    cache.strides[0], min(MAX_TASK_ROWS, num_tokens * group - first), group, first,
                    context - num_tokens, shape.head_dim, 0, np.float32(shape.head_dim**-0.5),
                    np.float32(0), address_of(scratch),
                )  # fmt: skip

    return call


def _torch_attention(context: int, num_tokens: int) -> Callable[[], object]:
    shape = SHAPE_06B
    queries, keys, values = (
        torch.randn(1, shape.num_heads, length, shape.head_dim)
        for length in (num_tokens, context, context)
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


def _prefill(decoder: CpuDecoder) -> None:
    for start in range(0, PREFILL, CHUNK):
        decoder.forward(_layout(decoder, start, min(CHUNK, PREFILL - start)))


def _transformers_model(shape: Shape, dtype: str) -> Any:
    sizes = asdict(shape)
    config = Qwen3Config(
        **{k: v for k, v in sizes.items() if not k.startswith("num_")},
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


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


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["products", "attention", "step", "prefill"],
        help="all without it",
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    measures = {
        "products": lambda: measure_products(arguments.rounds),
        "attention": lambda: measure_attention(arguments.rounds),
        "step": lambda: measure_steps(arguments.threads, arguments.rounds),
        "prefill": lambda: measure_prefill(arguments.threads, arguments.rounds),
    }
    print(processor())
    result: dict[str, Any] = {"machine": processor()}
    for name in arguments.only or measures:
        result[name] = measures[name]()
        print(f"\n{name}\n\n{_table(result[name])}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
