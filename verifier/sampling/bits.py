"""A float64's bits as an integer, and back, for kernels."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _bitcast(argument: Any, result: Any, kind: Any) -> Any:
    def bitcast(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], kind)

        return result(argument), generate

    return intrinsic(bitcast)


bits_of = cast(Callable[[float], np.int64], _bitcast(types.float64, types.int64, ir.IntType(64)))
from_bits = cast(Callable[[np.int64], float], _bitcast(types.int64, types.float64, ir.DoubleType()))
