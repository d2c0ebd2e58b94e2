"""One forward pass of the model in this process, by its number of rows."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verifier.batch.batch_layout import ScheduledTokens, lay_out
from verifier.build import load_model
from verifier.config import VerifierConfig
from verifier.cpu.decoder import CpuDecoder

CONTEXT = 256
# Up to the last, a token and drafts, whose logits are all needed; the last is a piece of a prompt.
ROWS = (1, 2, 3, 6, 7, 12, 16, 256)
_BLOCK = 16


@contextmanager
def forward_timer(model: Path, threads: int) -> Iterator[Callable[[int], float]]:
    """Yields what times a pass of so many rows behind `CONTEXT` tokens, in milliseconds."""
    config = VerifierConfig.model_validate(
        {"model": model, "device": "cpu", "threads": threads, "num_kv_blocks": 64}
    )
    decoder = load_model(config).model
    assert isinstance(decoder, CpuDecoder)
    table = list(range((CONTEXT + max(ROWS)) // _BLOCK))

    def forward(start: int, token_ids: Sequence[int], drafts: Sequence[int]) -> float:
        tokens = ScheduledTokens(
            token_ids=list(token_ids),
            draft_token_ids=list(drafts),
            num_computed_tokens=start,
            block_table=table,
        )
        layout = lay_out([tokens], block_size=_BLOCK)
        started_s = time.perf_counter()
        decoder.forward(layout)
        return (time.perf_counter() - started_s) * 1e3

    prompt = [7 * i % decoder.vocab_size for i in range(CONTEXT)]
    forward(0, prompt, [])

    def timed(rows: int) -> float:
        if rows == max(ROWS):
            return forward(CONTEXT, [*prompt, *prompt][:rows], [])
        return forward(CONTEXT, [9], [5] * (rows - 1))

    try:
        yield timed
    finally:
        decoder.close()


def llama_bench_ms(program: str, model: Path, threads: int) -> dict[int, float]:
    """By the number of rows, of which it computes the last one's logits only."""
    done = subprocess.run(
        [
            *(program, "--model", str(model), "--threads", str(threads)),
            *("--n-prompt", ",".join(map(str, ROWS)), "--n-gen", "0"),
            *("--n-depth", str(CONTEXT), "--repetitions", "1", "--output", "json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return {each["n_prompt"]: each["avg_ns"] / 1e6 for each in json.loads(done.stdout)}
