"""A process in which Triton's kernels are interpreted, on CPU tensors.

Triton decides when it is imported whether kernels are interpreted or compiled. So they are
interpreted in a process of its own, and other tests of this one may compile. Files of checks are
tests of such a process (`run_checks`), of which this module is a plugin.

Of the interpreter, products of matrices are replaced: its own are wrong for bfloat16, which numpy
does not have, and in BLAS's order of summation, which differs from row to row of one product. On a
GPU it does not.
"""

import dataclasses
import gc
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from tests.volume import Cases, cases

ROOT = Path(__file__).parents[3]


def interpreted_cases(chosen: Cases, every: Cases) -> Cases:
    """On a GPU, every case; here, a choice of them, as `cases` has it."""
    return cases(chosen, every) if os.environ.get("TRITON_INTERPRET") == "1" else every


def run_checks(*files: Path) -> None:
    """Runs the tests of files in a process in which kernels are interpreted; all must pass."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", __name__),
        # Those of the folders above import half of the project.
        "--noconftest",
        *map(str, files),
    ]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def pytest_configure() -> None:
    """Called where this module is a plugin."""
    _prepare()


def pytest_collection_finish() -> None:
    """As `tests/conftest.py` has it, which is not read there."""
    gc.collect()
    gc.freeze()


def _prepare() -> None:
    """The interpreter of this process."""
    from triton.runtime import interpreter as its_module

    its_module.InterpreterBuilder.create_dot = _create_dot
    # Its sums and products for an overflow's sake end in an assertion, which only `debug` makes.
    its_module.interpreter_builder.options = dataclasses.replace(
        its_module.interpreter_builder.options, sanitize_overflow=False
    )
    _patch_once(its_module)
    _remember_types(its_module)
    _replace_fp8_conversion(its_module)
    _keep_comparisons(its_module)


def _patch_once(its_module: Any) -> None:
    """Not at every launch, and at every call within a kernel: a third of the interpreter's time."""
    import triton.language as tl

    its_module._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    its_module._patch_lang = lambda function: its_module._LangPatchScope()


def _remember_types(its_module: Any) -> None:
    """What each of an operation's values derives from its type anew, by the type's name: another
    third.
    """
    import triton.language as tl

    own_number, own_block, own_value, own_broadcast = (
        its_module._get_np_dtype,
        tl.block_type.__init__,
        tl.tensor.__init__,
        its_module.TritonSemantic.broadcast_impl_value,
    )
    numbers: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    values: dict[str, Any] = {}

    def number(its_type: Any) -> Any:
        name = its_type.scalar.name
        if name not in numbers:
            numbers[name] = own_number(its_type)
        return numbers[name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = element_ty.name, sizes
        if key not in blocks:
            own_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            blocks[key] = self.__dict__
        self.__dict__.update(blocks[key])

    def value(self: Any, handle: Any, its_type: Any) -> None:
        if its_type.name not in values:
            own_value(self, handle, its_type)
            values[its_type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, its_type, its_type.scalar
        self.shape, self.numel = values[its_type.name]

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        is_same = left.type.is_block() and getattr(right.type, "shape", None) is left.type.shape
        return (left, right) if is_same else own_broadcast(self, left, right)

    its_module._get_np_dtype = number
    tl.block_type.__init__, tl.tensor.__init__ = block, value
    its_module.TritonSemantic.broadcast_impl_value = broadcast


def _replace_fp8_conversion(its_module: Any) -> None:
    """From float32: its own does not round to even, and loses the carry where it rounds up to a
    power of two.
    """
    import torch
    import triton.language as tl

    own = its_module._convert_float

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv:
            return own(numbers, source, target, rounding)
        assert source == tl.float32
        converted = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn)
        return converted.view(torch.uint8).numpy()

    its_module._convert_float = convert


def _keep_comparisons(its_module: Any) -> None:
    """A comparison of two numbers stays one when it becomes a block: by Triton 3.9's interpreter it
    would become a block of integers, which is no mask.
    """
    import triton.language as tl

    own = its_module.InterpreterBuilder.create_splat

    def splat(self: Any, its_type: Any, handle: Any) -> Any:
        if handle.data.dtype != np.bool_:
            return own(self, its_type, handle)
        return type(handle)(np.full(its_type.shape, handle.data), tl.int1)

    its_module.InterpreterBuilder.create_splat = splat


def _create_dot(
    self: Any, left: Any, right: Any, accumulated: Any, input_precision: Any, imprecise: Any
) -> Any:
    """[M, K] times [K, N] plus [M, N] in float32, each sum in the order of K: as a GPU's matrix
    units add 16 numbers at a time to what they have.
    """
    lefts, rights, sums = _as_float32(left), _as_float32(right), accumulated.data
    for first in range(0, lefts.shape[1], 16):
        part = slice(first, first + 16)
        sums = (lefts[:, part, None] * rights[None, part]).sum(axis=1) + sums
    return type(left)(sums, accumulated.dtype.scalar)


def _as_float32(handle: Any) -> Any:
    if handle.dtype.scalar.is_bf16():
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)
