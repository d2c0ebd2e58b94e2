"""What the rows share: sizes, checkpoints and loaded models."""

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.forced_sampler import saying
from benchmarks.gpu.texts import all_texts
from benchmarks.in_process import InProcessEngine
from benchmarks.ratios import median_interval
from benchmarks.report import Goal, Measure, ratio
from benchmarks.shapes import LLAMA_3_8B, QWEN3_0_6B, TINY, Shape, write_checkpoint
from benchmarks.turns import Variant, blocking, by_turns, say
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.gpu.decoder import GpuDecoder

REPLAYED = "recorded text replayed over random weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the rows are."""

    # For steps, and for engines and services.
    large: Shape
    small: Shape
    dtype: torch.dtype
    # Tokens that a step's sequences have, and numbers of sequences.
    context: int
    batches: Sequence[int]
    # Numbers of streams of engines.
    streams: Sequence[int]
    # Of the attention kernel: sequences and tokens of each.
    kernel: tuple[int, int]
    max_model_len: int
    # The longest length of a model for long texts, and the tokens of all of a step's.
    long_model_len: int
    long_context: int
    max_num_batched_tokens: int
    max_new_tokens: int
    copied_bytes: int
    # Steps per turn, and rounds.
    steps: int
    rounds: int


FULL = Size(
    large=LLAMA_3_8B,
    small=QWEN3_0_6B,
    dtype=torch.bfloat16,
    context=2048,
    batches=(1, 8, 32),
    streams=(1, 32, 128),
    kernel=(32, 8192),
    max_model_len=4096,
    long_model_len=131_072,
    long_context=100_000,
    max_num_batched_tokens=2048,
    max_new_tokens=128,
    copied_bytes=1 << 30,
    steps=20,
    rounds=5,
)
ON_CPU = Size(
    large=TINY,
    small=TINY,
    dtype=torch.float32,
    context=64,
    batches=(1, 2),
    streams=(1, 4),
    kernel=(2, 256),
    max_model_len=512,
    long_model_len=2048,
    long_context=1600,
    max_num_batched_tokens=256,
    max_new_tokens=32,
    copied_bytes=1 << 24,
    steps=5,
    rounds=3,
)


def size_for(device: torch.device, *, quick: bool) -> Size:
    size = FULL if device.type == "cuda" else ON_CPU
    return dataclasses.replace(size, steps=2, rounds=1, max_new_tokens=12) if quick else size


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run's rows."""

    device: torch.device
    size: Size
    # Checkpoints are written here, once.
    folder: Path
    _loaded: dict[str, tuple[VerifierConfig, LoadedModel]] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return str(self.size.dtype).removeprefix("torch.")

    def checkpoint(self, shape: Shape) -> Path:
        return write_checkpoint(shape, self.folder, device=self.device, dtype=self.size.dtype)

    def flags(self, shape: Shape, **others: object) -> dict[str, object]:
        """A verifier's configuration."""
        return {
            "model": self.checkpoint(shape),
            "device": self.device.type,
            # On a CPU as on a GPU: by torch.
            "numerics": "auto" if self.device.type == "cuda" else "fast",
            "dtype": self.dtype,
            "max_model_len": self.size.max_model_len,
            "max_num_seqs": max(self.size.streams),
            "max_num_batched_tokens": self.size.max_num_batched_tokens,
            # Other models are beside it.
            "kv_memory_fraction": 0.3,
            "prefix_cache": False,
            **others,
        }

    def loaded(self, shape: Shape, **others: object) -> tuple[VerifierConfig, LoadedModel]:
        """A model ready to run; each is loaded once."""
        key = f"{shape.name} {others}"
        if key not in self._loaded:
            say(f"loads {key}")
            config = VerifierConfig.model_validate(self.flags(shape, **others))
            self._loaded[key] = config, load_model(config)
        return self._loaded[key]

    @contextlib.contextmanager
    def engine(self, shape: Shape) -> Iterator[InProcessEngine]:
        """A running engine, whose model says `texts.all_texts`."""
        config, loaded = self.loaded(shape)
        if isinstance(loaded.model, GpuDecoder):
            loaded.model.forget_tables()
        model = saying(loaded.model, all_texts(self.size.max_new_tokens))
        loaded = dataclasses.replace(loaded, model=model)
        with InProcessEngine(config, loaded).started() as engine:
            yield engine

    async def compare(self, *variants: Variant) -> None:
        """Fills the variants' figures by turns."""
        await by_turns(variants, self.size.rounds)

    def ratio(
        self,
        row: str,
        what: str,
        above: Variant,
        below: Variant,
        goal: Goal | None = None,
        note: str = "",
    ) -> Measure:
        """The rounds' ratios of two variants that ran by turns. Goals are a GPU's."""
        goal = goal if self.device.type == "cuda" else None
        return ratio(row, what, above, below, dtype=self.dtype, goal=goal, note=note)

    def measure(
        self, row: str, what: str, streams: int, values: Sequence[float], goal: Goal, note: str
    ) -> Measure:
        """Of the rounds' values. Goals are a GPU's."""
        return Measure(
            row=row,
            what=what,
            streams=streams,
            dtype=self.dtype,
            value=median_interval(values),
            goal=goal if self.device.type == "cuda" else None,
            note=note,
        )

    def seconds(self, run: Callable[[], object]) -> float:
        """How long one of `size.steps` runs takes, all queued work included."""
        self._wait()
        started_at_s = time.perf_counter()
        for _ in range(self.size.steps):
            run()
        self._wait()
        return (time.perf_counter() - started_at_s) / self.size.steps

    def _wait(self) -> None:
        """Until the device has done what is queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copying(self) -> Variant:
        """A copy within the device's memory: bytes read and written per second."""
        source = torch.zeros(self.size.copied_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)

        def bytes_per_s() -> float:
            return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

        return blocking("copy", 1, bytes_per_s, unit="bytes/s")


# Yields a measure as soon as it is known.
Row = Callable[[Bench], AsyncIterator[Measure]]
