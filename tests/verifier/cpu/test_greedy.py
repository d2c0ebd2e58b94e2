"""Greedy output is transformers' own, prompt after prompt: of the bundled model and each family."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.workloads import rename_tasks
from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import (
    MODEL_FOLDER,
    RunningDecoder,
    folder_of,
    some_tokens,
    weights_of,
)
from tests.verifier.cpu.test_loader import CONFIGS
from tests.volume import cases
from verifier.batch.batch_layout import StateUse
from verifier.checkpoint.families import FAMILIES

NUM_PROMPTS, NUM_AT_ONCE = 50, 25
BLOCKS_EACH = 64
# Relative to the largest logit: two tokens that are closer are a tie for float32.
NEAR = 1e-5
ONE_OF_EACH = sorted(name.removesuffix("_text") for name in FAMILIES)


def continued(
    prompts: list[list[int]], running: RunningDecoder, num_new_tokens: int
) -> list[list[int]]:
    """Greedy continuations, the prompts decoded together."""
    texts = [list(prompt) for prompt in prompts]
    tables = [list(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH)) for i in range(len(texts))]
    starts = [0] * len(texts)
    has_states = running.weights.delta is not None
    for _ in range(num_new_tokens):
        chunks = [
            Chunk(
                token_ids=text[start:],
                start=start,
                block_table=table,
                state=StateUse(slot) if has_states else None,
            )
            for slot, (text, start, table) in enumerate(zip(texts, starts, tables, strict=True))
        ]
        starts = [len(text) for text in texts]
        for text, rows in zip(texts, running.run(*chunks), strict=True):
            text.append(int(rows[-1].argmax()))
    return texts


def prompts_of(name: str, vocab_size: int) -> list[list[int]]:
    if name == "bundled":
        return [list(t.prompt_token_ids) for t in rename_tasks(MODEL_FOLDER, NUM_PROMPTS)]
    return [some_tokens(3 + seed, vocab_size, seed) for seed in range(NUM_PROMPTS)]


@pytest.mark.parametrize("name", ["bundled", *cases(ONE_OF_EACH, CONFIGS)])
def test_greedy_output_is_transformers_one(name: str) -> None:
    is_bundled = name == "bundled"
    num_new_tokens = 24 if is_bundled else 8
    weights = weights_of(name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder_of(name),
        dtype=torch.float32,
        attn_implementation="sdpa" if is_bundled else "eager",
    )
    prompts = prompts_of(name, weights.vocab_size)
    near_ties = []
    with RunningDecoder(
        weights,
        num_blocks=NUM_AT_ONCE * BLOCKS_EACH,
        max_num_tokens=20_000,
        num_state_slots=NUM_AT_ONCE,
        max_drafts=1,
    ) as running:
        for first in range(0, NUM_PROMPTS, NUM_AT_ONCE):
            batch = prompts[first : first + NUM_AT_ONCE]
            for number, text in enumerate(continued(batch, running, num_new_tokens), first):
                with torch.inference_mode():
                    output = model(
                        input_ids=torch.tensor([text[:-1]]), logits_to_keep=num_new_tokens
                    ).logits[0]
                logits = output.numpy()
                chosen = logits[np.arange(num_new_tokens), text[-num_new_tokens:]]
                behind = (logits.max(axis=1) - chosen) / np.abs(logits).max()
                for place in np.flatnonzero(behind):
                    near_ties.append((number, int(place), float(behind[place])))
    print(f"near ties as (prompt, token, relative distance): {near_ties}")
    assert all(distance < NEAR for *_, distance in near_ties), near_ties
    # A decoder that is wrong by more than rounding has many.
    assert len(near_ties) <= 2
