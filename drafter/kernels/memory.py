"""Loads, stores and prefetches at addresses, for kernels that work on many texts in one call.

A kernel that takes hundreds of texts cannot be given hundreds of arrays: unpacking them takes
longer than the work. It is given their addresses instead. Who passes an address owns the array
behind it and keeps it alive for as long as the call lasts; nothing here checks anything.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from drafter.kernels.jit import kernel

_BYTE = ir.IntType(8)
_U32 = ir.IntType(32)
_I64 = ir.IntType(64)

Code = tuple[Any, Callable[..., Any]]
"""A signature, and what emits the code; numba's form of an intrinsic."""


def _load_u8(typing_context: Any, address: Any) -> Code:
    """Returns the byte at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer()), align=1)

    return types.uint8(types.int64), generate


def _store_u8(typing_context: Any, address: Any, value: Any) -> Code:
    """Writes a byte to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        builder.store(arguments[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint8), generate


def _load_u32(typing_context: Any, address: Any) -> Code:
    """Returns the uint32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _U32.as_pointer()), align=4)

    return types.uint32(types.int64), generate


def _store_u32(typing_context: Any, address: Any, value: Any) -> Code:
    """Writes a uint32 to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _U32.as_pointer())
        builder.store(arguments[1], pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32), generate


def _load_i64(typing_context: Any, address: Any) -> Code:
    """Returns the int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _I64.as_pointer()), align=8)

    return types.int64(types.int64), generate


def _load_unaligned_u64(typing_context: Any, address: Any) -> Code:
    """Returns the uint64 at an address that need not be a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _I64.as_pointer()), align=1)

    return types.uint64(types.int64), generate


def _store_unaligned_u64(typing_context: Any, address: Any, value: Any) -> Code:
    """Writes a uint64 to an address that need not be a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        builder.store(arguments[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


def _store_i64(typing_context: Any, address: Any, value: Any) -> Code:
    """Writes an int64 to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        builder.store(arguments[1], pointer, align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _prefetch(typing_context: Any, address: Any) -> Code:
    """Asks for the cache line at an address, and does not wait for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer_type = _BYTE.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, _U32, _U32, _U32])
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer_type], fnty=function_type
        )
        # To be read, to stay in every cache level, of data.
        flags = [ir.Constant(_U32, value) for value in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], pointer_type), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _as_pointer(typing_context: Any, address: Any) -> Code:
    """Returns an address as the pointer that `numba.carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTE.as_pointer())

    return types.voidptr(types.int64), generate


load_u8 = cast(Callable[[int], np.uint8], intrinsic(_load_u8))
store_u8 = cast(Callable[[int, np.uint8], None], intrinsic(_store_u8))
load_u32 = cast(Callable[[int], np.uint32], intrinsic(_load_u32))
store_u32 = cast(Callable[[int, np.uint32], None], intrinsic(_store_u32))
load_i64 = cast(Callable[[int], int], intrinsic(_load_i64))
load_unaligned_u64 = cast(Callable[[int], np.uint64], intrinsic(_load_unaligned_u64))
store_unaligned_u64 = cast(Callable[[int, np.uint64], None], intrinsic(_store_unaligned_u64))
store_i64 = cast(Callable[[int, int], None], intrinsic(_store_i64))
prefetch = cast(Callable[[int], None], intrinsic(_prefetch))
as_pointer = cast(Callable[[int], Any], intrinsic(_as_pointer))


@kernel
def signed(value: Any) -> int:
    """Returns a number as int64: mixed with another kind, uint64 would become a float."""
    return np.int64(value)  # type: ignore[return-value]


@kernel
def address_of(array: Any) -> int:
    """Returns where an array's elements are; from Python much faster than `array.ctypes.data`."""
    return array.ctypes.data  # type: ignore[no-any-return]


def whole_lines(num_rows: int, num_words: int) -> npt.NDArray[np.int64]:
    """Returns [num_rows, num_words] zeros; rows begin with cache lines if 8 words divide them."""
    words = np.zeros(num_words * num_rows + 8, dtype=np.int64)
    first = -address_of(words) // 8 % 8
    return words[first : first + num_words * num_rows].reshape(num_rows, num_words)
