"""The paged model computes what transformers' own attention computes, whatever else is in a step.

Only up to rounding: which bits a token's logits have may depend on the batch here. What the own
decoder promises is tested in `cpu/test_bits.py`.
"""

import random

import pytest
import torch

from tests.verifier.chunks import Chunk
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SMALL_CONFIGS,
    PagedModel,
    load_bundled_model,
    make_small_model,
    some_tokens,
)
from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.transformers_model.checkpoint import reference_logits

NAMES = ["bundled", *SMALL_CONFIGS]


def make_model(name: str) -> PagedModel:
    if name == "bundled":
        return load_bundled_model(MODEL_FOLDER, torch.float32)
    return make_small_model(name)


def assert_near(rows: torch.Tensor, expected: torch.Tensor, largest: float) -> None:
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", NAMES)
def test_in_chunks(name: str) -> None:
    """Long chunks, drafts, and single tokens around the end of a window; experts included."""
    paged = make_model(name)
    token_ids = some_tokens(700, paged.vocab_size, seed=2)
    expected = reference_logits(paged.model, token_ids)
    blocks = list(range(NUM_BLOCKS))[::-1]
    rows = paged.run_in_chunks(token_ids, [98, 1, 1, 1, 1, 400, 3, 8, 100], blocks)
    assert_near(rows, expected, expected.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_expanded", [False, True])
def test_beside_other_sequences(name: str, is_expanded: bool) -> None:
    """Decodes, drafts, prefill chunks and chunks without logits, in scattered blocks."""
    draw = random.Random(4)
    paged = make_model(name)
    texts = [some_tokens(250, paged.vocab_size, seed) for seed in (11, 12, 13, 14)]
    expected = [reference_logits(paged.model, text) for text in texts]
    largest = max(logits.abs().max().item() for logits in expected)
    blocks = list(range(NUM_BLOCKS))
    draw.shuffle(blocks)
    tables = [blocks[i::4] for i in range(4)]
    reached = [0] * 4
    while chosen := [i for i in draw.sample(range(4), 4) if reached[i] < 250][: draw.randint(1, 4)]:
        chunks = []
        for i in chosen:
            size = min(draw.choice([1, 2, 8, 60]), 250 - reached[i])
            chunks.append(
                Chunk(
                    token_ids=texts[i][reached[i] : reached[i] + size],
                    start=reached[i],
                    block_table=tables[i],
                    num_rows=draw.choice([1, min(size, 8)]),
                )
            )
            reached[i] += size
        results = paged.run(*chunks, is_expanded=is_expanded)
        for i, chunk, rows in zip(chosen, chunks, results, strict=True):
            assert_near(rows, expected[i][chunk.end - len(rows) : chunk.end], largest)


def test_a_sliding_window_hides_what_lies_before_it() -> None:
    """Two layers with a window of 100 tokens: a token 300 positions back has no effect."""
    paged = make_small_model("mistral")
    token_ids = some_tokens(400, paged.vocab_size)
    changed = [(token_ids[0] + 1) % paged.vocab_size, *token_ids[1:]]
    rows, changed_rows = (
        paged.run_in_chunks(text, [400], list(range(NUM_BLOCKS))) for text in (token_ids, changed)
    )
    first_unaffected = 2 * (100 - 1) + 1  # two layers, each looking 99 tokens back
    assert torch.equal(rows[first_unaffected:], changed_rows[first_unaffected:])
    assert not torch.equal(rows[first_unaffected - 1], changed_rows[first_unaffected - 1])


def test_hidden_states_are_those_of_a_step_that_wants_them() -> None:
    """A later and smaller step has no such rows."""
    model = make_small_model("llama")
    scheduled = ScheduledTokens(
        token_ids=some_tokens(20, model.vocab_size),
        draft_token_ids=[],
        num_computed_tokens=0,
        block_table=[3, 1],
        scored_offsets=range(4, 20),
    )
    wanting = lay_out([scheduled], block_size=BLOCK_SIZE, wants_hidden_states=True)
    model.paged.forward(wanting)
    assert model.paged.hidden_states is not None
    later = scheduled._replace(token_ids=[1], scored_offsets=range(0))
    model.paged.forward(lay_out([later], block_size=BLOCK_SIZE))
    assert model.paged.hidden_states is None
