"""Kernels compile where nothing can be cached."""

import itertools
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from servicekit.kernels.jit import LEVELS, MACHINES, kernel
from tests.volume import cases

REPOSITORY = Path(__file__).parents[2]


def test_a_kernel_compiles_in_memory_where_no_cache_folder_can_be_had() -> None:
    # Code without a source file stands for a read-only file system: numba finds no place for its
    # cache in either case and says so in the same way.
    namespace: dict[str, object] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "/nowhere/at/all.py", "exec"), namespace)
    double: Any = kernel(cast(Callable[[int], int], namespace["double"]))
    assert double(21) == 42
    assert double.nopython_signatures


LOAD = """
import sys
from pathlib import Path
import servicekit.kernels.jit
sys.path.insert(0, sys.argv[1])
from shipped.kernels import double
assert double(21) == 42
print(sum(double.stats.cache_hits.values()))
"""


def load(folder: Path, cache: Path | None, *arguments: str, before: str = "") -> int:
    """Runs the folder's kernel in a process of its own; returns how often it was not compiled.

    Args:
        folder: with the package.
        cache: numba's cache folder; None: numba's own choice.
        arguments: of the process, after the folder.
        before: code that the process runs first.
    """
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environ.pop("NUMBA_CACHE_DIR", None)
    if cache is not None:
        environ["NUMBA_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", before + LOAD, str(folder), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_kernels_beside_the_source_are_loaded_as_long_as_no_contents_change(
    tmp_path: Path,
) -> None:
    """As in an image: built in one place, copied to another, and only read there."""
    built = tmp_path / "built" / "shipped"
    (built / "deeper").mkdir(parents=True)
    for folder in (built, built / "deeper"):
        (folder / "__init__.py").touch()
    (built / "kernels.py").write_text(
        "from servicekit.kernels.jit import kernel\n"
        "from shipped.deeper.constants import TIMES\n\n\n"
        "@kernel\ndef double(x):\n    return TIMES * x\n"
    )
    (built / "deeper" / "constants.py").write_text(
        "# Kernels take constants from here.\nTIMES = 2\n"
    )
    assert load(tmp_path / "built", None) == 0
    image = tmp_path / "image"
    shutil.copytree(tmp_path / "built", image, copy_function=shutil.copyfile)
    cache = tmp_path / "cache"
    assert load(image, cache) == 1
    assert not list(cache.rglob("*.nbc"))
    with (image / "shipped" / "deeper" / "constants.py").open("a") as constants:
        constants.write("# changed\n")
    assert load(image, cache) == 0
    assert load(image, cache) == 1
    assert list(cache.rglob("*.nbc"))


NOWHERE_TO_WRITE = """
import resource, signal, tempfile
if sys.argv[2] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
else:
    def refuse(*arguments, **keywords):
        raise PermissionError("a file system that can only be read")
    tempfile.TemporaryFile = refuse
"""


@pytest.mark.parametrize(
    ("disk", "is_shipped"),
    cases(
        [("full", False), ("read-only", True)],
        [*itertools.product(("full", "read-only"), (False, True))],
    ),
)
def test_kernels_work_where_nothing_can_be_written(
    tmp_path: Path, disk: str, is_shipped: bool
) -> None:
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "kernels.py").write_text(
        "from servicekit.kernels.jit import kernel\n\n\n"
        "@kernel\ndef itself(x):\n    return x\n\n\n"
        "@kernel\ndef other(x):\n    return itself(x)\n\n\n"
        "@kernel\ndef double(x):\n    return itself(x) + other(x)\n"
    )
    if is_shipped:
        assert load(tmp_path, None) == 0
    before = "import sys\n" + NOWHERE_TO_WRITE
    assert load(tmp_path, tmp_path / "cache", disk, before=before) == is_shipped


KEEPS_FILES = """
from pathlib import Path

def refuse(*arguments, **keywords):
    raise PermissionError("a file that only its owner may remove")

Path.unlink = refuse
"""


def test_a_cache_that_is_torn_or_unreadable_only_costs_time(tmp_path: Path) -> None:
    package = tmp_path / "shipped"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text(
        "from servicekit.kernels.jit import kernel\n\n\n@kernel\ndef double(x):\n    return 2 * x\n"
    )
    assert load(tmp_path, None) == 0
    [index] = (package / "__pycache__").glob("*.nbi")
    index.write_bytes(b"")  # as after a loss of power
    assert load(tmp_path, None) == 0
    # It was written anew.
    assert load(tmp_path, None) == 1
    # A changed byte sends pickle to an unknown module.
    index.write_bytes(index.read_bytes().replace(b"numba.core", b"bumba.core"))
    assert load(tmp_path, None, before=KEEPS_FILES) == 0
    assert load(tmp_path, None) == 0
    assert load(tmp_path, None) == 1
    index.unlink()
    index.mkdir()  # whoever may read all files cannot read this one
    assert load(tmp_path, None) == 0


def test_a_division_by_zero_raises_nothing() -> None:
    """An exception would end one of a pass's threads, and the others would wait for it."""

    @kernel
    def quotient(x: float, y: float) -> float:
        return x / y

    assert quotient(1.0, 0.0) == math.inf


SHIP = """
import sys
sys.path.insert(0, sys.argv[1])
from servicekit.kernels.ship import compile_for_all_levels
from shipped.kernels import double

def scenario():
    assert double(21) == 42
    assert double(1.5) == 3.0

compile_for_all_levels(scenario)
"""


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="levels are those of x86-64")
def test_an_image_has_kernels_for_all_levels_whatever_the_builder_can_run(tmp_path: Path) -> None:
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "kernels.py").write_text(
        "from servicekit.kernels.jit import kernel\n\n\n@kernel\ndef double(x):\n    return x + x\n"
    )
    path = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    code = [sys.executable, "-c", SHIP, str(tmp_path)]
    subprocess.run(code, env={**os.environ, **path}, check=True)
    assert len(list(folder.rglob("*.nbc"))) == 2 * len(LEVELS)
    # Without running anything, since this machine may be unable to.
    look_up = (
        "from numba import types; from shipped.kernels import double\n"
        "for kind in (types.int64, types.float64): double.compile((kind,))\n"
        "print(sum(double.stats.cache_hits.values()))"
    )
    for level in LEVELS:
        done = subprocess.run(
            [sys.executable, "-c", look_up],
            env={**os.environ, **path, **level.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "2"


@pytest.mark.slow
def test_a_warm_drafter_compiles_no_kernel_while_it_serves() -> None:
    """Compiling would block it for seconds."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.drafter.late_compilations"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr
