"""A history's tokens and its bytes."""

import random

import numpy as np

from drafter.history.history import History
from drafter.ngram.text import MIN_CAPACITY_TOKENS, TOKEN_BYTES
from tests.drafter.texts import EMPTY_BYTES, KMP


def make_history(max_tokens: int = 10_000) -> History:
    return History(params=KMP, prompt_length=0, max_tokens=max_tokens)


def test_tokens_are_kept_in_the_order_of_their_appends() -> None:
    rng = random.Random(1)
    history, expected = make_history(), []
    for _ in range(200):
        part = [rng.randrange(2**32) for _ in range(rng.randrange(60))]
        history.append(np.array(part, dtype=np.uint32))
        expected += part
        assert history.length == len(expected)
    assert history.token_ids.tolist() == expected
    assert history.token_ids.dtype == np.uint32


def test_bytes_after_an_append_are_known_beforehand() -> None:
    history = make_history()
    assert history.allocated_bytes == EMPTY_BYTES
    for num_tokens in (1, 254, 1, 1, 300, 0, 2000):
        announced = history.bytes_after(num_tokens)
        history.append(np.zeros(num_tokens, dtype=np.uint32))
        assert history.allocated_bytes == announced
        assert history.buffer.nbytes + EMPTY_BYTES == announced


def test_buffers_grow_in_proportion_to_their_size() -> None:
    history, num_copies = make_history(max_tokens=1 << 20), 0
    for _ in range(20_000):
        before = history.buffer
        history.append(np.ones(1, dtype=np.uint32))
        num_copies += history.buffer is not before
    assert num_copies == 6 + 4  # 256, 512, ... 8,192; then by a quarter each
    assert 20_000 <= len(history.buffer) <= 25_000
    assert history.allocated_bytes == len(history.buffer) * TOKEN_BYTES + EMPTY_BYTES


def test_never_allocates_past_its_limit() -> None:
    history = make_history(max_tokens=300)
    history.append(np.zeros(MIN_CAPACITY_TOKENS, dtype=np.uint32))
    history.append(np.zeros(44, dtype=np.uint32))
    assert history.length == 300
    assert history.allocated_bytes == 300 * TOKEN_BYTES + EMPTY_BYTES


def test_an_earlier_view_keeps_its_tokens_when_the_buffer_grows() -> None:
    history = make_history()
    history.append(np.arange(256, dtype=np.uint32))
    view = history.token_ids
    history.append(np.arange(1000, dtype=np.uint32))
    assert view.tolist() == list(range(256))
