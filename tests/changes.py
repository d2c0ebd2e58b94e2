"""Which slow tests rest: those of code that has not changed.

Compared with the commit where this branch left `origin/main`; on main, with its last commits.
Where git cannot say, as in a clone without history, no test rests.
"""

import fnmatch
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
NUM_COMMITS_OF_MAIN = 3

_GPU = ("verifier/gpu", "verifier/attention", "tests/verifier/gpu", "tests/verifier/*triton*")

#: By files of tests, the paths whose change wakes them. Another version of a package wakes all.
WAKING: Mapping[str, Sequence[str]] = {
    "tests/deploy/test_kustomizations.py": ("deploy", "tests/deploy"),
    "tests/page/*": ("gateway/page", "gateway/api", "tests/page"),
    "tests/verifier/gpu/test_*kernels.py": _GPU,
    "tests/verifier/gpu_sampling/test_compiled_kernels.py": _GPU,
    "tests/verifier/test_in_the_interpreter.py": _GPU,
    "tests/verifier/test_triton_*": _GPU,
}


def resting() -> list[str]:
    """Patterns of the files whose tests rest, relative to the repository."""
    try:
        changed = _changed()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [
        files
        for files, paths in WAKING.items()
        if not any(
            fnmatch.fnmatch(each, f"{path}*")
            for path in (*paths, "constraints.txt")
            for each in changed
        )
    ]


def _changed() -> list[str]:
    base = _git("merge-base", "HEAD", "origin/main")[0]
    if base == _git("rev-parse", "HEAD")[0]:
        base = f"HEAD~{NUM_COMMITS_OF_MAIN}"
    return _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")


def _git(*words: str) -> list[str]:
    run = subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return run.stdout.split("\n")[:-1]
