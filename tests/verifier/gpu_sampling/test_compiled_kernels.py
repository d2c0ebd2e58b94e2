"""The kernels compile for GPUs, which none is needed for, and do not fuse what the host does not.

Compiled in a process of their own: the interpreter, where it is on, is on for the whole process.
"""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from verifier.gpu.sampling.kernels import choice, cut, jit, rows

POINTERS = {
    "row_sequences": "i64", "steps": "i64", "integers": "i64",
    "numbers": "fp64", "token_counts": "i32", "bias_token_ids": "i64", "biases": "fp64",
    "stop_token_ids": "i64", "allowed": "i32", "raw_tops": "fp64", "tops": "fp64",
    "top_token_ids": "i32", "adjusted": "fp64", "scaled": "fp64", "weights": "fp64",
    "sums": "fp64", "scores": "fp64", "token_ids_chosen": "i32", "is_usable": "i8",
    "verdicts": "i64",
}
SCALARS = {"row_stride": "i64", "first_row": "i32"}
SIZES = {
    "VOCAB_SIZE": 151936, "STEP_WIDTH": 37, "MAX_BIASES": 1024, "MAX_STOPS": 2048,
    "NUM_BLOCKS": 75, "PADDED": 128, "BLOCK": 2048, "VERDICT_WIDTH": 34, "PADDED_WIDTH": 64,
}
compiled = {}
for target in sys.argv[1:]:
    capability, POINTERS["logits"] = target.split()
    for kernel, warps in [
        (rows.adjust_rows, 8), (rows.weigh_rows, 8), (cut.cut_rows, 16), (choice.race_rows, 8),
        (choice.decide, 4),
    ]:
        types, sizes = {}, {}
        for name in kernel.arg_names:
            if name in SIZES:
                types[name], sizes[name] = "constexpr", SIZES[name]
            else:
                types[name] = SCALARS.get(name) or "*" + POINTERS[name]
        if kernel is cut.cut_rows:
            sizes["BLOCK"] = 8192
        source = ASTSource(kernel, signature=types, constexprs=sizes)
        gpu = GPUTarget("cuda", int(capability), 32)
        made = triton.compile(source, target=gpu, options={"num_warps": warps, **jit.NO_FUSION})
        ptx = made.asm["ptx"]
        compiled[f"{kernel.__name__}, {target}"] = {
            "size": len(made.asm["cubin"]),
            "fused": ptx.count("fma.rn.f64"),
            "approximate": len(re.findall(r"div\\.(?:full|approx)", ptx)),
            "shared": made.metadata.shared,
            "spills": len(re.findall(r"st\\.local", ptx)),
        }
print(json.dumps(compiled))
"""


@pytest.mark.long
def test_the_kernels_compile_and_fuse_nothing() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    targets = ["80 fp32", "90 bf16", "100 fp16"]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *targets],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) == 5 * len(targets)
    for name, kernel in kernels.items():
        assert kernel["size"] > 0, name
        assert kernel["approximate"] == 0, name
        # The library's logarithm is made of fused operations; there is no other.
        if not name.startswith("race_rows"):
            assert kernel["fused"] == 0, name
        assert kernel["spills"] == 0, name
        assert kernel["shared"] <= 48 << 10, name
