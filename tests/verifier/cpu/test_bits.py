"""A token's logits have the same bits whatever else is computed with them, and however.

The reference is one pass over the whole text in blocks 0 1 2 ... by one thread.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import Array, RunningDecoder, some_tokens, weights_of
from tests.volume import cases
from verifier.checkpoint.weight_types import FloatArray
from verifier.cpu.weights import DecoderWeights

NUM_TOKENS = 1100
BLOCK_SIZES = (16, 32, 64)
# Slots; the text takes 1,100 of them, and others run beside it.
NUM_SLOTS = 6144
BORDERS = (16, 17, 31, 192, 512, 1024)
CUTS = cases((1024,), (1, 15, *BORDERS))
SUBJECTS = [
    ("bundled", "float32"),
    ("bundled", "bfloat16"),
    ("qwen3_moe", "float32"),
    ("mixtral", "bfloat16"),
    ("gemma2", "float32"),
    ("gemma4", "bfloat16"),
    ("phi3_partial", "bfloat16"),
    ("qwen3", "bfloat16", "fp8"),
    ("llama_biases", "bfloat16"),
    ("olmo3", "bfloat16"),
    ("gguf_gpt-oss", "auto"),
    ("granite", "float32"),
    ("gguf_llama", "auto"),
    ("gguf_gemma3", "auto"),
    ("gguf_qwen3moe", "auto"),
    ("packed_int4_zeros", "bfloat16"),
    ("packed_int8", "bfloat16"),
    ("fp8_blocks", "bfloat16"),
]


@dataclass(frozen=True)
class Subject:
    """A model, a text, and its logits and K/V from one pass."""

    weights: DecoderWeights
    token_ids: list[int]
    logits: FloatArray
    keys_and_values: list[tuple[Array, Array]]

    def decoder(self, *, block_size: int = 16, num_threads: int = 1) -> RunningDecoder:
        return RunningDecoder(
            self.weights,
            num_blocks=NUM_SLOTS // block_size,
            block_size=block_size,
            num_threads=num_threads,
        )

    def chunk(self, start: int, end: int, block_table: list[int], num_rows: int = 1) -> Chunk:
        return Chunk(
            token_ids=self.token_ids[start:end],
            start=start,
            block_table=block_table,
            num_rows=num_rows,
        )

    def check(self, rows: FloatArray, end: int) -> None:
        """`rows` are the logits of the text's tokens before `end`."""
        expected = self.logits[end - len(rows) : end]
        differing = np.flatnonzero((rows != expected).any(axis=1)) + end - len(rows)
        assert not len(differing), f"rows {differing.tolist()[:10]} differ"

    def check_kept(self, running: RunningDecoder, block_table: list[int]) -> None:
        kept = running.keys_and_values(block_table, NUM_TOKENS)
        for layer, expected_layer in zip(kept, self.keys_and_values, strict=True):
            for own, expected in zip(layer, expected_layer, strict=True):
                np.testing.assert_array_equal(own, expected)


@pytest.fixture(scope="module", params=SUBJECTS, ids="-".join)
def subject(request: pytest.FixtureRequest) -> Subject:
    weights = weights_of(*request.param)
    token_ids = some_tokens(NUM_TOKENS, weights.vocab_size)
    blocks = list(range(-(-NUM_TOKENS // 16)))
    with RunningDecoder(weights) as running:
        logits = running.run_in_chunks(token_ids, [NUM_TOKENS], blocks)
        kept = running.keys_and_values(blocks, NUM_TOKENS)
    # What could not differ would show nothing.
    assert len(np.unique(logits[:, 5])) > NUM_TOKENS // 2
    return Subject(weights, token_ids, logits, kept)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def running(request: pytest.FixtureRequest, subject: Subject) -> Iterator[RunningDecoder]:
    with subject.decoder(num_threads=request.param) as decoder:
        yield decoder


def scattered(num_tokens: int, block_size: int, draw: random.Random) -> list[int]:
    return draw.sample(range(NUM_SLOTS // block_size), -(-num_tokens // block_size))


@pytest.mark.parametrize(
    ("cuts", "block_size"),
    [
        *zip([[border] for border in CUTS], itertools.cycle(BLOCK_SIZES)),
        ([1, 2, 3, 5, 9, 14, 20, 33, 192, 512], 16),
        ([300, 301, 307, 819, 820], 32),
        (list(range(64, NUM_TOKENS, 64)), 64),
    ],
)
def test_a_prompt_in_chunks_and_scattered_blocks(
    subject: Subject, cuts: list[int], block_size: int
) -> None:
    blocks = scattered(NUM_TOKENS, block_size, random.Random(cuts[0]))
    with subject.decoder(block_size=block_size) as running:
        for start, end in itertools.pairwise([0, *cuts, NUM_TOKENS]):
            [rows] = running.run(subject.chunk(start, end, blocks, end - start))
            subject.check(rows, end)
        subject.check_kept(running, blocks)


@pytest.mark.parametrize("num_threads", cases([1, 3], [1, 2, 3, 4]))
def test_single_tokens_and_drafts_at_borders(subject: Subject, num_threads: int) -> None:
    """Right drafts, together or one by one (batch expansion), and wrong ones that are dropped."""
    draw = random.Random(num_threads)
    with subject.decoder(num_threads=num_threads) as running:
        blocks = scattered(NUM_TOKENS, 16, draw)
        running.run(subject.chunk(0, NUM_TOKENS, blocks))
        for border in BORDERS:
            for start in range(border - 3, border + 3, min(num_threads, 3)):
                wrong = [
                    (token + 1) % subject.weights.vocab_size
                    for token in subject.token_ids[start + 1 : start + draw.randint(2, 8)]
                ]
                chunk = Chunk(
                    token_ids=[subject.token_ids[start], *wrong],
                    start=start,
                    block_table=blocks,
                    num_rows=len(wrong) + 1,
                )
                [rows] = running.run(chunk, is_expanded=draw.random() < 0.5)
                subject.check(rows[:1], start + 1)
                end = start + len(wrong) + draw.randint(1, 24)
                chunk = subject.chunk(start, end, blocks, end - start)
                [rows] = running.run(chunk, is_expanded=draw.random() < 0.5)
                subject.check(rows, end)
        subject.check_kept(running, blocks)


@pytest.mark.parametrize("num_sequences", cases([3, 16, 64], [2, 3, 7, 16, 33, 64]))
def test_in_batches(subject: Subject, running: RunningDecoder, num_sequences: int) -> None:
    """Sequences at any place of the text: decodes, drafts, prefill chunks, all in one step."""
    draw = random.Random(num_sequences)
    blocks = scattered(NUM_TOKENS, 16, draw)
    running.run(subject.chunk(0, NUM_TOKENS, blocks))
    for _ in range(2):
        chunks = []
        for _ in range(num_sequences):
            start = draw.choice([draw.randrange(NUM_TOKENS - 100), *BORDERS])
            size = draw.choice([1, 1, draw.randint(2, 13), draw.randint(14, 70)])
            num_rows = draw.choice([1, size])
            chunks.append(subject.chunk(start, start + size, blocks, num_rows))
        results = running.run(*chunks, is_expanded=draw.random() < 0.5)
        for chunk, rows in zip(chunks, results, strict=True):
            subject.check(rows, chunk.end)
