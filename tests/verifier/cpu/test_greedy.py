"""Greedy output of the bundled model is transformers' own, prompt after prompt."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.workloads import rename_tasks
from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import MODEL_FOLDER, RunningDecoder, weights_of
from tests.volume import cases

NUM_PROMPTS, NUM_AT_ONCE, NUM_TOKENS = cases(60, 200), 20, 24
BLOCKS_EACH = 64
# Relative to the largest logit: two tokens that are closer are a tie for float32.
NEAR = 1e-5


def continued(prompts: list[list[int]], running: RunningDecoder) -> list[list[int]]:
    """Greedy continuations, the prompts decoded together."""
    texts = [list(prompt) for prompt in prompts]
    tables = [list(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH)) for i in range(len(texts))]
    starts = [0] * len(texts)
    for _ in range(NUM_TOKENS):
        chunks = [
            Chunk(token_ids=text[start:], start=start, block_table=table)
            for text, start, table in zip(texts, starts, tables, strict=True)
        ]
        starts = [len(text) for text in texts]
        for text, rows in zip(texts, running.run(*chunks), strict=True):
            text.append(int(rows[-1].argmax()))
    return texts


def test_greedy_output_is_transformers_one() -> None:
    prompts = [task.prompt_token_ids for task in rename_tasks(MODEL_FOLDER, NUM_PROMPTS)]
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    near_ties = []
    with RunningDecoder(
        weights_of("bundled"), num_blocks=NUM_AT_ONCE * BLOCKS_EACH, max_num_tokens=20_000
    ) as running:
        for first in range(0, NUM_PROMPTS, NUM_AT_ONCE):
            batch = [list(prompt) for prompt in prompts[first : first + NUM_AT_ONCE]]
            for number, text in enumerate(continued(batch, running), start=first):
                with torch.inference_mode():
                    output = model(
                        input_ids=torch.tensor([text[:-1]]), logits_to_keep=NUM_TOKENS
                    ).logits[0]
                logits = output.numpy()
                chosen = logits[np.arange(NUM_TOKENS), text[-NUM_TOKENS:]]
                behind = (logits.max(axis=1) - chosen) / np.abs(logits).max()
                for place in np.flatnonzero(behind):
                    near_ties.append((number, int(place), float(behind[place])))
    print(f"near ties as (prompt, token, relative distance): {near_ties}")
    assert all(distance < NEAR for *_, distance in near_ties), near_ties
    # A decoder that is wrong by more than rounding has many.
    assert len(near_ties) <= 2
