"""Which shapes of tiles suit a level of processors: the search behind `verifier/cpu/processor.py`.

    python -m benchmarks.tiles [--dtype bfloat16] [--rounds 5] [--json FILE] [--quick]
    NUMBA_CPU_NAME=x86-64-v3 python -m benchmarks.tiles    # for AVX2, also on a newer processor

Compiles the inner tile of products in every shape, rows times blocks of 16 outputs, and times each
over a whole weight, one thread, by turns. A figure is microseconds per row, the least over the
rounds; bold is the best of a number of rows, and the last column says what is chosen now. Shapes
whose sums need far more registers than there are, are left out.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from benchmarks.arguments import command_parser, write_figures
from benchmarks.machine import processor
from benchmarks.report import table
from benchmarks.turns import say
from servicekit.kernels.memory import address_of
from verifier.checkpoint.weight_types import LANES, WeightType
from verifier.cpu.kernels.tiles import _PREFETCHED_BYTES, _Tile
from verifier.cpu.kernels.vectors import constant, intrinsic
from verifier.cpu.processor import TILES

BLOCKS = (1, 2, 3, 4, 6, 8)
MOST_ROWS, MOST_SUMS = 16, 32
# Those of a layer of a small model; in bfloat16 they fit in no cache of one core.
DEPTH, OUTPUTS = 1024, 4096


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("tiles", __doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    rows_tried = range(1, 3 if arguments.quick else MOST_ROWS + 1)
    blocks_tried = BLOCKS[:2] if arguments.quick else BLOCKS
    figures = _search(arguments, rows_tried, blocks_tried)
    print(f"{processor()}; tiles of {TILES.name}, {arguments.dtype}, microseconds per row\n")
    rows = []
    for num_rows in rows_tried:
        found = {blocks: figures.get((num_rows, blocks)) for blocks in blocks_tried}
        best = min(us for us in found.values() if us is not None)
        cells = {
            f"{blocks} blocks": "-"
            if us is None
            else f"**{us:.1f}**"
            if us == best
            else f"{us:.1f}"
            for blocks, us in found.items()
        }
        chosen = TILES.num_blocks(num_rows) if num_rows <= TILES.max_rows else "-"
        rows.append({"rows": num_rows, **cells, "chosen": chosen})
    print(table(rows))
    write_figures("tiles", arguments, {"tiles": TILES.name, "rows": rows})


def _search(
    arguments: argparse.Namespace, rows_tried: Sequence[int], blocks_tried: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Microseconds per row by shape."""
    dtype = WeightType[arguments.dtype.upper()].value
    weights = np.zeros((OUTPUTS // LANES, DEPTH, LANES), dtype=dtype)
    x = np.ones((max(rows_tried), DEPTH), dtype=np.float32)
    out = np.empty((max(rows_tried), OUTPUTS), dtype=np.float32)
    calls: dict[tuple[int, int], Callable[[], object]] = {}
    for num_rows in rows_tried:
        for blocks in blocks_tried:
            if num_rows * blocks <= MOST_SUMS:
                say(f"compiles {num_rows} rows, {blocks} blocks")
                calls[num_rows, blocks] = functools.partial(
                    compiled_product(num_rows, blocks),
                    weights[:0].reshape(-1),
                    *(address_of(x), x.strides[0], address_of(weights), weights.strides[0]),
                    *(len(weights), DEPTH, address_of(out), out.strides[0]),
                )
                calls[num_rows, blocks]()
    best = dict.fromkeys(calls, np.inf)
    for number in range(arguments.rounds):
        say(f"round {number + 1}")
        for shape, call in calls.items():
            started_s = time.perf_counter()
            call()
            # Blocks that are left over behind the last tile are not computed.
            computed = len(weights) // shape[1] * shape[1] / len(weights)
            us = (time.perf_counter() - started_s) * 1e6 / shape[0] / computed
            best[shape] = min(best[shape], us)
    return best


def compiled_product(num_rows: int, num_blocks: int) -> Any:
    """Multiplies `num_rows` rows with whole tiles of a weight, all of one shape."""

    @intrinsic
    def tile(
        typing_context: Any, marker: Any, x: Any, x_row: Any, w: Any, w_block: Any, depth: Any,
        out: Any, out_row: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, x, x_row, w, w_block, depth, out, out_row = arguments
            emitted = _Tile(builder, marker.dtype, num_rows, num_blocks)
            blocks = [emitted.at(w, (w_block, j)) if j else w for j in range(num_blocks)]
            ahead = ir.Constant(ir.IntType(64), _PREFETCHED_BYTES // num_blocks)
            requested = [emitted.at(block, (ahead, 1)) for block in blocks]
            sums = [constant(0.0)] * (num_rows * num_blocks)
            sums = emitted.multiply(sums, emitted.rows_at(x, x_row), blocks, depth, requested)
            emitted.store(sums, emitted.rows_at(out, out_row))
            return context.get_dummy_value()

        return types.void(marker, *[types.int64] * 7), code

    # Not kept on disk: there, one file has one kernel of a name.
    @numba.njit(nogil=True, error_model="numpy")
    def multiply(
        marker: Any, x: int, x_row: int, w: int, w_block: int, blocks: int, depth: int, out: int,
        out_row: int,
    ) -> None:  # fmt: skip
        for block in range(0, blocks - num_blocks + 1, num_blocks):
            tile(marker, x, x_row, w + block * w_block, w_block, depth, out + 64 * block, out_row)

    return multiply


if __name__ == "__main__":
    main()
