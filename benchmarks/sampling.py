"""CPU time of sampling one row, against the same law over whole tensors in torch.

    python -m benchmarks.sampling

Both sample the same rows by turns; the table shows the median of the rounds. The reference is the
tests' oracle, too: it sorts vocabularies, reads histories again and computes every token's noise.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks import torch_sampling
from benchmarks.machine import processor
from benchmarks.torch_sampling import Tokens
from verifier.sampling import Sampling
from verifier.sampling.adjustments import Adjustments
from verifier.sampling.logits_processing import History
from verifier.sampling.rejection_sampler import JudgedSequence, verify

VOCAB_SIZES = (2_048, 152_000)
HISTORY_TOKENS = 8_000
NUM_ROWS = 8
TOKENS_PER_ROUND = 400_000
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(temperature=1.0, seed=1),
    "top-p 0.95": Sampling(temperature=1.0, top_p=0.95, seed=1),
    "top-k 50, top-p 0.95": Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=1),
    "penalties": Sampling(repetition_penalty=1.1, frequency_penalty=0.1),
    "penalties, temperature 1": Sampling(temperature=1.0, frequency_penalty=0.1, seed=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Microseconds per row."""

    vocab_size: int
    sampling: str
    kernels_us: float
    reference_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{processor()}, one thread; history of {HISTORY_TOKENS} tokens; {NUM_ROWS} sequences\n")
    print("| vocabulary | sampling | µs per row | reference | ratio |")
    print("|---|---|---|---|---|")
    for figure in measure(rounds):
        print(
            f"| {figure.vocab_size:,} | {figure.sampling} | {figure.kernels_us:,.1f} | "
            f"{figure.reference_us:,.0f} | {figure.reference_us / figure.kernels_us:.0f} |"
        )


def measure(num_rounds: int) -> Iterator[Figure]:
    for vocab_size in VOCAB_SIZES:
        num_repeats = max(1, TOKENS_PER_ROUND // (NUM_ROWS * vocab_size))
        for name, sampling in SAMPLINGS.items():
            kernels, reference = _samplers(vocab_size, sampling)
            assert kernels() == reference(), "other tokens"
            times_s: dict[Callable[[], list[int]], list[float]] = {kernels: [], reference: []}
            for round_ in range(num_rounds):
                for sample in (kernels, reference) if round_ % 2 else (reference, kernels):
                    started_at_s = time.thread_time()
                    for _ in range(num_repeats):
                        sample()
                    times_s[sample].append((time.thread_time() - started_at_s) / num_repeats)
            kernels_us, reference_us = (
                statistics.median(times_s[sample]) / NUM_ROWS * 1e6
                for sample in (kernels, reference)
            )
            yield Figure(
                vocab_size=vocab_size,
                sampling=name,
                kernels_us=kernels_us,
                reference_us=reference_us,
            )


def _samplers(
    vocab_size: int, sampling: Sampling
) -> tuple[Callable[[], list[int]], Callable[[], list[int]]]:
    """Both ways to sample a token for each of the rows: kernels, reference."""
    draw = np.random.default_rng(1)
    logits = draw.normal(scale=3, size=(NUM_ROWS, vocab_size)).astype(np.float32)
    text = draw.integers(0, vocab_size, HISTORY_TOKENS).tolist()
    prompt, output = text[: HISTORY_TOKENS // 2], text[HISTORY_TOKENS // 2 :]
    adjustments = None
    if sampling.adjusts_logits:
        # As an engine has it, which was told of all but the last token in the step before.
        adjustments = Adjustments(sampling, prompt_length=len(prompt))
        adjustments.count(text)
    position = len(text)
    judged = JudgedSequence(
        sampling=sampling, history=History(adjustments=adjustments), first_position=position
    )
    tokens = Tokens(prompt_token_ids=prompt, output_token_ids=output, draft_token_ids=())

    def kernels() -> list[int]:
        verdict = verify(
            logits,
            [judged] * NUM_ROWS,
            draft_token_ids=np.zeros(0, dtype=np.int64),
            num_draft_tokens=np.zeros(NUM_ROWS, dtype=np.int64),
        )
        token_ids: list[int] = verdict.output_token_ids[:, 0].tolist()
        return token_ids

    def reference() -> list[int]:
        return [
            token_id
            for row in torch.from_numpy(logits)
            for token_id in torch_sampling.sampled(row[None], sampling, tokens, position)
        ]

    return kernels, reference


if __name__ == "__main__":
    main()
