"""Which slow tests rest: those of code that has not changed.

Compared with the commit where this branch left `origin/main`; on main, with its last commits.
Where git cannot say, as in a clone without history, no test rests.
"""

import fnmatch
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

_GPU = ("verifier/gpu*", "verifier/attention*", "tests/verifier/gpu*", "tests/verifier/*triton*")
#: By files of tests, what wakes them, beside other versions of packages.
WAKING = {
    "tests/deploy/test_chart.py": (
        "deploy/*",
        "docs/deploy.md",
        "docs/security.md",
        "tests/deploy/*",
    ),
    "tests/page/*": ("gateway/page/*", "gateway/api/*", "tests/page/*"),
    "tests/verifier/gpu/test_*kernels.py": _GPU,
    "tests/verifier/gpu_sampling/test_compiled_kernels.py": _GPU,
    "tests/verifier/triton/test_in_the_interpreter.py": _GPU,
    "tests/verifier/triton/test_triton_*": _GPU,
}


def resting() -> list[str]:
    """Patterns of the files whose tests rest, relative to the repository."""
    try:
        [base], [head] = _git("merge-base", "HEAD", "origin/main"), _git("rev-parse", "HEAD")
        changed = _git("diff", "--name-only", "HEAD~3" if base == head else base)
        changed += _git("ls-files", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError):
        return []
    return [
        files
        for files, waking in WAKING.items()
        if not any(fnmatch.filter(changed, each) for each in (*waking, "constraints.txt"))
    ]


def _git(*words: str) -> list[str]:
    run = subprocess.run(
        ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()
