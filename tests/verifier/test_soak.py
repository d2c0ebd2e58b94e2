"""Thousands of short random requests to an engine with a scripted model and too few blocks."""

import tracemalloc

import pytest

from tests.verifier.running_engine import RecordingObserver, start_engine_with
from tests.verifier.soak import Soak
from verifier.engine.observation import StepRecord


class ForgetfulObserver(RecordingObserver):
    """Keeps nothing, so that any growth is the engine's."""

    def stepped(self, record: StepRecord) -> None:
        pass

    def hop_measured(self, duration_s: float) -> None:
        pass


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_requests", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_thousands_of_requests_leave_nothing_behind(num_requests: int) -> None:
    running = start_engine_with(
        num_blocks=48,
        block_size=2,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        observer=ForgetfulObserver(),
    )
    soak = Soak(running.engine, vocab_size=3, longest_prompt=16, longest_output=10, num_at_once=28)
    soak.run(num_requests - 500)
    tracemalloc.start()
    soak.run(500)
    num_kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Entries of the cache are replaced all the time, but no more of them kept.
    assert num_kept_bytes < 100_000
    running.stop()
    load, counts = running.engine.load, soak.counts
    assert counts.num_requests == num_requests
    assert load.num_preemptions > num_requests // 200
    assert counts.num_cached_tokens > num_requests
    assert counts.num_cancelled > num_requests // 100
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
