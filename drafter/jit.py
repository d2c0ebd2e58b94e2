"""Compiles the numeric kernels: machine code that runs without the GIL.

What was compiled is kept on disk beside the source or in the user's cache folder, so that the next
start is quick; where neither can be written (a read-only container) it is compiled at every start.

A kernel holds the code of the kernels that it calls, in other files too, and numba looks at its own
file only to see whether what was kept is still right. Here it is right as long as no file beside it
that has kernels has changed. So kernels take their constants from such files only.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` at its first call for each new set of argument types."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
        folder = Path(function.__code__.co_filename).parent
        _date_by(compiled, _stamp_of(folder))
    except RuntimeError:
        # What numba raises when it finds no folder that it may write to.
        compiled = numba.njit(nogil=True)(function)
    return cast(Callable[P, R], compiled)


@functools.cache
def _stamp_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns what changes when any source file of the folder does that has kernels."""
    paths = [path for path in sorted(folder.glob("*.py")) if b"@kernel\n" in path.read_bytes()]
    stats = [(path.name, path.stat()) for path in paths]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def _date_by(compiled: Any, stamp: object) -> None:
    """Makes what is kept of a kernel count only as long as `stamp` is the same."""
    cache_file = compiled._cache._cache_file
    assert hasattr(cache_file, "_source_stamp"), "numba keeps its stamp elsewhere now"
    cache_file._source_stamp = stamp


def warm_up(call: Callable[[], object]) -> None:
    """Makes a first call of a kernel, which compiles it or loads it from disk."""
    try:
        call()
    except OSError:
        # Compiled, but not saved: the disk is full. Calling again uses what is in memory.
        call()
