"""What holds for every test: how many cases, and which tests run."""

import collections
import fnmatch
import functools
import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck

# More threads than free cores stall each other: tiny operations become 100 times slower. Set before
# torch is imported, also for processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Says for which processors numba compiles, before any test has it compile the verifier's kernels:
# so all processes keep the same machine code.
import servicekit.kernels.jit  # noqa: F401
from tests.changes import REPOSITORY, resting

TESTS = Path(__file__).parent

# Folders and files of which every test is marked slow: processes, whole stacks, volume.
SLOW = (
    "benchmarks",
    "cli/test_up.py",
    "deploy/monitoring/test_live.py",
    "deploy/test_chart.py",
    "drafter/ngram/test_growing_texts.py",
    "drafter/pools/test_snapshot.py",
    "drafter/test_process.py",
    "drills",
    "examples",
    "gateway/test_event_loop.py",
    "gateway/test_process.py",
    "integration",
    "page",
    "repository/test_commands.py",
    "repository/test_readme.py",
    "servicekit/test_channel.py",
    "servicekit/test_process.py",
    "verifier/drafters/test_drafted_sessions.py",
    "verifier/drafters/test_feed_model.py",
    "verifier/checkpoint/test_checkpoint.py",
    "verifier/checkpoint/test_checkpoint_refusals.py",
    "verifier/service/test_event_loop.py",
    "verifier/triton/test_in_the_interpreter.py",
    "verifier/engine/test_not_finite_kv.py",
    "verifier/test_process.py",
    "verifier/tensor_parallel/test_tensor_parallel.py",
    "verifier/transformers_model/test_transformers_model.py",
    "verifier/triton/test_triton_compilation.py",
)

# The same cases in every run, so that nobody's change fails for a case that it did not bring.
# `max_examples` is also the percentage that `tests.volume.examples` takes of a test's number.
# On a busy machine, a case may take any time.
for name, is_repeatable, max_examples in (
    ("fast", True, 5),
    ("fixed", True, 25),
    ("long", True, 100),
    ("explore", False, 100),  # new cases
):
    hypothesis.settings.register_profile(
        name,
        derandomize=is_repeatable,
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run tests marked long, and every case of the others"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Takes SIGINT as a terminal gives it.

    A job that a shell starts in the background has it ignored, and so would every process that a
    test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--long"):
        os.environ["TANDEM_TEST_LONG"] = "1"  # of `tests.volume.cases`, in processes of tests, too
        if not config.getoption("--hypothesis-profile"):
            hypothesis.settings.load_profile("long")
    elif not is_one_of_several(config):
        # Whoever names files wants them run.
        names_none = config.args_source is config.ArgsSource.TESTPATHS
        os.environ["TANDEM_TEST_RESTING"] = " ".join(resting() if names_none else ())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by their files; leaves out long and resting ones; slow files come first.

    `-m "not long"` in `addopts` would be lost wherever somebody gives a `-m` of their own. A slow
    file that came last would keep one process busy and the other waiting.
    """
    for item in items:
        if has_slow_tests(item.path):
            item.add_marker("slow")
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[item for item in items if is_marked(item, "long")])
        items[:] = [item for item in items if not is_marked(item, "long")]
    at_rest = os.environ.get("TANDEM_TEST_RESTING", "").split()
    config.hook.pytest_deselected(items=[item for item in items if is_at(item.path, at_rest)])
    items[:] = [item for item in items if not is_at(item.path, at_rest)]
    if is_one_of_several(config):
        slow_files = {item.path for item in items if is_marked(item, "slow")}
        items.sort(key=lambda item: item.path not in slow_files)


def pytest_collection_finish() -> None:
    """Excludes all that was imported from garbage collections: one would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says where the time went: seconds by folder, of all processes together."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = report.nodeid.partition("::")[0]
                seconds[path.rpartition("/")[0]] += report.duration
    longest_first = sorted(seconds, key=seconds.__getitem__, reverse=True)
    if at_rest := os.environ.get("TANDEM_TEST_RESTING"):
        terminalreporter.write_line(f"unchanged since main, so not run: {at_rest}")
    told = ", ".join(f"{folder} {seconds[folder]:.0f}" for folder in longest_first)
    terminalreporter.write_line(f"seconds by folder: {told}")


@functools.cache
def has_slow_tests(path: Path) -> bool:
    """Whether all tests of a file are slow. Asked for each test, of files that have hundreds."""
    return any(path.is_relative_to(TESTS / place) for place in SLOW)


def is_at(path: Path, patterns: list[str]) -> bool:
    file = path.relative_to(REPOSITORY).as_posix()
    return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


def is_marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def is_one_of_several(config: pytest.Config) -> bool:
    """Whether this process is one of pytest-xdist's."""
    return hasattr(config, "workerinput")
