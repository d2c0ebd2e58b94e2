"""Steps of the decoder on a GPU: a captured one has the bits of a launched one, is sampled as the
host samples it, and is launched without waiting for the device.
"""

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, and torch sees none here", allow_module_level=True)

from tests.verifier.gpu.step_checks import *  # noqa: F403
from tests.verifier.gpu.step_checks import BLOCK_SIZE, TEXT, decoder_of, judged, weights_of
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.gpu.decoder import Graphs
from verifier.gpu.graph_pool import CudaCapture, GraphLimits, GraphPool
from verifier.sampling import Sampling

GPU = torch.device("cuda")


def steps() -> list[BatchLayout]:
    """A prompt, drafts and single tokens of three sequences, in one bucket of 8 after the first."""
    layouts = []
    ends = [0, 0, 0]
    for sizes in ((8, 0, 0), (1, 5, 2), (3, 1, 1), (1, 1, 4), (1, 1, 1)):
        scheduled = []
        for nth, size in enumerate(sizes):
            if size:
                tokens = TEXT[ends[nth] : ends[nth] + size]
                scheduled.append(
                    ScheduledTokens(
                        token_ids=tokens[:1],
                        draft_token_ids=tokens[1:],
                        num_computed_tokens=ends[nth],
                        block_table=[2 * nth + 1, 2 * nth][: (ends[nth] + size - 1) // 16 + 1],
                        table_id=nth + 1,
                    )
                )
                ends[nth] += size
        layouts.append(lay_out(scheduled, block_size=BLOCK_SIZE))
    return layouts


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "qwen3", "gemma4", "gpt_oss", "olmo3"]
)
def test_a_captured_step_has_the_bits_of_a_launched_one(name: str) -> None:
    limits = GraphLimits(buckets=(8,), max_bytes=1 << 30, max_prepare_s=60.0)
    captured = decoder_of(
        weights_of(name), num_blocks=8, graphs=Graphs(capture=CudaCapture(GPU), limits=limits)
    )
    launched = decoder_of(weights_of(name), num_blocks=8)
    captured.warm_up()
    assert captured._graphs is not None
    assert captured._graphs.captured == [8]
    for layout in steps():
        expected = launched._batch.load(layout, num_padded_tokens=8)
        assert len(expected.token_ids) == 8
        with torch.inference_mode():
            slots = expected.slot_mapping.long()
            attention = launched._attention(expected, slots, longest_k=128)
            hidden = launched._forward.compute(expected, slots, attention)
            logits = launched._logits(hidden.rows[: layout.num_rows])
        rows = captured.forward(layout)
        np.testing.assert_array_equal(rows, logits.float().cpu().numpy())
        assert captured.kv_is_finite is not None
        assert captured.kv_is_finite.all()


def test_a_launch_waits_for_nothing() -> None:
    """Copies to and from the device are queued, in graphs and without; the sampler's, too."""
    limits = GraphLimits(buckets=(8,), max_bytes=1 << 30, max_prepare_s=60.0)
    decoder = decoder_of(
        weights_of("qwen3"),
        num_blocks=8,
        graphs=Graphs(capture=CudaCapture(GPU), limits=limits),
        samples_on_device=True,
    )
    decoder.warm_up()
    sequences = [judged(Sampling(temperature=0.8, seed=4))]
    for table_id, length in ((1, 8), (2, 8), (3, 20), (4, 20)):
        layout = lay_out(
            [
                ScheduledTokens(
                    token_ids=TEXT[:length],
                    draft_token_ids=[],
                    num_computed_tokens=0,
                    block_table=[1, 2],
                    table_id=table_id,
                )
            ],
            block_size=BLOCK_SIZE,
        )
        # The first of a size may have kernels compiled.
        torch.cuda.set_sync_debug_mode("error" if table_id in (2, 4) else "default")
        try:
            step = decoder.launch(layout, sequences)
            # Waits for an event, which is no such wait.
            step.wait()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step.result().verdict.is_finite.all()


def test_a_failed_capture_leaves_the_device_as_it_was() -> None:
    """Steps run as before on the same stream, and the allocator gives memory back."""
    numbers, kept = torch.arange(64, device=GPU), torch.zeros(64, dtype=torch.int64, device=GPU)
    waits = False

    def compute(num_tokens: int) -> torch.Tensor:
        doubled = numbers[:num_tokens] * 2
        if waits and torch.cuda.is_current_stream_capturing():
            doubled.sum().item()
        return kept[:num_tokens].copy_(doubled)

    limits = GraphLimits(buckets=(8, 64), max_bytes=1 << 30, max_prepare_s=60.0)
    graphs = GraphPool(compute, capture=CudaCapture(GPU), limits=limits)
    stream = torch.cuda.current_stream()
    graphs.prepare([64])
    waits = True
    graphs.prepare([8])
    assert graphs.captured == [64]
    assert torch.cuda.current_stream() == stream
    assert graphs.bucket_of(8) is None
    expected = list(range(0, 128, 2))
    assert compute(8).tolist() == expected[:8], "launched"
    kept.zero_()
    assert graphs.run(64).tolist() == expected, "replayed"
    before = torch.cuda.memory_reserved()
    large = torch.zeros(1 << 26, device=GPU)
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
