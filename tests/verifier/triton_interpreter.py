"""A process in which Triton's kernels are interpreted, on CPU tensors.

Triton decides when it is imported whether kernels are interpreted or compiled. So they are
interpreted in a process of its own, and other tests of this one may compile.

Of the interpreter, products of matrices are replaced: its own are wrong for bfloat16, which numpy
does not have, and in BLAS's order of summation, which differs from row to row of one product. On a
GPU it does not.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def interpreter() -> Iterator[Callable[..., None]]:
    """Within the context, calls functions in the process; their exceptions are raised here."""
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_interpret
    ) as pool:

        def call(function: str, *arguments: Any) -> None:
            pool.submit(_call, function, arguments).result()

        yield call


def replace_fp8_conversion() -> None:
    """From float32, of the interpreter in this process: its own does not round to even, and loses
    the carry where it rounds up to a power of two.
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter as its_module

    own = its_module._convert_float

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv:
            return own(numbers, source, target, rounding)
        assert source == tl.float32
        converted = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn)
        return converted.view(torch.uint8).numpy()

    its_module._convert_float = convert


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    replace_products()
    # Rows of tiles that are no tokens, divided 0 by 0 and not stored; what is not finite, summed.
    warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)


def replace_products() -> None:
    """Of the interpreter, in this process."""
    from triton.runtime import interpreter as its_module

    its_module.InterpreterBuilder.create_dot = _create_dot


def _call(function: str, arguments: tuple[Any, ...]) -> None:
    from tests.verifier import triton_cases

    getattr(triton_cases, function)(*arguments)


def _create_dot(
    self: Any, left: Any, right: Any, accumulated: Any, input_precision: Any, imprecise: Any
) -> Any:
    """[M, K] times [K, N] plus [M, N] in float32, each sum in the order of K."""
    factors = _as_float32(left)[:, :, None] * _as_float32(right)[None]
    return type(left)(factors.sum(axis=1) + accumulated.data, accumulated.dtype.scalar)


def _as_float32(handle: Any) -> Any:
    if handle.dtype.scalar.is_bf16():
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)
