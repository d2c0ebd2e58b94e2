"""Logits of our own kernels are the float64 oracle's, but for float32's rounding."""

import numpy as np
import pytest

from tests.verifier.cpu.numpy_decoder import all_logits
from tests.verifier.cpu.running_decoder import RunningDecoder, some_tokens, weights_of
from tests.verifier.cpu.test_loader import CONFIGS

NUM_TOKENS = 75
BLOCKS = [7, 2, 9, 0, 4]
# A prompt in two chunks, the second one across the windows' 20 tokens, single tokens, and drafts.
SIZES = [17, 33, 1, 1, 9]
KINDS = [
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float16", "none"),
    ("float32", "int8"),
    ("bfloat16", "fp8"),
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
