"""Logits of our own kernels are the float64 oracle's, but for float32's rounding."""

import numpy as np
import pytest

from tests.verifier.cpu.numpy_decoder import all_logits, unpacked
from tests.verifier.cpu.running_decoder import RunningDecoder, folder_of, some_tokens, weights_of
from tests.verifier.cpu.test_loader import CONFIGS
from tests.volume import cases
from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.weight_types import WeightType
from verifier.cpu.decoder import CpuDecoder
from verifier.model.own_model import block_bytes

NUM_TOKENS = 75
BLOCKS = [7, 2, 9, 0, 4]
# A prompt in two chunks, the second one across the windows' 20 tokens, single tokens, and drafts.
SIZES = [17, 33, 1, 1, 9]
# Kernels are compiled for each, which takes seconds.
KINDS = [
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float16", "none"),
    ("bfloat16", "fp8"),
    *cases([], [("float32", "fp8"), ("float16", "fp8")]),
]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_logits_are_the_oracles(name: str, dtype: str, quantization: str) -> None:
    weights = weights_of(name, dtype, quantization)
    token_ids = some_tokens(NUM_TOKENS, weights.vocab_size)
    with RunningDecoder(weights, num_blocks=10, max_num_tokens=64) as running:
        logits = running.run_in_chunks(token_ids, SIZES, BLOCKS)
        stored = running.keys_and_values(BLOCKS, NUM_TOKENS)
    expected = all_logits(weights, token_ids, stored)
    assert np.abs(logits - expected).max() < 5e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama_yarn", "gemma2", "gemma3", "qwen2", "mixtral"])
def test_logits_of_long_texts_are_the_oracles(name: str) -> None:
    """Chunks, single tokens and drafts; windows that whole chunks lie outside of."""
    weights = weights_of(name)
    token_ids = some_tokens(700, weights.vocab_size, seed=2)
    blocks = list(range(44))[::-1]
    with RunningDecoder(weights, num_blocks=44) as running:
        logits = running.run_in_chunks(token_ids, [505, 1, 1, 3, 8, 100], blocks)
        stored = running.keys_and_values(blocks, 700)
    expected = all_logits(weights, token_ids, stored)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma4", "gemma4_dense"])
def test_keys_and_values_take_the_memory_that_is_accounted(name: str) -> None:
    """Layers differ, and some have none."""
    described = describe_decoder(folder_of(name))
    with RunningDecoder(weights_of(name, "bfloat16"), num_blocks=10) as running:
        num_bytes = sum(cache.nbytes for cache in running.decoder.kv_caches)
        assert num_bytes == 10 * block_bytes(described, WeightType.BFLOAT16, 16)


def test_logits_take_no_more_memory_than_a_step_can_need() -> None:
    weights = weights_of("llama")
    decoder = CpuDecoder(weights, num_blocks=4, block_size=16, num_threads=1, max_num_tokens=30)
    try:
        for num_rows, expected in ((4, 4), (5, 8), (16, 16), (17, 30), (30, 30)):
            scheduled = ScheduledTokens(
                token_ids=some_tokens(30, weights.vocab_size),
                draft_token_ids=[],
                num_computed_tokens=0,
                block_table=[3, 2],
                scored_offsets=range(num_rows),
                is_sampled=False,
            )
            decoder.forward(lay_out([scheduled], block_size=16))
            assert len(decoder._logits) == expected
    finally:
        decoder.close()


def test_hidden_states_are_what_the_heads_logits_come_from() -> None:
    weights = weights_of("llama")
    token_ids = some_tokens(30, weights.vocab_size)
    with RunningDecoder(weights) as running:
        expected = running.run_in_chunks(token_ids, [30], [0, 1])
        scheduled = ScheduledTokens(
            token_ids=token_ids,
            draft_token_ids=[],
            num_computed_tokens=0,
            block_table=[3, 2],
            scored_offsets=range(4, 30),
        )
        layout = lay_out([scheduled], block_size=16, wants_hidden_states=True)
        logits = running.decoder.forward(layout)[layout.scored_logits_indices]
        hidden_states = running.decoder.hidden_states
        assert hidden_states is not None
        np.testing.assert_array_equal(logits, expected[4:])
        assert hidden_states.shape == (26, weights.hidden_size)
        product = hidden_states.astype(np.float64) @ unpacked(weights.head, weights.other_type).T
        np.testing.assert_allclose(logits, product, rtol=0, atol=1e-4)
        # The next step leaves them alone; one that wants none has none.
        kept = hidden_states.copy()
        running.run_in_chunks(token_ids[::-1], [30], [0, 1])
        np.testing.assert_array_equal(hidden_states, kept)
        assert running.decoder.hidden_states is None
