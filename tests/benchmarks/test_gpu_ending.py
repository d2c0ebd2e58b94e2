"""The tests that benchmarks.gpu runs first, and that nothing it started outlives it."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.own_tests import run_tests
from benchmarks.services import REPOSITORY
from servicekit.cores import available_cores
from tests.benchmarks.processes import children_of, is_running


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others cost each process of pytest most of a second."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")


async def test_outcomes_are_told_where_plugins_of_the_project_are_missing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import a_plugin_that_is_missing\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip\n"
        "def test_left_out(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no device')\n"
        "def test_without_its_fixture(broken): pass\n"
    )
    run = await run_tests(60, str(tmp_path))
    assert (run.passed, run.skipped) == (1, 1)
    assert sorted(each.partition(":")[0] for each in run.failed) == [
        *("test_bad", "test_without_its_fixture"),
    ]
    assert "no device" in str(run)


@pytest.mark.skipif(available_cores() < 2, reason="one core runs one test at a time")
async def test_tests_run_beside_each_other(tmp_path: Path) -> None:
    """Kernels are compiled for most of the time. Each waits for the other."""
    for own, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"test_{own}.py").write_text(
            "import pathlib, time\n"
            "def test_it():\n"
            f"    folder = pathlib.Path({str(tmp_path)!r})\n"
            f"    (folder / {own!r}).touch()\n"
            f"    while not (folder / {other!r}).exists(): time.sleep(0.01)\n"
        )
    run = await run_tests(60, str(tmp_path))
    assert (run.passed, run.failed) == (2, [])


@pytest.mark.skipif(available_cores() < 2, reason="one core runs one test at a time")
async def test_a_slow_tests_neighbours_do_not_wait_for_it(tmp_path: Path) -> None:
    """Those that would come after it are run by processes that have nothing left."""
    (tmp_path / "test_it.py").write_text(
        "import pathlib, time, pytest\n"
        f"ended = pathlib.Path({str(tmp_path)!r}) / 'ended'\n"
        # Even with sixteen processes, one process had both at first.
        "@pytest.mark.parametrize('nth', range(256))\n"
        "def test_one(nth):\n"
        "    if nth == 3: ended.touch()\n"
        "    end_s = time.monotonic() + 20\n"
        "    while nth == 0 and not ended.exists() and time.monotonic() < end_s: time.sleep(0.01)\n"
        "    assert nth or ended.exists()\n"
    )
    run = await run_tests(60, str(tmp_path))
    assert (run.passed, run.failed) == (256, [])


async def test_tests_that_take_too_long_or_cannot_start_are_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import time\ntime.sleep(60)\n")
    assert (await run_tests(1.5, str(tmp_path))).failed == ["not done in time"]
    [reason] = (await run_tests(60, str(tmp_path / "absent"))).failed
    assert reason.startswith("pytest ended with status ")


async def test_what_was_tested_before_the_time_was_over_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    # The slow test tells when the outcomes of the others are known, and that it has begun.
    (tmp_path / "test_it.py").write_text(
        "import pathlib, time\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_slow(pytestconfig):\n"
        "    outcomes = pathlib.Path(pytestconfig.getoption('--outcomes'))\n"
        "    while (told := outcomes.read_text()).count('ed\"') < 2 or 'slow' not in told:\n"
        "        time.sleep(0.01)\n"
        f"    pathlib.Path({str(told)!r}).write_text('')\n"
        "    time.sleep(600)\n"
    )
    limit = asyncio.timeout(600)
    monkeypatch.setattr(asyncio, "timeout", lambda _: limit)
    running = asyncio.create_task(run_tests(600, str(tmp_path)))
    await asyncio.to_thread(told.read_text)
    monkeypatch.undo()
    limit.reschedule(asyncio.get_running_loop().time())
    run = await running
    assert run.passed == 1
    assert run.failed[0].startswith("test_bad: ")
    assert run.failed[1:] == ["not done in time", "begun and not ended: test_slow"]


async def test_tests_that_are_cancelled_end(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    os.mkfifo(told)
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, time\n"
        "def test_slow():\n"
        f"    pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    running = asyncio.create_task(run_tests(600, str(tmp_path)))
    pid = int(await asyncio.to_thread(told.read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_running(pid)


async def test_a_signal_to_terminate_leaves_neither_processes_nor_files(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = tmp_path_factory.mktemp("kept")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gpu"),
        *("--device", "cpu", "--no-tests", "--rows", "decode", "verify", "sweep"),
        cwd=REPOSITORY,
        # torch makes a folder of its own, which stays.
        env=os.environ | {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(kept)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    while b"checkpoint" not in (line := await process.stderr.readline()):
        assert line, "it ended before a worker began"
    children = children_of(process.pid)
    assert children
    assert list_folder(tmp_path)
    process.terminate()
    await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(is_running(child) for child in children)
    assert not list_folder(tmp_path)


def list_folder(folder: Path) -> list[Path]:
    return list(folder.iterdir())
