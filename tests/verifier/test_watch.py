"""A process that has lost another rank ends, even if it is stuck."""

import threading

import pytest

from tests.verifier.parallel_verifier import FORK_SERVER, PATIENCE_S
from verifier.tensor_parallel.connection import RankLostError
from verifier.tensor_parallel.watch import Watch


def _lose_a_rank_and_be_stuck() -> None:
    Watch(exit_timeout_s=0.0).rank_lost("rank 1 is gone")
    threading.Event().wait()


@pytest.mark.slow
def test_a_stuck_process_ends() -> None:
    process = FORK_SERVER.Process(target=_lose_a_rank_and_be_stuck, daemon=True)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 1


def test_a_failed_step_is_explained_by_the_first_rank_that_was_lost() -> None:
    watch = Watch(exit_timeout_s=threading.TIMEOUT_MAX)
    watch.rank_lost("rank 2 is gone")
    watch.rank_lost("rank 1 is gone")
    explained = watch.explain(RuntimeError("connection closed by peer"))
    assert isinstance(explained, RankLostError)
    assert str(explained) == "rank 2 is gone"
