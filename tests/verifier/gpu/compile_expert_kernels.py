"""Compiles the kernels of experts and of FP8 rows for GPUs; needs none.

python -m tests.verifier.gpu.compile_expert_kernels
"""

from tests.verifier.gpu.compile_kernels import CAPABILITIES, compile_for
from verifier.gpu.kernels.experts import (
    add_experts_kernel,
    down_kernel,
    find_tiles_kernel,
    gate_up_kernel,
)
from verifier.gpu.kernels.fp8 import quantise_rows_kernel

BLOCK_K = {"fp32": 32, "fp16": 64, "bf16": 64}
FIRST_WITH_FP8 = 89


def compile_all(capability: int, element: str) -> None:
    """All kernels, for activations of a type."""
    rows = f"*{element}"
    find = {"experts": "*i64", "tiles": "*i32"}
    find |= dict.fromkeys(("num_pairs", "num_tiles", "num_halvings"), "i32")
    compile_for(capability, find_tiles_kernel, find, TILE=64, EXPERTS=128, CHUNK=128)
    sizes = dict.fromkeys(("hidden_size", "size"), "i32")
    products = {"weights": rows, "gated": rows, "order": "*i64", "tiles": "*i32"} | sizes
    tile = {"TILE": 64, "BLOCK_N": 64, "BLOCK_K": BLOCK_K[element]}
    for is_silu in (True, False):
        gate_up = products | {"rows": rows, "per_token": "i32"}
        compile_for(capability, gate_up_kernel, gate_up, IS_SILU=is_silu, **tile)
    compile_for(capability, down_kernel, products | {"outputs": rows}, **tile)
    add = {"outputs": rows, "weights": "*fp32", "mixed": rows}
    add |= dict.fromkeys(("hidden_size", "per_token"), "i32")
    compile_for(capability, add_experts_kernel, add, BLOCK=1024)
    if capability >= FIRST_WITH_FP8:
        quantise = {"rows": rows, "values": "*fp8e4nv", "scales": "*fp32", "size": "i32"}
        compile_for(capability, quantise_rows_kernel, quantise, BLOCK=2048)


def main() -> None:
    for capability in CAPABILITIES:
        for element in ("fp32", "fp16", "bf16"):
            compile_all(capability, element)
            print(f"compiled for {capability}, {element}")


if __name__ == "__main__":
    main()
