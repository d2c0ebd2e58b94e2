"""A process that has lost another rank ends, even if it is stuck."""

import subprocess
import sys
import threading

import pytest

from tests.verifier.tensor_parallel.parallel_verifier import PATIENCE_S
from verifier.tensor_parallel.connection import RankLostError
from verifier.tensor_parallel.watch import Watch

LOSE_A_RANK_AND_BE_STUCK = """
import threading
from verifier.tensor_parallel.watch import Watch
Watch(exit_timeout_s=0.0).rank_lost("rank 1 is gone")
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_stuck_process_ends() -> None:
    command = [sys.executable, "-c", LOSE_A_RANK_AND_BE_STUCK]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 1


def test_a_failed_step_is_explained_by_the_first_rank_that_was_lost() -> None:
    watch = Watch(exit_timeout_s=threading.TIMEOUT_MAX)
    watch.rank_lost("rank 2 is gone")
    watch.rank_lost("rank 1 is gone")
    explained = watch.explain(RuntimeError("connection closed by peer"))
    assert isinstance(explained, RankLostError)
    assert str(explained) == "rank 2 is gone"
