"""Compiles the numeric kernels: machine code that runs without the GIL.

What was compiled is kept on disk, so that the next start is quick: beside the source, where an
image has it from its build (`compile_kernels.py`), or where numba keeps it (`NUMBA_CACHE_DIR`, the
user's cache folder) if nothing can be written there. Only where nothing can be written at all and
nothing was kept, it is compiled at every start. That the disk is full costs no more than that.

A kernel holds the code of the kernels that it calls, in other files too. So cached machine code is
valid as long as no file of the package changes that has kernels; kernels take their constants from
such files only.

On x86-64 with AVX2 the machine code is made for all such processors, not for the one that compiles:
an image's kernels then run on all nodes of a cluster.
"""

import contextlib
import functools
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding
import numba
from numba.core import caching

P = ParamSpec("P")
R = TypeVar("R")

# The level of x86-64 with AVX2, and what a processor of it has.
_COMMON_PROCESSOR = "x86-64-v3"
_ITS_FEATURES = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")


def _compile_for_all_processors() -> None:
    """Has numba make code for every processor of the level, if this one is of it."""
    config: Any = numba.config
    if platform.machine() not in ("x86_64", "AMD64") or config.CPU_NAME is not None:
        return
    features = llvmlite.binding.get_host_cpu_features()
    if all(features.get(feature, False) for feature in _ITS_FEATURES):
        config.CPU_NAME, config.CPU_FEATURES = _COMMON_PROCESSOR, ""


# Before anything is compiled.
_compile_for_all_processors()


class _BesideSource(caching.InTreeCacheLocator):
    """The folder beside the source, also where it can only be read."""

    def ensure_cache_path(self) -> None:
        pass


# The last one that numba tries.
caching.CompileResultCacheImpl._locator_classes = [
    *caching.CompileResultCacheImpl._locator_classes,
    _BesideSource,
]


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` at its first call for each new set of argument types."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
        _keep_by_contents(compiled, Path(function.__code__.co_filename))
        _keep_if_possible(compiled)
    except RuntimeError:
        # What numba raises when it finds no source file.
        compiled = numba.njit(nogil=True)(function)
    return cast(Callable[P, R], compiled)


def _package_of(source: Path) -> Path:
    """Returns the folder of the outermost package that a source file is in."""
    folder = source.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


@functools.cache
def _digest_of(package: Path) -> str:
    """Returns a digest of all source files of the package that have kernels."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if b"@kernel\n" in source:
            digest.update(f"{path.relative_to(package)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _keep_by_contents(compiled: Any, source: Path) -> None:
    """Invalidates a kernel's cached machine code when any kernel of its package changes.

    The cache beside the source is read first, even where it cannot be written to.
    """
    kept = compiled._cache._cache_file
    assert hasattr(kept, "_source_stamp"), "numba keeps its stamp elsewhere now"
    kept._source_stamp = _digest_of(_package_of(source))
    beside = source.parent / "__pycache__"
    if Path(kept._cache_path) == beside:
        return
    shipped = type(kept)(
        cache_path=str(beside),
        filename_base=compiled._cache._impl.filename_base,
        source_stamp=kept._source_stamp,
    )
    load = kept.load
    kept.load = lambda key: shipped.load(key) or load(key)


def _keep_if_possible(compiled: Any) -> None:
    """Makes a kernel serve that cannot be kept: the disk is full, or can only be read."""
    save = compiled._cache.save_overload

    def save_if_possible(signature: object, result: object) -> None:
        with contextlib.suppress(OSError):
            save(signature, result)

    compiled._cache.save_overload = save_if_possible
