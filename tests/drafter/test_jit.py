"""Kernels compile where nothing can be cached."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from drafter.jit import kernel, warm_up


def test_a_kernel_compiles_in_memory_where_no_cache_folder_can_be_had() -> None:
    # Code without a source file stands for a read-only file system: numba finds no place for its
    # cache in either case and says so in the same way.
    namespace: dict[str, object] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "/nowhere/at/all.py", "exec"), namespace)
    double: Any = kernel(cast(Callable[[int], int], namespace["double"]))
    assert double(21) == 42
    assert double.nopython_signatures


def test_a_full_disk_does_not_stop_the_warm_up() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise OSError(28, "No space left on device")

    warm_up(call)
    assert calls == [0, 1]


def test_a_kernel_that_does_not_work_stops_the_warm_up() -> None:
    def call() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        warm_up(call)
