"""`local_tandem` runs all services during a block, here with stand-ins for them."""

import json
import os
from pathlib import Path

import pytest

from tandem.local import LocalTandemError, local_tandem

pytestmark = pytest.mark.stand_in
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def environ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    # `python -m` looks in the working folder first, so the stand-ins come before the services.
    monkeypatch.chdir(folder)
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def test_everything_runs_within_the_block_and_nothing_after_it(
    folder: Path, environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with local_tandem(model=folder / "model", environ=environ) as addresses:
        assert set(addresses) == {"grpc", "http"}
        pids: dict[str, int] = {}
        # The drafter may still be starting.
        while set(pids) != {"drafter", "verifier", "gateway"}:
            for line in capfd.readouterr().err.splitlines():
                if line[:1] == "{":
                    pids[json.loads(line)["stand_in"]] = json.loads(line)["pid"]
        for pid in pids.values():
            os.kill(pid, 0)
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_failed_start_is_an_error_that_shows_the_logs_also_when_quiet(
    folder: Path, environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "verifier.fails").touch()
    with (
        pytest.raises(LocalTandemError, match="ended with 1"),
        local_tandem(model=folder / "model", environ=environ, quiet=True),
    ):
        pytest.fail("it was not ready")
    assert "verifier-0 exited with status 3" in capfd.readouterr().err


def test_a_failing_block_shows_the_logs_of_a_quiet_run(
    folder: Path, environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        local_tandem(model=folder / "model", environ=environ, quiet=True),
    ):
        _ = 1 / 0
    assert "gateway serves at" in capfd.readouterr().err
