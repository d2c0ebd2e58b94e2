"""Which bucket a step goes to, and which buckets have a graph."""

import contextlib
import itertools
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
    buckets_within,
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


def test_buckets_are_close_together() -> None:
    assert BUCKETS[:17] == (*range(8, 129, 8), 160)
    assert BUCKETS[-1] == 2048
    assert max(b / a for a, b in itertools.pairwise(BUCKETS) if a >= 64) == 1.25
    assert list(BUCKETS) == sorted(set(BUCKETS))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (4, (4,)),
        (8, (8,)),
        (12, (8, 12)),
        (64, (8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (*range(8, 97, 8), 100)),
        (2048, BUCKETS),
        (8192, BUCKETS),
    ],
)
def test_the_largest_step_has_a_bucket_unless_it_is_beyond_all(
    limit: int, expected: tuple[int, ...]
) -> None:
    assert buckets_within(BUCKETS, limit) == expected


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


def test_preparing_collects_garbage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each graph: CUDA's calls do nothing here."""
    collected: list[int] = []
    monkeypatch.setattr("verifier.gpu.graph_pool.gc.collect", lambda: collected.append(1))
    captures = stand_in_for_cuda(monkeypatch)
    limits = GraphLimits(buckets=(1, 2, 4), max_bytes=1000, max_prepare_s=100.0)
    capture = CudaCapture(torch.device("cuda", 0))
    graphs = GraphPool(lambda num_tokens: num_tokens, capture=capture, limits=limits)
    graphs.prepare()
    assert graphs.captured == [1, 2, 4]
    assert len(collected) == 1
    assert len(captures) == 3


def test_graphs_of_one_model_share_a_stream_that_no_other_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch drops a stream's workspaces with any of its graphs."""
    captures = stand_in_for_cuda(monkeypatch)
    one, other = (CudaCapture(torch.device("cuda", 0)) for _ in range(2))
    for capture in (one, one, other):
        capture(lambda: 1)
    streams = [each["stream"] for each in captures]
    assert streams[0] is streams[1]
    assert streams[1] is not streams[2]
    assert None not in streams


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


def test_a_capture_lets_other_threads_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = stand_in_for_cuda(monkeypatch)
    CudaCapture(torch.device("cuda", 0))(lambda: 1)
    assert captures[0]["capture_error_mode"] == "thread_local"


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


def test_preparing_ends_where_memory_does() -> None:
    pool = Pool(*range(1, 9), max_bytes=30)
    pool.capture.num_bytes = 10
    pool.graphs.prepare()
    assert pool.graphs.captured == [6, 7, 8]
    assert pool.graphs.num_bytes == 30


def test_a_bucket_that_is_used_often_gets_a_graph_later() -> None:
    pool = Pool(2, 4)
    pool.run(4, times=15)
    assert pool.graphs.captured == []
    pool.run(4, times=5)
    assert pool.graphs.captured == [4]
    assert pool.capture.num_replays == 4
    assert len(pool.calls) == 20, "a step was computed twice, or not at all"


def test_where_memory_is_full_no_graph_is_captured_or_given_up() -> None:
    pool = Pool(1, 2, 4, max_bytes=20)
    pool.capture.num_bytes = 10
    pool.graphs.prepare([1, 2])
    pool.run(4, times=1000)
    assert pool.graphs.captured == [1, 2]
    assert pool.graphs.bucket_of(4) == 4, "it runs without a graph"
    assert pool.graphs.num_bytes == 20


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


def test_preparing_ends_at_a_failed_capture() -> None:
    pool = Pool(2, 4, 8)
    pool.capture.error = RuntimeError("out of memory")
    pool.graphs.prepare()
    assert pool.calls == [8]
    assert pool.graphs.bucket_of(1) is None


def test_a_capture_that_fails_by_another_error_is_not_survived() -> None:
    pool = Pool(2)
    pool.capture.error = KeyError("a fault")
    with pytest.raises(KeyError):
        pool.graphs.prepare()


def test_without_memory_there_are_no_graphs() -> None:
    pool = Pool(1, 2, max_bytes=0)
    pool.capture.num_bytes = 1
    pool.graphs.prepare()
    pool.run(1, times=100)
    assert pool.graphs.captured == []


def test_a_step_that_raises_is_no_failed_capture() -> None:
    def fail(num_tokens: int) -> int:
        raise RuntimeError(f"{num_tokens} tokens")

    limits = GraphLimits(buckets=(2,), max_bytes=10, max_prepare_s=1.0)
    graphs = GraphPool(fail, capture=RecordingCapture(), limits=limits)
    with pytest.raises(RuntimeError, match="2 tokens"):
        graphs.run(2)


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
