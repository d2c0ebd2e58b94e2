"""A verifier on a GPU whose texts have tens of thousands of tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.in_process import Counts, InProcessEngine
from benchmarks.workloads import Task
from tests.verifier.cpu.test_loader import CONFIGS
from tests.verifier.paged_model import some_tokens
from verifier.build import load_model
from verifier.config import VerifierConfig
from verifier.engine.messages import Decided
from verifier.parity.reference import cache_name

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here"
)
DEVICE = "cuda"
# Attention splits a text of more than 49,152 tokens in three sizes.
LENGTH = 50_100
# So few that each n-gram occurs often, and some drafts are accepted.
VOCAB_SIZE = 8
LONG = some_tokens(LENGTH, VOCAB_SIZE)
SHORT = some_tokens(700, VOCAB_SIZE, seed=2)
NUM_NEW_TOKENS = 40
TASKS = [
    Task(prompt_token_ids=prompt, max_new_tokens=NUM_NEW_TOKENS, temperature=temperature)
    for prompt in (LONG, SHORT)
    for temperature in (0.0, 1.0)
]


def save(folder: Path, name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]()
    config.vocab_size = VOCAB_SIZE
    config.max_position_embeddings = 131_072
    config.eos_token_id = None
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)


def run(
    folder: Path, dtype: str, *, speculate: bool, max_num_batched_tokens: int
) -> tuple[list[list[int]], Counts]:
    """What a strict verifier decides for each task, all at a time."""
    config = VerifierConfig.model_validate(
        {
            "model": folder,
            "device": DEVICE,
            "dtype": dtype,
            "numerics": "strict",
            "max_num_seqs": len(TASKS),
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_kv_blocks": 8192,
            # Drafts are verified whether they pay or not.
            "speculation_depth": "limits",
            "prefix_cache": False,
        }
    )
    texts: list[list[int]] = [[] for _ in TASKS]

    def observe(decided: Decided) -> None:
        texts[int(decided.sequence_id)] += decided.token_ids

    with InProcessEngine(config, load_model(config)).started() as engine:
        counts = engine.run(TASKS, streams=len(TASKS), speculate=speculate, observe=observe)
    return texts, counts


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("gemma3", "bfloat16"),
        ("gemma2", "float16"),
    ],
)
def test_drafts_and_chunks_change_no_token_of_a_long_text(
    name: str, dtype: str, tmp_path: Path
) -> None:
    save(tmp_path, name, getattr(torch, dtype))
    plain, _ = run(tmp_path, dtype, speculate=False, max_num_batched_tokens=2048)
    assert [len(text) for text in plain] == [NUM_NEW_TOKENS] * len(TASKS)
    drafted, counts = run(tmp_path, dtype, speculate=True, max_num_batched_tokens=700)
    assert drafted == plain
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


def test_a_long_texts_greedy_tokens_are_transformers_likeliest(tmp_path: Path) -> None:
    save(tmp_path, "llama", torch.float32)
    texts, _ = run(tmp_path, "float32", speculate=True, max_num_batched_tokens=2048)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model.to(DEVICE)
    token_ids = torch.tensor([LONG + texts[0]], device=DEVICE)
    # In chunks: attention of all to all takes 40 GB.
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for chunk in token_ids.split(2000, dim=1):
            output = model(chunk, **{cache_name(model): cache})
    # Of the last chunk, the new tokens but the last, and the prompt's last token before them.
    logits = output.logits[0, -NUM_NEW_TOKENS - 1 : -1]
    chosen = logits.gather(1, token_ids[0, LENGTH:, None])[:, 0]
    # Where two are as likely, rounding decides.
    torch.testing.assert_close(
        chosen, logits.max(dim=1).values, rtol=0, atol=1e-4 * logits.abs().max().item()
    )
