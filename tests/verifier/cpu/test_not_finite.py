"""What is not finite stays with the token that it comes from."""

import dataclasses

import numpy as np
import pytest

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import RunningDecoder, some_tokens, weights_of
from verifier.cpu.weights import DecoderWeights

POISON = 50


def poisoned(weights: DecoderWeights, value: float) -> DecoderWeights:
    """The weights with one number of one token's embedding replaced."""
    assert isinstance(weights.embeddings, np.ndarray)
    embeddings = weights.embeddings.copy()
    embeddings[POISON, 3] = value
    return dataclasses.replace(weights, embeddings=embeddings)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "phi3"])
def test_only_the_token_itself_is_flagged_and_others_keep_their_bits(
    name: str, value: float, num_threads: int
) -> None:
    sound = weights_of(name)
    tokens = [t for t in some_tokens(60, sound.vocab_size) if t != POISON][:50]
    place = 21
    bad = [*tokens[:place], POISON, *tokens[place:]]
    with (
        RunningDecoder(sound) as reference,
        RunningDecoder(poisoned(sound, value), num_threads=num_threads) as running,
    ):
        beside = [
            Chunk(token_ids=tokens, start=0, block_table=[3, 1, 7, 9], num_rows=50),
            Chunk(token_ids=tokens[:33], start=0, block_table=[2, 4, 6], num_rows=33),
        ]
        expected = reference.run(*beside)
        own = Chunk(token_ids=bad, start=0, block_table=[0, 5, 8, 10], num_rows=len(bad))
        first, poisoned_rows, second = running.run(beside[0], own, beside[1])
        np.testing.assert_array_equal(first, expected[0])
        np.testing.assert_array_equal(second, expected[1])
        is_finite = running.decoder.kv_is_finite
        assert is_finite is not None
        assert np.flatnonzero(~is_finite).tolist() == [50 + place]
        np.testing.assert_array_equal(poisoned_rows[:place], expected[0][:place])
        assert np.isnan(poisoned_rows[place]).all()
        # Its K/V are zeros, so the tokens after it are finite.
        assert np.isfinite(poisoned_rows[place + 1 :]).all()
        for keys, own_values in running.keys_and_values(own.block_table, len(bad)):
            assert not keys[:, place].any()
            assert not own_values[:, place].any()
            assert keys[:, place + 1].any()
        # What a step left in its buffers and blocks reaches no later one.
        later = dataclasses.replace(beside[0], block_table=own.block_table)
        [rows] = running.run(later)
        np.testing.assert_array_equal(rows, expected[0])
        assert running.decoder.kv_is_finite is not None
        assert running.decoder.kv_is_finite.all()


def test_keys_that_overflow_in_float16_are_flagged_and_stored_as_zeros() -> None:
    sound = weights_of("llama_biases", "float16")
    layer = sound.layers[1]
    assert layer.qkv.bias is not None
    bias = layer.qkv.bias.copy()
    # The second value head's sixth number; values are not turned.
    bias[(sound.num_heads + layer.num_kv_heads + 1) * layer.head_dim + 5] += 70000
    layers = [*sound.layers]
    layers[1] = dataclasses.replace(layer, qkv=dataclasses.replace(layer.qkv, bias=bias))
    tokens = some_tokens(20, sound.vocab_size)
    with RunningDecoder(dataclasses.replace(sound, layers=layers)) as running:
        [rows] = running.run(Chunk(token_ids=tokens, start=0, block_table=[2, 0], num_rows=20))
        assert running.decoder.kv_is_finite is not None
        assert not running.decoder.kv_is_finite.any()
        assert np.isfinite(rows).all()
        kept = running.keys_and_values([2, 0], 20)
    assert not kept[1][1][1, :, 5].any()
    assert kept[1][1][1, :, 4].all()
    assert kept[0][1][1, :, 5].all()
