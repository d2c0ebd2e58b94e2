"""Which bucket a step goes to, and which buckets have a graph."""

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

from tests.verifier.gpu.graph_stand_in import RecordingCapture
from tests.volume import examples
from verifier.gpu.graph_pool import (
    BUCKETS,
    CudaCapture,
    GraphLimits,
    GraphPool,
)


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Pool:
    """A pool whose steps return their bucket's number; `calls` are those of `compute`."""

    def __init__(
        self,
        *buckets: int,
        max_bytes: int = 1000,
        max_prepare_s: float = 100.0,
        step_s: float = 0.0,
    ) -> None:
        self.capture = RecordingCapture()
        self.clock = Clock()
        self.calls: list[int] = []
        self._step_s = step_s
        limits = GraphLimits(
            buckets=buckets or BUCKETS, max_bytes=max_bytes, max_prepare_s=max_prepare_s
        )
        self.graphs = GraphPool(
            self._compute, capture=self.capture, limits=limits, clock=self.clock
        )

    def run(self, bucket: int, times: int = 1) -> None:
        for _ in range(times):
            assert self.graphs.run(bucket) == bucket

    def _compute(self, num_tokens: int) -> int:
        self.calls.append(num_tokens)
        self.clock.now_s += self._step_s
        return num_tokens


def test_a_bucket_that_does_not_fit_is_left_out_and_smaller_ones_are_captured() -> None:
    pool = Pool(2, 4, 8)
    compute = pool.graphs._compute

    def with_little_memory(num_tokens: int) -> int:
        if num_tokens == 8:
            raise torch.OutOfMemoryError("not so many")
        return compute(num_tokens)

    pool.graphs._compute = with_little_memory
    pool.graphs.prepare()
    assert pool.graphs.captured == [2, 4]


def test_a_step_goes_to_the_next_bucket_and_beyond_the_last_to_none() -> None:
    graphs = Pool().graphs
    for num_tokens in range(1, 2051):
        expected = min((size for size in BUCKETS if size >= num_tokens), default=None)
        assert graphs.bucket_of(num_tokens) == expected


def test_a_prepared_bucket_is_captured_once_and_then_replayed() -> None:
    pool = Pool(2, 4)
    pool.graphs.prepare()
    assert pool.calls == [4, 2], "each runs once before its capture, the largest first"
    assert pool.graphs.captured == [2, 4]
    pool.run(2, times=40)
    assert pool.capture.num_captures == 2
    assert pool.capture.num_replays == 40


def test_graphs_of_one_model_share_memory_and_each_counts_what_it_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures = stand_in_for_cuda(monkeypatch)
    free_bytes = iter((1000, 700, 700, 700, 700, 400))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free_bytes), 1000))
    one, other = (CudaCapture(torch.device("cuda", 0)) for _ in range(2))
    assert [one(lambda: 1).num_bytes for _ in range(2)] == [300, 0]
    other(lambda: 1)
    pools = [each["pool"] for each in captures]
    assert pools[0] is pools[1]
    assert pools[1] is not pools[2]


def test_memory_that_another_program_takes_meanwhile_is_none_of_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_for_cuda(monkeypatch)
    free_bytes = iter((60 << 30, 20 << 30, 20 << 30, 40 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free_bytes), 80 << 30))
    torchs_bytes = iter((1000, 1500, 1500, 1600))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(torchs_bytes))
    capture = CudaCapture(torch.device("cuda", 0))
    assert 500 <= capture(lambda: 1).num_bytes <= 500 + (64 << 20)
    assert capture(lambda: 1).num_bytes == 100, "another program gave memory back"


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Torch's calls do nothing; the options of captures."""
    captures: list[dict[str, object]] = []

    @contextlib.contextmanager
    def graph(_: object, **options: object) -> Iterator[None]:
        captures.append(options)
        yield

    answers = {
        "graph_pool_handle": object,
        "Stream": lambda device: object(),
        "CUDAGraph": object,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (1000, 1000),
        "current_stream": lambda device: None,
        "graph": graph,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return captures


def test_preparing_ends_before_the_time_is_over() -> None:
    pool = Pool(*range(1, 9), max_prepare_s=10.0, step_s=3.0)
    pool.graphs.prepare()
    assert pool.graphs.captured == [6, 7, 8]
    assert pool.clock.now_s <= 10.0


def test_after_a_failed_capture_there_is_no_other_and_graphs_are_kept() -> None:
    pool = Pool(2, 4, 8, 32)
    pool.graphs.prepare([8])
    pool.capture.error = RuntimeError("out of memory")
    pool.run(4, times=15)
    assert pool.graphs.bucket_of(3) == 4
    pool.run(4)
    pool.capture.error = None
    pool.graphs.prepare([4])
    assert pool.graphs.bucket_of(3) == 8, "the next one that has a graph"
    assert pool.graphs.bucket_of(2) is None, "padding to 8 would cost more than a graph saves"
    assert pool.graphs.bucket_of(9) is None, "it runs without padding"
    pool.run(8, times=3)
    assert pool.capture.num_replays == 3
    pool.run(32, times=100)
    assert pool.graphs.captured == [8]
    assert pool.capture.num_captures == 1


@pytest.mark.parametrize("seed", range(examples(20)))
def test_any_use_keeps_to_the_memory_and_computes_every_step_once(seed: int) -> None:
    chooser = random.Random(seed)
    pool = Pool(*range(1, 9), max_bytes=50)
    favourite, num_runs = 1, 0
    for _ in range(3000):
        if chooser.random() < 0.01:
            favourite = chooser.randrange(1, 9)
        pool.capture.num_bytes = chooser.randrange(1, 40)
        pool.capture.error = RuntimeError("busy") if chooser.random() < 0.001 else None
        wanted = favourite if chooser.random() < 0.8 else chooser.randrange(1, 9)
        bucket = pool.graphs.bucket_of(wanted)
        if bucket is not None:
            pool.run(bucket)
            num_runs += 1
        assert pool.graphs.num_bytes <= 50 + 40, "more than the last one exceeds it"
    assert len(pool.calls) == num_runs
    assert pool.capture.num_replays > 0
