"""Compiles the decoder's kernels for GPUs, down to their machine code; needs none.

python -m tests.verifier.gpu.compile_kernels
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verifier.gpu.kernels.gate import gate_kernel
from verifier.gpu.kernels.norm import add_norm_kernel
from verifier.gpu.kernels.rotary import rotate_and_store_kernel

# Ampere, Ada, Hopper.
CAPABILITIES = (80, 89, 90)


def compile_for(capability: int, kernel: Any, types: dict[str, str], **constants: Any) -> None:
    """Compiles a kernel; `types` are Triton's, of its arguments that are no constants."""
    signature = types | dict.fromkeys(constants, "constexpr")
    names = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature=names, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]


def compile_all(capability: int, element: str) -> None:
    """All kernels, for activations of a type."""
    rows, floats = f"*{element}", "*fp32"
    gate = {"gate_up": rows, "gated": rows, "size": "i32"}
    for is_silu in (True, False):
        compile_for(capability, gate_kernel, gate, IS_SILU=is_silu, BLOCK=1024)
    norm = {"residual": floats, "update": rows, "update_norm": floats, "weight": floats}
    norm |= {"normed": rows, "size": "i32", "eps": "fp32"}
    for has_norm in (True, False):
        flags = {"HAS_UPDATE": True, "HAS_UPDATE_NORM": has_norm}
        compile_for(capability, add_norm_kernel, norm, BLOCK=4096, **flags)
    heads = {"qkv": rows, "rotated": rows, "turns": floats, "head_norms": floats}
    heads |= {"slot_mapping": "*i64", "keys": rows, "values": rows, "is_bad": "*i32"}
    heads |= {"eps": "fp32"}
    heads |= dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "num_pairs"), "i32")
    for has_norms in (True, False):
        compile_for(capability, rotate_and_store_kernel, heads, HAS_NORMS=has_norms, BLOCK=128)


def main() -> None:
    for capability in CAPABILITIES:
        for element in ("fp32", "fp16", "bf16"):
            compile_all(capability, element)
            print(f"compiled for {capability}, {element}")


if __name__ == "__main__":
    main()
