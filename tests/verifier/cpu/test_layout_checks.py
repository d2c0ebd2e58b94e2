"""A layout that would lead a kernel outside its buffers is refused before it runs."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import RunningDecoder, some_tokens, weights_of

NUM_BLOCKS, MAX_NUM_TOKENS = 8, 40


@pytest.fixture(scope="module")
def running() -> RunningDecoder:
    return RunningDecoder(weights_of("llama"), num_blocks=NUM_BLOCKS, max_num_tokens=MAX_NUM_TOKENS)


def chunks(vocab_size: int) -> tuple[Chunk, Chunk]:
    tokens = some_tokens(20, vocab_size)
    return (
        Chunk(token_ids=tokens[:5], start=30, block_table=[6, 1, 3], num_rows=5),
        Chunk(token_ids=tokens[5:], start=0, block_table=[0]),
    )


def changed(array: Any, place: int, value: int) -> Any:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("input_token_ids", 3, 97, "a token id outside"),
        ("input_token_ids", -1, -1, "a token id outside"),
        ("positions", 0, -1, "a position outside"),
        ("positions", 0, 16 * NUM_BLOCKS, "a position outside"),
        ("slot_mapping", 7, -1, "a slot outside"),
        ("slot_mapping", 7, 16 * NUM_BLOCKS, "a slot outside"),
        ("logits_indices", 0, -1, "a logits row"),
        ("logits_indices", 0, 20, "a logits row"),
        ("cu_seqlens_q", 0, 1, "query offsets"),
        ("cu_seqlens_q", 1, 21, "query offsets"),
        ("cu_seqlens_q", 1, -1, "query offsets"),
        ("cu_seqlens_q", 2, 19, "query offsets"),
        ("cu_seqlens_q", 2, 21, "query offsets"),
        ("seq_lens", 0, 4, "shorter than its queries"),
        ("seq_lens", 0, 49, "a block table that is shorter"),
        ("seq_lens", 1, 1 << 40, "a block table that is shorter"),
    ],
)
def test_a_wrong_number_is_refused(
    running: RunningDecoder, name: str, place: int, value: int, message: str
) -> None:
    layout = running.lay_out(*chunks(running.weights.vocab_size))
    running.decoder.forward(layout)
    wrong = {name: changed(getattr(layout, name), place, value)}
    with pytest.raises(ValueError, match=message):
        running.decoder.forward(dataclasses.replace(layout, **wrong))


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS, 1 << 30])
def test_a_block_outside_the_cache_is_refused(running: RunningDecoder, block: int) -> None:
    layout = running.lay_out(*chunks(running.weights.vocab_size))
    wrong = dataclasses.replace(layout, block_tables=[[6, block, 3], [0]])
    with pytest.raises(ValueError, match="a block outside"):
        running.decoder.forward(wrong)


def test_a_sequence_longer_than_the_cache_is_refused(running: RunningDecoder) -> None:
    layout = running.lay_out(*chunks(running.weights.vocab_size))
    lengths = changed(layout.seq_lens, 0, 16 * NUM_BLOCKS + 1)
    wrong = dataclasses.replace(layout, seq_lens=lengths, block_tables=[[1] * 9, [0]])
    with pytest.raises(ValueError, match="longer than the cache"):
        running.decoder.forward(wrong)


def test_too_many_tokens_or_rows_or_none_are_refused(running: RunningDecoder) -> None:
    tokens = some_tokens(MAX_NUM_TOKENS + 1, running.weights.vocab_size)
    table = list(range(NUM_BLOCKS))
    running.run(Chunk(token_ids=tokens[1:], start=0, block_table=table))
    with pytest.raises(ValueError, match="room for"):
        running.run(Chunk(token_ids=tokens, start=0, block_table=table))
    layout = running.lay_out(*chunks(running.weights.vocab_size))
    rows = np.zeros(MAX_NUM_TOKENS + 1, dtype=np.int64)
    with pytest.raises(ValueError, match="room for"):
        running.decoder.forward(dataclasses.replace(layout, logits_indices=rows))
    nothing = np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="none"):
        running.decoder.forward(
            dataclasses.replace(
                layout, input_token_ids=nothing, positions=nothing, slot_mapping=nothing
            )
        )


def test_arrays_of_other_types_and_strides_are_read_right(running: RunningDecoder) -> None:
    layout = running.lay_out(*chunks(running.weights.vocab_size))
    expected = running.decoder.forward(layout).copy()
    spread = np.repeat(layout.slot_mapping, 2)[::2]
    other = dataclasses.replace(
        layout, positions=layout.positions.astype(np.int32), slot_mapping=spread
    )
    np.testing.assert_array_equal(running.decoder.forward(other), expected)
