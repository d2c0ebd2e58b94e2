"""Compiles kernels for every level of x86-64, for an image that runs on any node of a cluster.

The kernels that a scenario calls, for the types that it calls them with, are compiled for the
building machine's level as they run, and for the other levels in processes that only compile: the
builder need not be able to run them.
"""

import importlib
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numba
from numba.core.dispatcher import Dispatcher

from servicekit.kernels.jit import LEVELS, MACHINES

# Module, name, and the types of each version's arguments.
_Versions = list[tuple[str, str, list[Any]]]


def compile_for_all_levels(scenario: Callable[[], None]) -> None:
    """Runs `scenario`, and compiles for the other levels what it has called.

    Raises:
        subprocess.CalledProcessError: compiling for another level failed; stderr has the reason.
    """
    scenario()
    if platform.machine() not in MACHINES:
        return
    config: Any = numba.config
    versions = pickle.dumps(_compiled_versions())
    for level in LEVELS:
        if (level.cpu, level.features) != (config.CPU_NAME, config.CPU_FEATURES):
            subprocess.run(
                [sys.executable, "-m", "servicekit.kernels.ship"],
                env={**os.environ, **level.environment},
                input=versions,
                check=True,
            )


def _compiled_versions() -> _Versions:
    """All kernels that Python has called in this process."""
    return [
        (module_name, name, value.signatures)
        for module_name, module in list(sys.modules.items())
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher)
        and value.py_func.__module__ == module_name
        and value.signatures
    ]


def _compile(versions: _Versions) -> None:
    for module, name, signatures in versions:
        kernel = getattr(importlib.import_module(module), name)
        for signature in signatures:
            kernel.compile(signature)


if __name__ == "__main__":
    _compile(pickle.load(sys.stdin.buffer))
