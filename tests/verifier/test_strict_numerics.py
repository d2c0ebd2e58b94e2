"""Under `strict`, a token's logits have the same bits whatever else is computed with them.

The reference is one pass over the whole text in contiguous blocks. It is compared with decoding
token by token, chunks, drafts, other sequences and scattered blocks, at contexts on both sides
of 192, 512, 704, 1,024 and 1,216 tokens, where the shapes of attention change.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import (
    DENSE_CONFIGS,
    EXPERT_CONFIGS,
    NUM_BLOCKS,
    Chunk,
    PagedModel,
    load_bundled_model,
    make_small_model,
    some_tokens,
)
from verifier.batch.numerics import FAST, STRICT, Numerics
from verifier.model.checkpoint import reference_logits

NUM_TOKENS = 1230
BORDERS = (192, 512, 704, 1024, 1216)
WHERE_SHAPES_CHANGE = [
    *range(1, 10),
    *(position for border in BORDERS for position in range(border - 4, border + 6)),
]
NAMES = ["bundled", *DENSE_CONFIGS]
DTYPES = [torch.float32, torch.bfloat16]
SUBJECTS = [*((name, dtype) for name in NAMES for dtype in DTYPES), ("qwen3", torch.float16)]


@dataclass(frozen=True)
class Subject:
    """A model, a text, and the text's logits and K/V from one pass in blocks 0 1 2 ..."""

    paged: PagedModel
    token_ids: list[int]
    logits: torch.Tensor
    keys_and_values: torch.Tensor
    block_table: list[int]


def make_model(name: str, dtype: torch.dtype, numerics: Numerics = STRICT) -> PagedModel:
    if name == "bundled":
        return load_bundled_model(MODEL_FOLDER, dtype, numerics)
    return make_small_model(name, dtype, numerics)


@pytest.fixture(
    scope="module",
    params=SUBJECTS,
    ids=[f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in SUBJECTS],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    paged = make_model(*request.param)
    token_ids = some_tokens(NUM_TOKENS, paged.vocab_size)
    block_table = list(range(-(-NUM_TOKENS // 16)))
    logits = paged.run_in_chunks(token_ids, [NUM_TOKENS], block_table)
    return Subject(
        paged=paged,
        token_ids=token_ids,
        logits=logits,
        keys_and_values=paged.keys_and_values(NUM_TOKENS),
        block_table=block_table,
    )


def assert_same_rows(rows: torch.Tensor, subject: Subject, start: int) -> None:
    expected = subject.logits[start : start + len(rows)]
    differing = (rows != expected).any(dim=1).nonzero().flatten() + start
    assert torch.equal(rows, expected), f"rows {differing.tolist()[:10]} differ"


def test_token_by_token(subject: Subject) -> None:
    for position in WHERE_SHAPES_CHANGE:
        chunk = Chunk(
            token_ids=[subject.token_ids[position]],
            start=position,
            block_table=subject.block_table,
            num_rows=1,
        )
        assert_same_rows(subject.paged.run(chunk)[0], subject, position)
    written = subject.paged.keys_and_values(NUM_TOKENS)
    assert torch.equal(written, subject.keys_and_values), "K/V got other bits"


@pytest.mark.parametrize(
    "sizes",
    [(300, 7, 512), (64, 190, 3, 1, 129, 2)],
    ids=["large chunks", "small chunks"],
)
def test_in_chunks_and_in_scattered_blocks(subject: Subject, sizes: tuple[int, ...]) -> None:
    blocks = list(range(len(subject.block_table), NUM_BLOCKS))
    random.Random(3).shuffle(blocks)
    rows = subject.paged.run_in_chunks(subject.token_ids, sizes, blocks)
    assert_same_rows(rows, subject, 0)


def test_with_one_to_thirty_one_right_drafts(subject: Subject) -> None:
    for i, position in enumerate(WHERE_SHAPES_CHANGE):
        num_drafts = min(i * 5 % 31 + 1, NUM_TOKENS - 1 - position)
        chunk = Chunk(
            token_ids=subject.token_ids[position : position + num_drafts + 1],
            start=position,
            block_table=subject.block_table,
            num_rows=num_drafts + 1,
        )
        assert_same_rows(subject.paged.run(chunk)[0], subject, position)


def test_with_wrong_drafts_that_are_dropped(subject: Subject) -> None:
    vocab_size = subject.paged.vocab_size
    for border in BORDERS:
        for i, position in enumerate(range(border - 9, border + 3)):
            num_drafts = (i * 3) % 7 + 1
            wrong = [(t + 1) % vocab_size for t in subject.token_ids[position + 1 :][:num_drafts]]
            chunk = Chunk(
                token_ids=[subject.token_ids[position], *wrong],
                start=position,
                block_table=subject.block_table,
                num_rows=num_drafts + 1,
            )
            [rows] = subject.paged.run(chunk)
            assert_same_rows(rows[:1], subject, position)
            assert not torch.equal(rows[1:], subject.logits[position + 1 :][:num_drafts])
        after = Chunk(
            token_ids=subject.token_ids[border + 3 : border + 11],
            start=border + 3,
            block_table=subject.block_table,
            num_rows=8,
        )
        assert_same_rows(subject.paged.run(after)[0], subject, border + 3)
    written = subject.paged.keys_and_values(NUM_TOKENS)
    assert torch.equal(written, subject.keys_and_values), "a draft left something behind"


def test_beside_other_sequences(subject: Subject) -> None:
    """Decodes, drafts and prefill chunks of three others, in any order, blocks shuffled."""
    draw = random.Random(4)
    paged, num_blocks = subject.paged, len(subject.block_table)
    blocks = list(range(num_blocks, NUM_BLOCKS))
    draw.shuffle(blocks)
    own, others = blocks[:num_blocks], blocks[num_blocks:]
    texts = [some_tokens(400, paged.vocab_size, seed) for seed in (11, 12, 13)]
    tables = [others[i::3] for i in range(3)]
    reached = [0, 0, 0]
    position = 0
    while position < NUM_TOKENS:
        near_border = any(border - 6 <= position <= border + 6 for border in BORDERS)
        size = draw.choice([1, 2, 3, 5, 8]) if near_border else draw.choice([1, 40, 77, 180])
        chunks = [
            Chunk(
                token_ids=subject.token_ids[position : position + size],
                start=position,
                block_table=own,
                num_rows=min(size, NUM_TOKENS - position),
            )
        ]
        for i in range(draw.randrange(4)):
            size = draw.choice([1, 4, 8, 60])
            reached[i] = reached[i] if reached[i] + size <= 400 else 0
            chunks.append(
                Chunk(
                    token_ids=texts[i][reached[i] : reached[i] + size],
                    start=reached[i],
                    block_table=tables[i],
                    num_rows=draw.randint(1, size),
                )
            )
            reached[i] += size
        first = chunks[0]
        draw.shuffle(chunks)
        rows = paged.run(*chunks)[chunks.index(first)]
        assert_same_rows(rows, subject, position)
        position = first.end


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_another_number_of_threads(dtype: torch.dtype) -> None:
    paged = load_bundled_model(MODEL_FOLDER, dtype)
    token_ids = some_tokens(530, paged.vocab_size)
    blocks = list(range(NUM_BLOCKS))
    expected = paged.run_in_chunks(token_ids, [500, 1, 7, 1], blocks)
    torch.set_num_threads(2)
    try:
        rows = paged.run_in_chunks(token_ids, [500, 1, 7, 1], blocks)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("max_model_len", [100, 193, 512, 513, 700])
@pytest.mark.parametrize("numerics", [STRICT, FAST], ids=lambda numerics: numerics.name)
def test_up_to_the_last_token_of_the_longest_sequence(
    max_model_len: int, numerics: Numerics
) -> None:
    model = make_small_model("mistral").model
    paged = PagedModel(model, numerics, max_model_len=max_model_len)
    token_ids = some_tokens(max_model_len, paged.vocab_size)
    first = max_model_len - 10
    rows = paged.run_in_chunks(token_ids, [first, 8, 1], list(range(NUM_BLOCKS)))
    expected = reference_logits(model, token_ids)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*NAMES, *EXPERT_CONFIGS])
@pytest.mark.parametrize("numerics", [STRICT, FAST], ids=lambda numerics: numerics.name)
def test_logits_are_those_of_transformers_own_attention(name: str, numerics: Numerics) -> None:
    """Chunks, single tokens and drafts past a border; sliding windows and experts included."""
    paged = make_model(name, torch.float32, numerics)
    token_ids = some_tokens(700, paged.vocab_size, seed=2)
    expected = reference_logits(paged.model, token_ids)
    blocks = list(range(NUM_BLOCKS))[::-1]
    rows = paged.run_in_chunks(token_ids, [505, 1, 1, 3, 8, 100], blocks)
    largest = expected.abs().max().item()
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5 * largest)


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
