"""A step's layout is the same after encoding and decoding."""

import dataclasses
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.tensor_parallel.layout_codec import decode, encode

BLOCK_SIZE = 4


@st.composite
def scheduled_tokens(draw: st.DrawFn) -> ScheduledTokens:
    ids = st.integers(0, 2**31 - 1)
    token_ids = draw(st.lists(ids, min_size=1, max_size=9))
    draft_token_ids = draw(st.lists(ids, max_size=5))
    num_computed_tokens = draw(st.integers(0, 50))
    num_tokens = num_computed_tokens + len(token_ids) + len(draft_token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    block_table = draw(st.lists(st.integers(0, 10**8), min_size=num_blocks, max_size=40))
    return ScheduledTokens(
        token_ids=token_ids,
        draft_token_ids=draft_token_ids,
        num_computed_tokens=num_computed_tokens,
        block_table=array("i", block_table),
    )


def assert_same(first: BatchLayout, second: BatchLayout) -> None:
    for field in dataclasses.fields(BatchLayout):
        one, other = getattr(first, field.name), getattr(second, field.name)
        assert type(one) is type(other), field.name
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, field.name
            np.testing.assert_array_equal(one, other, field.name)
        else:
            assert one == other, field.name


@given(st.lists(scheduled_tokens(), min_size=1, max_size=5), st.booleans())
def test_decoding_gives_what_was_encoded(
    scheduled: list[ScheduledTokens], wants_hidden_states: bool
) -> None:
    layout = lay_out(scheduled, block_size=BLOCK_SIZE, wants_hidden_states=wants_hidden_states)
    encoded = encode(layout)
    assert encoded.dtype == np.int32
    assert encoded.ndim == 1
    assert_same(decode(np.frombuffer(encoded.tobytes(), dtype=np.int32)), layout)


def test_a_shorter_or_longer_message_is_refused() -> None:
    tokens = ScheduledTokens(
        token_ids=[1], draft_token_ids=[2, 3], num_computed_tokens=0, block_table=[0]
    )
    encoded = encode(lay_out([tokens], block_size=BLOCK_SIZE))
    for length in range(len(encoded)):
        with pytest.raises(ValueError, match="ends before"):
            decode(encoded[:length])
    with pytest.raises(ValueError, match="more than a layout"):
        decode(np.append(encoded, np.int32(0)))
