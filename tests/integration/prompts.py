"""Prompts of the integration tests, from the held-out rename tasks."""

import itertools
import json
import random

from tokenizers import Tokenizer

from tandem.client import GenerationRequest, SpeculationParams
from tests.integration.stack import MODEL, REPOSITORY

HELD_OUT = REPOSITORY / "examples" / "demo_model" / "heldout.jsonl"

PLAIN = SpeculationParams(enabled=False)
# Most drafts per step of the mixed requests.
NUM_DRAFTS = (0, 1, 2, 3, 7, 8, 15, 31)


def rename_prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` held-out prompts, chosen by `seed`."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = [json.loads(line)["prompt"] for line in HELD_OUT.read_text().splitlines()]
    chosen = random.Random(seed).sample(texts, count)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in chosen]


def prompt_of_length(length: int, *, seed: int) -> list[int]:
    """The last `length` tokens of several joined held-out prompts: text with repetitions."""
    joined = list(itertools.chain(*rename_prompts(24, seed=seed)))
    assert len(joined) >= length
    return joined[-length:]


def mixed_requests(max_new_tokens: int = 48) -> list[GenerationRequest]:
    """16 requests with different numbers of drafts, two of them without any.

    Prompts of 20 to 1,020 tokens.
    """
    lengths = [20, 90, 150, 170, 180, 188, 300, 480, 490, 500, 508, 700, 990, 1000, 1010, 1020]
    return [
        GenerationRequest(
            prompt=prompt_of_length(length, seed=index),
            max_new_tokens=max_new_tokens,
            ignore_eos=True,
            speculation=SpeculationParams(num_speculative_tokens=NUM_DRAFTS[index % 8]),
        )
        for index, length in enumerate(lengths)
    ]
