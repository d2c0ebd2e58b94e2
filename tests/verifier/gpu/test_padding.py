"""What is in a bucket's padding changes no bit of the real rows.

The decoder computes the golden trace by its own launch, in a bucket of 3 tokens: all rows of the
bucket, real or not. A graph is a stand-in for a GPU's.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.golden_trace import TEXT, TRACE
from tests.verifier.gpu.graph_stand_in import RecordingCapture
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.gpu.tables_attention import TablesBackend
from tests.verifier.gpu.test_decoder import transformers_logits
from tests.verifier.paged_model import SMALL
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.gpu.decoder import Graphs
from verifier.gpu.device_batch import DeviceArrays
from verifier.gpu.graph_pool import GraphLimits

BLOCK_SIZE = 16
NUM_BLOCKS = 4
BUCKET = 3
VOCAB_SIZE = 151_936
# Of the trace: a step is numbered from 1.
PLAIN_STEPS = (2, 13)

Spoil = Callable[[DeviceArrays, int], None]


@functools.cache
def saved() -> tempfile.TemporaryDirectory[str]:
    """The folder of a model with the trace's vocabulary. It goes with the process."""
    folder = tempfile.TemporaryDirectory()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SMALL | {"vocab_size": VOCAB_SIZE})).save_pretrained(
            folder.name
        )
    return folder


class PaddedTrace:
    """Computes the golden trace step by step; `spoil` changes each step's padding."""

    def __init__(self, spoil: Spoil, padding: float = 0.0) -> None:
        self.capture = RecordingCapture()
        limits = GraphLimits(buckets=(BUCKET,), max_bytes=1, max_prepare_s=60.0)
        self._running = RunningGpuDecoder(
            load(Path(saved().name)),
            backend=TablesBackend(padding),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_num_tokens=16,
            max_table_blocks=2,
            graphs=Graphs(capture=self.capture, limits=limits),
        )
        self.cache = self._running.cache
        self._running.decoder.warm_up()
        batch = self._running.decoder._batch
        load_layout = batch.load

        def spoiled(layout: BatchLayout, **options: Any) -> DeviceArrays:
            arrays = load_layout(layout, **options)
            if options["num_padded_tokens"] is not None:
                spoil(arrays, layout.num_tokens)
            return arrays

        batch.load = spoiled  # type: ignore[method-assign]

    def run(self) -> list[torch.Tensor]:
        """Each step's logits [rows, vocabulary]."""
        decoder = self._running.decoder
        steps = [decoder.forward(layout_of(written)).copy() for written in TRACE["steps"]]
        return [torch.from_numpy(rows) for rows in steps]


def layout_of(written: dict[str, list[int]]) -> BatchLayout:
    """The layout of a step as the trace's file has it; its sequence has blocks 2 and 0."""
    drafts = written["draft_token_ids"]
    token_ids = written["input_token_ids"]
    [end] = written["positions"][-1:]
    return lay_out(
        [
            ScheduledTokens(
                token_ids=token_ids[: len(token_ids) - len(drafts)],
                draft_token_ids=drafts,
                num_computed_tokens=written["positions"][0],
                block_table=[2, 0][: end // BLOCK_SIZE + 1],
                table_id=1,
            )
        ],
        block_size=BLOCK_SIZE,
    )


def leave(arrays: DeviceArrays, num_tokens: int) -> None:
    """Leaves the padding stale."""


def randomise(arrays: DeviceArrays, num_tokens: int) -> None:
    """Whatever another step might have left."""
    arrays.token_ids[num_tokens:].random_(0, VOCAB_SIZE)
    arrays.positions[num_tokens:].random_(0, TRACE["max_model_len"])


def test_small_steps_run_in_the_bucket_and_with_stale_padding() -> None:
    seen: dict[int, list[int]] = {}
    steps = [step for step in TRACE["steps"] if len(step["input_token_ids"]) <= BUCKET]

    def watch(arrays: DeviceArrays, num_tokens: int) -> None:
        seen[steps[len(seen)]["step"]] = arrays.token_ids.tolist()
        assert len(arrays.token_ids) == BUCKET

    trace = PaddedTrace(watch)
    trace.run()
    assert list(seen) == list(range(2, 14)), "all but the prompt's"
    assert trace.capture.num_captures == 1
    assert trace.capture.num_replays == 12
    for number in PLAIN_STEPS:
        own, stale = TRACE["steps"][number - 1]["input_token_ids"], seen[number]
        assert stale[: len(own)] == own
        assert len(own) < BUCKET
        assert any(stale[len(own) :]), "nothing stale in the padding"


def test_the_padded_trace_has_transformers_logits() -> None:
    computed = PaddedTrace(leave).run()
    for written, rows in zip(TRACE["steps"], computed, strict=True):
        known = TEXT[: written["num_computed_tokens"]] + written["input_token_ids"]
        expected = transformers_logits(Path(saved().name), known)[-len(rows) :]
        torch.testing.assert_close(rows, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("padding", [0.0, 1e30, float("nan")])
def test_the_contents_of_padding_change_no_bit(padding: float) -> None:
    stale, random = PaddedTrace(leave), PaddedTrace(randomise, padding)
    for number, (expected, rows) in enumerate(zip(stale.run(), random.run(), strict=True), start=1):
        assert torch.equal(rows, expected), f"step {number}: other bits"
    # All of the cache: padding writes nothing.
    for layer in range(SMALL["num_hidden_layers"]):
        for ours, theirs in zip(stale.cache.blocks(layer), random.cache.blocks(layer), strict=True):
            assert torch.equal(ours, theirs)
            assert not ours[[1, 3]].any(), "blocks of no sequence"
