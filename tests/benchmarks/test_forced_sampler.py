"""Recorded texts are forced where a model samples; a stand-in samples for a device here."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.bench import ON_CPU, Bench
from benchmarks.gpu.shapes import TINY
from benchmarks.gpu.texts import Text, random_texts, replays
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import HostLogits, HostStep
from verifier.batch.target_model import StepHandle
from verifier.engine.messages import Decided
from verifier.gpu.decoder import GpuDecoder
from verifier.gpu.device_model import ForwardOutput, as_floats
from verifier.sampling.rejection_sampler import JudgedSequence


class StandInSampler:
    """Samples what lies on the device, on the host."""

    def __init__(self) -> None:
        self.num_steps = 0

    def begin(
        self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence], output: ForwardOutput
    ) -> StepHandle:
        self.num_steps += 1

        def fetched() -> HostLogits:
            return HostLogits(as_floats(output.logits), None, None)

        return HostStep(fetched, layout, sequences)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp("models")
    return Bench(device=torch.device("cpu"), size=ON_CPU, folder=folder, say=lambda line: None)


@pytest.fixture
def decoder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> GpuDecoder:
    """The decoder for GPUs in the place of the bench's model, with a sampler."""
    config, loaded = bench.loaded(TINY)
    served = loaded.served
    decoder = RunningGpuDecoder(
        load(bench.checkpoint(TINY)),
        block_size=served.block_size,
        num_blocks=served.num_kv_blocks,
    ).decoder
    held: Any = decoder
    held.sampler = StandInSampler()
    decoder.computes_at_launch = True
    monkeypatch.setattr(
        bench, "_loaded", {f"{TINY.name} {{}}": (config, replace(loaded, model=decoder))}
    )
    return decoder


def generated(bench: Bench, texts: list[Text], *, replays: bool = True) -> list[list[int]]:
    """What the engine says to the texts' prompts, two at a time, with drafts."""
    said: list[list[int]] = [[] for _ in texts]

    def observe(decided: Decided) -> None:
        said[int(decided.sequence_id)] += decided.token_ids

    with bench.engine(TINY, replays=replays) as engine:
        engine.run([task for task, _ in texts], streams=2, speculate=True, observe=observe)
    return said


def recorded(texts: list[Text]) -> list[list[int]]:
    return [list(text[: task.max_new_tokens]) for task, text in texts]


def test_where_the_device_samples_texts_are_forced_before_its_sampler(
    bench: Bench, decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(layout: BatchLayout) -> None:
        raise AssertionError("logits came to the host to be forced there")

    monkeypatch.setattr(decoder, "forward", forward)
    sampler: Any = decoder.sampler
    texts = [*replays(32)[:2], *random_texts(32)[:2]]
    assert generated(bench, texts) == recorded(texts)
    assert sampler.num_steps > 0
    # The model itself says its own text, as before, to another engine.
    assert decoder.sampler is sampler
    assert generated(bench, texts, replays=False) != recorded(texts)


def test_where_the_host_samples_texts_are_forced_there(bench: Bench) -> None:
    texts = [*replays(32)[:2], *random_texts(32)[:2]]
    assert generated(bench, texts) == recorded(texts)
