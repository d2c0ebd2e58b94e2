"""Compiles the decoder's kernels for GPUs, down to their machine code; needs none.

python -m tests.verifier.gpu.compile_kernels 80:fp32 90:bf16
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verifier.gpu.kernels.experts import (
    add_experts_kernel,
    down_kernel,
    find_tiles_kernel,
    gate_up_kernel,
)
from verifier.gpu.kernels.fp8 import quantise_rows_kernel, rescale_kernel
from verifier.gpu.kernels.fusion import FUSED
from verifier.gpu.kernels.gate import gate_kernel
from verifier.gpu.kernels.norm import add_norm_kernel
from verifier.gpu.kernels.rotary import rotate_and_store_kernel

BLOCK_K = {"fp32": 32, "fp16": 64, "bf16": 64}
FIRST_WITH_FP8 = 89
FIRST_THAT_OVERLAPS = 90


def compile_for(capability: int, kernel: Any, types: dict[str, str], **constants: Any) -> None:
    """Compiles a kernel; `types` are Triton's, of its arguments that are no constants."""
    signature = types | dict.fromkeys(constants, "constexpr")
    names = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature=names, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=FUSED)
    assert compiled.asm["cubin"]


def compile_layers(capability: int, element: str) -> None:
    """Kernels of every layer, for activations of a type."""
    rows, floats = f"*{element}", "*fp32"
    overlap = {"OVERLAPS": capability >= FIRST_THAT_OVERLAPS}
    gate = {"gate_up": rows, "gated": rows, "size": "i32"}
    for is_silu in (True, False):
        compile_for(capability, gate_kernel, gate, IS_SILU=is_silu, BLOCK=1024, **overlap)
    norm = {"residual": floats, "update": rows, "update_norm": floats, "weight": floats}
    norm |= {"normed": rows, "size": "i32", "eps": "fp32"}
    for has_norm in (True, False):
        flags = {"HAS_UPDATE": True, "HAS_UPDATE_NORM": has_norm, **overlap}
        compile_for(capability, add_norm_kernel, norm, BLOCK=4096, **flags)
    heads = {"qkv": rows, "rotated": rows, "cos_sin": floats, "head_norms": floats}
    heads |= {"slot_mapping": "*i64", "keys": rows, "values": rows, "is_bad": "*i32"}
    heads |= {"eps": "fp32"}
    heads |= dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "num_pairs"), "i32")
    for has_norms in (True, False):
        flags = {"HAS_NORMS": has_norms, **overlap}
        compile_for(capability, rotate_and_store_kernel, heads, BLOCK=128, **flags)


def compile_experts(capability: int, element: str) -> None:
    """Kernels of mixtures of experts and of FP8 rows, for activations of a type."""
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
        rescale = {"product": "*bf16", "row_scale": "*fp32", "scale": "*fp32", "bias": rows}
        rescale |= {"rescaled": rows, "size": "i32"}
        compile_for(capability, rescale_kernel, rescale, HAS_BIAS=True, BLOCK=1024)


def main() -> None:
    for target in sys.argv[1:]:
        capability, _, element = target.partition(":")
        compile_layers(int(capability), element)
        compile_experts(int(capability), element)
        print(f"compiled for {capability}, {element}")


if __name__ == "__main__":
    main()
