"""Compiling where nothing can be written, as in a container with a read-only root."""

from collections.abc import Callable
from typing import Any

from verifier.sampling.jit import kernel


def test_a_kernel_compiles_in_memory_where_no_cache_folder_can_be_had() -> None:
    # A file in a folder that does not exist, and that nobody may make.
    namespace: dict[str, Any] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "/nowhere/at/all.py", "exec"), namespace)
    double: Callable[[int], int] = kernel(namespace["double"])
    assert double(21) == 42
