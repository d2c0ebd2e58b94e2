"""What is in a bucket's padding changes no bit of the real rows.

A small model of transformers computes the golden trace from the arrays of `DeviceBatch`, in a
bucket of 3 tokens, as a decoder on a GPU does: all rows of the bucket, real or not.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.golden_trace import TEXT, TRACE
from tests.verifier.gpu.graph_stand_in import RecordingCapture
from tests.verifier.paged_model import SMALL
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.gpu.device_batch import BatchLimits, DeviceArrays, DeviceBatch
from verifier.gpu.graph_pool import GraphLimits, GraphPool
from verifier.model.checkpoint import describe, reference_logits
from verifier.model.transformers_model import ATTENTION_NAME, register_attention

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 4
BUCKET = 3
VOCAB_SIZE = 151_936
# Of the trace: a step is numbered from 1.
PLAIN_STEPS = (2, 13)

Spoil = Callable[[DeviceArrays, int], None]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    register_attention()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(**SMALL | {"vocab_size": VOCAB_SIZE})
        made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    model: PreTrainedModel = made.eval().requires_grad_(False)
    return model


class ArraysAttention:
    """Implements `StepAttention` from a step's arrays; rows of no entry get `padding`."""

    def __init__(self, arrays: DeviceArrays, cache: KVCache, padding: float) -> None:
        self._arrays = arrays
        self._cache = cache
        self._padding = padding

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        arrays = self._arrays
        self._cache.write(layer, keys, values, arrays.slot_mapping.long())
        attended = torch.full_like(queries, self._padding)
        spans = itertools.pairwise(arrays.cu_seqlens_q.tolist())
        for entry, (start, end) in enumerate(spans):
            if start == end:
                continue
            length = int(arrays.seq_lens[entry])
            positions = torch.arange(length)
            blocks = arrays.block_tables[int(arrays.table_rows[entry])].long()
            slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            cached_keys, cached_values = self._cache.gathered(layer, slots)
            attended[:, start:end] = torch.nn.functional.scaled_dot_product_attention(
                queries[None, :, start:end],
                cached_keys.transpose(0, 1)[None],
                cached_values.transpose(0, 1)[None],
                attn_mask=positions <= positions[length - (end - start) :, None],
                scale=scaling,
                enable_gqa=True,
            )[0]
        return attended.transpose(0, 1)


class PaddedTrace:
    """Computes the golden trace step by step; `spoil` changes each step's padding."""

    def __init__(self, model: PreTrainedModel, spoil: Spoil, padding: float = 0.0) -> None:
        self.capture = RecordingCapture()
        self.trash: torch.Tensor
        self._model = model
        self._spoil = spoil
        self._padding = padding
        shape = describe(model, dtype=model.dtype, model_digest="").kv_shape
        self.cache = KVCache(shape, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device=CPU)
        limits = BatchLimits(
            max_num_tokens=16,
            max_num_tables=2,
            max_table_blocks=2,
            trash_slot=(NUM_BLOCKS - 1) * BLOCK_SIZE,
        )
        self._batch = DeviceBatch(limits, device=CPU)
        self._graphs: GraphPool[torch.Tensor] = GraphPool(
            lambda size: self._compute(self._batch.arrays(size, size, size)),
            capture=self.capture,
            limits=GraphLimits(buckets=(BUCKET,), max_bytes=1, max_prepare_s=60.0),
        )
        self._graphs.prepare()

    def run(self) -> list[torch.Tensor]:
        """Each step's logits [rows, vocabulary]."""
        return [self._step(written).clone() for written in TRACE["steps"]]

    def _step(self, written: dict[str, list[int]]) -> torch.Tensor:
        layout = layout_of(written)
        bucket = self._graphs.bucket_of(layout.num_tokens)
        arrays = self._batch.load(layout, num_padded_tokens=bucket)
        if bucket is None:
            return self._compute(arrays)
        self._spoil(arrays, layout.num_tokens)
        return self._graphs.run(bucket)[: layout.num_rows]

    def _compute(self, arrays: DeviceArrays) -> torch.Tensor:
        self.cache.begin_step()
        with torch.inference_mode():
            output = self._model(
                input_ids=arrays.token_ids[None],
                position_ids=arrays.positions[None],
                logits_to_keep=arrays.logits_indices.long(),
                use_cache=False,
                step_attention=ArraysAttention(arrays, self.cache, self._padding),
            )
        logits: torch.Tensor = output.logits[0]
        return logits


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
    arrays.token_ids[num_tokens:].random_(0, VOCAB_SIZE)
    arrays.positions[num_tokens:].random_(0, TRACE["max_model_len"])


def test_small_steps_run_in_the_bucket_and_with_stale_padding(model: PreTrainedModel) -> None:
    seen: dict[int, list[int]] = {}
    steps = [step for step in TRACE["steps"] if len(step["input_token_ids"]) <= BUCKET]

    def watch(arrays: DeviceArrays, num_tokens: int) -> None:
        seen[steps[len(seen)]["step"]] = arrays.token_ids.tolist()
        assert len(arrays.token_ids) == BUCKET

    trace = PaddedTrace(model, watch)
    trace.run()
    assert list(seen) == list(range(2, 14)), "all but the prompt's"
    assert trace.capture.num_captures == 1
    assert trace.capture.num_replays == 12
    for number in PLAIN_STEPS:
        own, stale = TRACE["steps"][number - 1]["input_token_ids"], seen[number]
        assert stale[: len(own)] == own
        assert len(own) < BUCKET
        assert any(stale[len(own) :]), "nothing stale in the padding"


def test_the_padded_trace_has_transformers_logits(model: PreTrainedModel) -> None:
    computed = PaddedTrace(model, leave).run()
    for written, rows in zip(TRACE["steps"], computed, strict=True):
        known = TEXT[: written["num_computed_tokens"]] + written["input_token_ids"]
        with torch.inference_mode():
            expected = reference_logits(model, known)[-len(rows) :]
        torch.testing.assert_close(rows, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("padding", [0.0, 1e30, float("nan")])
def test_the_contents_of_padding_change_no_bit(model: PreTrainedModel, padding: float) -> None:
    stale = PaddedTrace(model, leave)
    random = PaddedTrace(model, randomise, padding)
    for number, (expected, rows) in enumerate(zip(stale.run(), random.run(), strict=True), start=1):
        assert torch.equal(rows, expected), f"step {number}: other bits"
    # Of the sequence's own blocks.
    for layer in range(SMALL["num_hidden_layers"]):
        for ours, theirs in zip(stale.cache.blocks(layer), random.cache.blocks(layer), strict=True):
            assert torch.equal(ours[[2, 0]], theirs[[2, 0]])
