"""Compiles the numeric kernels to machine code, which runs without the GIL.

Machine code is cached on disk: beside the source, where an image has it from its build
(`warm_up.py`), else where numba stores it (`NUMBA_CACHE_DIR`, or the user's cache folder).
A disk that is full or read-only only means that kernels are compiled at every start.

A kernel's machine code contains that of the kernels it calls, in other files too. So it is valid
only as long as no file of its package that has kernels changes, and no file of this package.
Kernels take their constants from such files, or from ones that say so with a line
`# Kernels take constants from here.`

On x86-64, code is generated for a level (with AVX2, AVX-512, or VNNI too), not for this processor
alone, so an image's kernels run on all nodes of a cluster (`ship.py`).
"""

import contextlib
import functools
import gc
import glob
import hashlib
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import llvmlite.binding
import numba
from numba.core import caching

from servicekit.kernels.linked import compile_calls_as_parts

P = ParamSpec("P")
R = TypeVar("R")

_AVX2 = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_AVX512 = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
# What `platform.machine` calls x86-64.
MACHINES = ("x86_64", "AMD64")


class Level(NamedTuple):
    """Instructions that kernels are compiled for.

    Attributes:
        cpu, features: as LLVM and numba's variables name them; features are those beside the cpu's.
        required: features that a processor must have.
    """

    cpu: str
    features: str
    required: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process compiles for this level."""
        return {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": self.features}


# The best one first. Without the tuning, LLVM takes VNNI's instructions apart again.
LEVELS = (
    Level("x86-64-v4", "+avx512vnni,+fast-dpwssd", (*_AVX2, *_AVX512, "avx512vnni")),
    Level("x86-64-v4", "", (*_AVX2, *_AVX512)),
    Level("x86-64-v3", "", _AVX2),
)


def _target_level() -> None:
    """Makes numba target the best level whose features this processor has.

    `NUMBA_CPU_NAME` overrides it, with a level's or another name that LLVM knows, and
    `NUMBA_CPU_FEATURES`.
    """
    config: Any = numba.config
    if config.CPU_NAME in [level.cpu for level in LEVELS] and config.CPU_FEATURES is None:
        # Those of the level, as in an image; not all that this processor has.
        config.CPU_FEATURES = ""
    if platform.machine() not in MACHINES or config.CPU_NAME is not None:
        return
    has = llvmlite.binding.get_host_cpu_features()
    for level in LEVELS:
        if all(has.get(feature, False) for feature in level.required):
            config.CPU_NAME, config.CPU_FEATURES = level.cpu, level.features
            return


# What files with kernels contain, or with their constants.
_MARK = re.compile(rb"@kernel\n|@intrinsic\n|intrinsic\(|# Kernels take constants from here\.\n")

# Before anything is compiled.
_target_level()


class _BesideSource(caching.InTreeCacheLocator):
    """The folder beside the source, even where it is read-only."""

    def ensure_cache_path(self) -> None:
        pass


# Numba tries it last.
caching.CompileResultCacheImpl._locator_classes = [
    *caching.CompileResultCacheImpl._locator_classes,
    _BesideSource,
]


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` at its first call for each new set of argument types.

    A division by zero gives infinity or NaN, as IEEE 754 has it, and raises nothing.
    """
    try:
        compiled = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
        _stamp_by_contents(compiled, Path(function.__code__.co_filename))
        _name_by_key(compiled)
        _tolerate_unwritable(compiled)
    except RuntimeError:
        # Numba found no place for its cache.
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
    compile_calls_as_parts(compiled)
    return cast(Callable[P, R], compiled)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Saves a sixth of the time: the compiler makes many objects and little garbage."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def _package_of(source: Path) -> Path:
    """Returns the folder of the outermost package of a source file."""
    folder = source.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def stamped_sources(package: Path) -> dict[Path, bytes]:
    """The files, and what they hold, that a package's machine code depends on: those of it that
    have kernels or their constants, and this package's.
    """
    own = sorted(Path(__file__).parent.glob("*.py"))
    sources = {path: path.read_bytes() for path in [*sorted(package.rglob("*.py")), *own]}
    return {path: source for path, source in sources.items() if path in own or _MARK.search(source)}


@functools.cache
def _digest_of(package: Path) -> str:
    digest = hashlib.sha256()
    for path, source in stamped_sources(package).items():
        digest.update(f"{path.name} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _stamp_by_contents(compiled: Any, source: Path) -> None:
    """Invalidates a kernel's cached machine code when any kernel of its package changes.

    The cache beside the source is read first, even where it is read-only.
    """
    own = compiled._cache._cache_file
    assert hasattr(own, "_source_stamp"), "numba keeps its stamp elsewhere now"
    own._source_stamp = _digest_of(_package_of(source))
    beside = source.parent / "__pycache__"
    load = _tolerant_load(own)
    own.load = load
    if Path(own._cache_path) == beside:
        return
    shipped = type(own)(
        cache_path=str(beside),
        filename_base=compiled._cache._impl.filename_base,
        source_stamp=own._source_stamp,
    )
    load_shipped = _tolerant_load(shipped)
    own.load = lambda key: load_shipped(key) or load(key)


def _name_by_key(compiled: Any) -> None:
    """Gives the machine code for each set of argument types a file of its own.

    Numba gives it the next free number, without a lock: two processes that compile a kernel for
    different types at a time may take the same one, and the index then names the code of the other
    types, for good. With a file for each key, an entry of the index may be lost, and the kernel is
    compiled once more.
    """
    own = compiled._cache._cache_file
    base: str = compiled._cache._impl.filename_base

    def save(key: Any, data: Any) -> None:
        overloads = own._load_index()
        if not overloads:
            # Nothing names what is there.
            for unused in Path(own._cache_path).glob(f"{glob.escape(base)}.*.nbc"):
                unused.unlink(missing_ok=True)
        digest = hashlib.sha256(f"{own._source_stamp} {key!r}".encode()).hexdigest()[:24]
        overloads[key] = f"{base}.{digest}.nbc"
        own._save_index(overloads)
        own._save_data(overloads[key], data)

    own.save = save


def _tolerant_load(file: Any) -> Callable[[Any], Any]:
    """The loading of a cache file, which gives nothing where it cannot be read. One that is torn or
    damaged is removed, so that it is written anew.
    """
    load = file.load

    def load_if_possible(key: Any) -> Any:
        try:
            return load(key)
        except OSError:
            pass
        except Exception:
            # Damaged bytes make pickle raise anything.
            with contextlib.suppress(OSError):
                Path(file._index_path).unlink()
        return None

    return load_if_possible


def _tolerate_unwritable(compiled: Any) -> None:
    """Lets a kernel run whose machine code cannot be saved: the disk is full or read-only."""
    save = compiled._cache.save_overload

    def save_if_possible(signature: object, result: object) -> None:
        # An index that is damaged and cannot be removed makes pickle raise anything.
        with contextlib.suppress(Exception):
            save(signature, result)

    compiled._cache.save_overload = save_if_possible
