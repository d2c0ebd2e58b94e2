"""Prints the tiles in use, and a digest of some models' logits and of tokens sampled from them.

python -m tests.verifier.cpu.logits_digest
"""

import hashlib

import numpy as np

from tests.verifier.cpu.running_decoder import Chunk, RunningDecoder, some_tokens, weights_of
from verifier.cpu.processor import TILES
from verifier.cpu.weights import FloatArray
from verifier.sampling.logits_processing import History
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import JudgedSequence, verify

MODELS = [("bundled", "float32"), ("qwen3_moe", "float32"), ("gemma2", "float32")]
SIZES = [1, 2, 3, 5, 7, 11, 13, 24, 40, 80]


def digest(name: str, dtype: str) -> str:
    """Of logits of two sequences, alone and together, in chunks of many sizes."""
    weights = weights_of(name, dtype)
    token_ids = some_tokens(300, weights.vocab_size)
    total = hashlib.sha256()
    with RunningDecoder(weights, num_blocks=64) as running:
        logits = running.run_in_chunks(token_ids, SIZES, list(range(20)))
        total.update(logits.tobytes())
        total.update(sampled(logits))
        for size in (1, 4, 9):
            for rows in running.run(
                Chunk(
                    token_ids=token_ids[200 : 200 + size],
                    start=200,
                    block_table=list(range(20)),
                    num_rows=size,
                ),
                Chunk(token_ids=token_ids[:33], start=0, block_table=[40, 50, 60], num_rows=3),
            ):
                total.update(rows.tobytes())
    return total.hexdigest()


def sampled(logits: FloatArray) -> bytes:
    """A token of each row [R, V], as of a sequence of its own."""
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=3)
    history = History.of(sampling, prompt_token_ids=[], output_token_ids=[])
    verdict = verify(
        logits,
        [
            JudgedSequence(sampling=sampling, history=history, first_position=position)
            for position in range(len(logits))
        ],
        draft_token_ids=np.zeros(0, dtype=np.int64),
        num_draft_tokens=np.zeros(len(logits), dtype=np.int64),
    )
    return verdict.output_token_ids.tobytes()


if __name__ == "__main__":
    print(TILES.name)
    for name, dtype in MODELS:
        print(name, dtype, digest(name, dtype))
