"""Captured graphs of a step, by the number of tokens that it is padded to.

A decoder launches hundreds of kernels per step, which takes a host longer than a small step takes a
device. A graph is captured once and replayed with one call; but it has fixed sizes and addresses.
So a step is padded to a bucket, and reads its arrays where `device_batch.py` keeps them:

    bucket = pool.bucket_of(layout.num_tokens)
    arrays = batch.load(layout, num_padded_tokens=bucket)
    output = compute(arrays) if bucket is None else pool.run(bucket)

Buckets are close together, so that any number of drafts per sequence finds one near: no sequence is
padded to the depth of another. Large steps need no graph, since the device is the slower side.

The first run of a bucket is eager, which has kernels compiled and chosen. Graphs are captured when
the model is loaded, within a stated time, and later for buckets that are used often; all within a
stated memory. None is given up for another: what it has taken of the memory that all graphs share
would not come back. After a capture that fails there is no other: graphs that exist are replayed,
and a step that fits into none of them runs eagerly.

Knows neither layout nor model.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from servicekit.logs import get_logger

# By 8 to 128, by 32 to 512, by 64 to 2,048. Fewer than 8 tokens are no faster: products with a
# single row were slower on an H200.
BUCKETS: tuple[int, ...] = (
    *range(8, 129, 8),
    *range(160, 513, 32),
    *range(576, 2049, 64),
)

# Runs without a graph until one is captured while others wait: a capture takes as long as many
# steps.
_RUNS_BEFORE_CAPTURE = 16

# What a graph keeps beside torch's memory. What is gone beyond that, other programs have taken: on
# an H200, all 46 graphs of a model of 28 layers kept 158 MiB, torch's memory included.
_MOST_DRIVER_BYTES = 64 << 20

logger = get_logger(__name__)

Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)


class CapturedGraph(Protocol[Output_co]):
    """A step's kernels, recorded. `num_bytes`: what it keeps of the device's memory."""

    num_bytes: int

    def replay(self) -> Output_co:
        """Queues the kernels; returns the output, which the next replay of any graph overwrites."""
        ...


class Capture(Protocol):
    """Records the kernels that a function launches, without running them.

    After an exception, the caller can run kernels as before.
    """

    def __call__(self, compute: Callable[[], Output]) -> CapturedGraph[Output]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """What graphs may cost.

    Attributes:
        buckets: ascending numbers of tokens.
        max_bytes: of all graphs together; the last one captured may exceed it.
        max_prepare_s: for capturing when the model is loaded.
    """

    buckets: tuple[int, ...] = BUCKETS
    max_bytes: int
    max_prepare_s: float


@dataclass(slots=True)
class _Bucket(Generic[Output]):
    graph: CapturedGraph[Output] | None = None
    num_runs: int = 0


def buckets_within(buckets: tuple[int, ...], max_num_tokens: int) -> tuple[int, ...]:
    """The buckets below the largest step, and its size, if any bucket is as large: under load,
    steps are.
    """
    within = [size for size in buckets if size < max_num_tokens]
    return (*within, max_num_tokens) if len(within) < len(buckets) else tuple(within)


class GraphPool(Generic[Output]):
    """Owned by the engine thread."""

    def __init__(
        self,
        compute: Callable[[int], Output],
        *,
        capture: Capture,
        limits: GraphLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        compute: launches a step of so many tokens, padding included, on the arrays that are
            loaded. What it returns, and what it needs between two steps, must be in memory that was
            allocated before: a graph's own memory is shared with the others.
        """
        self._compute = compute
        self._capture = capture
        self._limits = limits
        self._clock = clock
        self._buckets: dict[int, _Bucket[Output]] = {size: _Bucket() for size in limits.buckets}
        # A capture has failed; there will be no other.
        self._has_failed = False

    @property
    def num_bytes(self) -> int:
        """The memory of all graphs."""
        return sum(each.graph.num_bytes for each in self._buckets.values() if each.graph)

    @property
    def captured(self) -> list[int]:
        """The buckets that have a graph."""
        return [size for size, each in self._buckets.items() if each.graph is not None]

    def bucket_of(self, num_tokens: int) -> int | None:
        """To how many tokens a step is padded: to the next bucket or, if that can have no graph, to
        one that can, up to twice as large. None: not at all, it runs eagerly.
        """
        sizes = [size for size in self._limits.buckets if size >= num_tokens]
        fitting = (size for size in sizes if self._buckets[size].graph or not self._has_failed)
        size = next(fitting, None)
        return size if size is not None and size <= 2 * sizes[0] else None

    def prepare(self, buckets: Iterable[int] | None = None) -> None:
        """Captures graphs while there is time and memory. The loaded arrays are computed on.

        Args:
            buckets: which, in order; None: all, from the largest on, since a smaller graph uses the
                memory of a larger one again.
        """
        # A collection takes as long as a capture: one for all of them. Afterwards, the memory of
        # graphs is measured.
        gc.collect()
        started_at_s, longest_s = self._clock(), 0.0
        for size in reversed(self._limits.buckets) if buckets is None else buckets:
            if self._has_failed:
                return
            before_s = self._clock()
            if before_s - started_at_s + longest_s > self._limits.max_prepare_s:
                logger.info("graphs_not_captured", reason="time", captured=self.captured)
                return
            if self.num_bytes >= self._limits.max_bytes:
                logger.info("graphs_not_captured", reason="memory", captured=self.captured)
                return
            try:
                self._compute(size)
            except torch.OutOfMemoryError:
                # Smaller ones may fit. What it took meanwhile is free again before a capture.
                logger.warning("graph_not_captured", bucket=size, reason="out of memory")
                continue
            self._capture_bucket(size)
            longest_s = max(longest_s, self._clock() - before_s)

    def run(self, bucket: int) -> Output:
        """Runs a step that was loaded with this padding."""
        mine = self._buckets[bucket]
        mine.num_runs += 1
        if mine.graph is not None:
            return mine.graph.replay()
        output = self._compute(bucket)
        if self._deserves_graph(mine):
            self._capture_bucket(bucket)
        return output

    def _deserves_graph(self, bucket: _Bucket[Output]) -> bool:
        """Whether it is used often, there is memory, and captures succeed."""
        is_used = bucket.num_runs >= _RUNS_BEFORE_CAPTURE
        return is_used and not self._has_failed and self.num_bytes < self._limits.max_bytes

    def _capture_bucket(self, size: int) -> None:
        """Captures a graph. A failed capture is survived, and is the last one: the device has
        computed nothing in it, but what torch and CUDA remember of it is not known to be whole.
        """
        try:
            self._buckets[size].graph = self._capture(lambda: self._compute(size))
        except RuntimeError as error:  # out of memory, too
            self._has_failed = True
            logger.warning(
                "graph_not_captured", bucket=size, captured=self.captured, reason=str(error)
            )


class CudaCapture:
    """Captures graphs of one GPU, which share memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # torch has one stream for all captures, and drops the workspace that its libraries have on
        # a stream when any graph of that stream goes: other models' graphs would still use it.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, compute: Callable[[], Output]) -> CapturedGraph[Output]:
        graph = torch.cuda.CUDAGraph()
        # What this gives back is none of the graph's.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, torchs_bytes = self._memory()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                output = compute()
        except BaseException:
            self._clean_up(stream)
            raise
        free_bytes_now, torchs_bytes_now = self._memory()
        torchs_bytes = torchs_bytes_now - torchs_bytes
        others_bytes = max(0, free_bytes - free_bytes_now - torchs_bytes)
        return _CudaGraph(graph, output, torchs_bytes + min(others_bytes, _MOST_DRIVER_BYTES))

    def _memory(self) -> tuple[int, int]:
        """Bytes of the device that are free, and those that torch holds in this process."""
        return torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)

    def _clean_up(self, stream: torch.cuda.Stream) -> None:
        """Does what `torch.cuda.graph` leaves undone where CUDA cannot end a capture.

        The capture's stream would stay the thread's; and while the allocator takes a capture to be
        under way, it neither reuses memory of other streams nor gives any back.
        """
        torch.cuda.set_stream(stream)
        index = self._device.index
        # RuntimeError: the capture failed later, and the allocator knows that it is over.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(
                torch.cuda.current_device() if index is None else index, self._pool
            )


class _CudaGraph(Generic[Output]):
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Output, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._graph = graph
        self._output = output

    def replay(self) -> Output:
        self._graph.replay()
        return self._output
