"""The promises of tests/second_try.py, checked on tests that fail in different ways."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOLD = "passed only at the second try: test_it.py::"

PASSES = "def test_that_passes(): pass\n"
FAILS = "def test_that_fails(): assert 0\n"
# Fails once.
FLAKY = """
from pathlib import Path
def test_{0}():
    if not Path("{0}").exists():
        Path("{0}").touch()
        assert 0
"""


def run(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").touch()
    (folder / "test_it.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "tests.second_try", "-q", *options],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name}
        | {
            "PYTHONPATH": str(REPOSITORY),
            # Other plugins cost a second each time.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_test_that_passes_at_the_second_try_is_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    ran = run(tmp_path, PASSES + FLAKY.format("once"), *options)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.splitlines()[-1] == f"{TOLD}test_once"
    # By itself.
    assert "1 passed" in ran.stdout.partition("== second try")[2]


def test_a_test_that_fails_twice_is_a_failure(tmp_path: Path) -> None:
    ran = run(tmp_path, FAILS + FLAKY.format("once"))
    assert ran.returncode == 1
    assert "== second try" in ran.stdout
    assert TOLD not in ran.stdout


@pytest.mark.parametrize(
    ("tests", "options"),
    [
        pytest.param("".join(map(FLAKY.format, "abcd")), (), id="many"),
        pytest.param("import os\ndef test_it(): os._exit(1)", ("-n", "1"), id="crash"),
        pytest.param(FLAKY.format("once") + "import missing_module", (), id="no import"),
    ],
)
def test_what_is_final_is_not_tried_again(
    tmp_path: Path, tests: str, options: tuple[str, ...]
) -> None:
    ran = run(tmp_path, tests, *options)
    assert ran.returncode not in (0, None)
    assert "== second try" not in ran.stdout
