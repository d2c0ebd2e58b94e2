"""Loads, stores and prefetches at addresses, for kernels that work on many texts in one call.

Passing hundreds of arrays to a kernel takes longer than its work, so it is passed their addresses
instead. The caller owns the arrays and keeps them alive during the call. Nothing here checks
anything.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from servicekit.kernels.jit import kernel

_BYTE = ir.IntType(8)
_U32 = ir.IntType(32)


def _pointer(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.inttoptr(address, ir.IntType(8 * num_bytes).as_pointer())


def _load(kind: Any, num_bytes: int, *, align: int) -> Any:
    """Makes a function that returns the number at an address.

    Args:
        kind: numba's type of the number.
        num_bytes: its size.
        align: what the address is a multiple of, in bytes.
    """

    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(_pointer(builder, arguments[0], num_bytes), align=align)

        return kind(types.int64), generate

    return intrinsic(load)


def _store(kind: Any, num_bytes: int, *, align: int) -> Any:
    """Makes a function that writes a number to an address, see `_load`."""

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], _pointer(builder, arguments[0], num_bytes), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return intrinsic(store)


def _prefetch(typing_context: Any, address: Any) -> Any:
    """Requests the cache line at an address, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer_type = _BYTE.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, _U32, _U32, _U32])
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer_type], fnty=function_type
        )
        # For reading, into every cache level, of data.
        flags = [ir.Constant(_U32, value) for value in (0, 3, 1)]
        builder.call(function, [_pointer(builder, arguments[0], 1), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _as_pointer(typing_context: Any, address: Any) -> Any:
    """Returns an address as the pointer that `numba.carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _pointer(builder, arguments[0], 1)

    return types.voidptr(types.int64), generate


load_u32 = cast(Callable[[int], np.uint32], _load(types.uint32, 4, align=4))
load_i64 = cast(Callable[[int], int], _load(types.int64, 8, align=8))
load_unaligned_u64 = cast(Callable[[int], np.uint64], _load(types.uint64, 8, align=1))
store_u8 = cast(Callable[[int, np.uint8], None], _store(types.uint8, 1, align=1))
store_u32 = cast(Callable[[int, np.uint32], None], _store(types.uint32, 4, align=4))
store_i64 = cast(Callable[[int, int], None], _store(types.int64, 8, align=8))
prefetch = cast(Callable[[int], None], intrinsic(_prefetch))
as_pointer = cast(Callable[[int], Any], intrinsic(_as_pointer))


@kernel
def signed(value: Any) -> int:
    """Returns a number as int64: the sum of a uint64 and an int64 would be a float."""
    return np.int64(value)  # type: ignore[return-value]


@kernel
def address_of(array: Any) -> int:
    """Returns the address of an array's elements; much faster than Python's `ctypes.data`."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]
