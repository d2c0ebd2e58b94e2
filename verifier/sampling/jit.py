"""Compiles the numeric kernels: machine code that runs without the GIL.

What was compiled is kept on disk, so that the next start is quick; where numba finds no folder that
it may write to (a read-only container) it is compiled at every start. A kernel that calls others
must have them in its own file: numba looks at that alone to see whether what it kept is still
right. (The drafter's kernels, which go over several files, have a `jit.py` of their own.)
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` at its first call for each new set of argument types."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    return cast(Callable[P, R], compiled)
