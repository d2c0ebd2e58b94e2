"""Scoring drafts in a single pass against batch expansion, as a table and JSON.

    python -m benchmarks.scoring [--model FOLDER] [--dtype float32] [--json FILE]

One step of the verifier in process, by the engine's code: a batch of sequences with computed
contexts and k drafts each. A single pass attends with k + 1 queries per sequence; batch expansion
with k + 1 sequences of one query each. The methods alternate, and the figure is the median over the
rounds. Compare figures of one run only.
"""

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import processor
from benchmarks.workloads import BUNDLED_MODEL, random_tasks
from servicekit.config import ServerOptions
from servicekit.logs import configure_logs
from tandem.values import DraftWait
from verifier.batch.batch_layout import BatchLayout, lay_out
from verifier.batch.target_model import FloatArray
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.engine.step_batch import StepBatch
from verifier.sampling import Sampling
from verifier.scheduling.scheduler import ScheduledSequence
from verifier.scheduling.sequence import Scoring, ScoringMethod, Sequence

NUM_DRAFTS = 5
BATCHES = (4, 32)
CONTEXTS = (128, 512)
BLOCK_SIZE = 16
# The goal for the ratio at the larger batch.
GOAL = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The time of one step, from sequences to logits; median of the rounds."""

    numerics: str
    batch: int
    context_tokens: int
    single_pass_ms: float
    batch_expansion_ms: float
    # Largest difference of the two methods' logits over all rounds; 0 under strict.
    largest_difference: float

    @property
    def ratio(self) -> float:
        return self.batch_expansion_ms / self.single_pass_ms


def main() -> None:
    """Measures everything, then prints it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures = []
    for numerics in ("strict", "fast"):
        loaded = _load(arguments.model, arguments.dtype, numerics)
        figures += list(measure(loaded, num_rounds=arguments.rounds))
    print(
        f"\n{processor()}, {arguments.dtype}, "
        f"torch {torch.__version__}; k = {NUM_DRAFTS}, median of {arguments.rounds} rounds\n\n"
        f"{_table(figures)}\n\n"
        f"goal at batch {BATCHES[-1]}: {GOAL:g}"
    )
    if arguments.json is not None:
        rows = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        arguments.json.write_text(json.dumps({"figures": rows}, indent=1) + "\n")


def measure(loaded: LoadedModel, *, num_rounds: int) -> Iterator[Figure]:
    """One figure for each batch and context."""
    for batch in BATCHES:
        for num_tokens in CONTEXTS:
            sequences = {
                method: _sequences(loaded, method, batch, num_tokens) for method in ScoringMethod
            }
            # Both read the same K/V.
            _compute_contexts(loaded, sequences[ScoringMethod.SINGLE_PASS])
            times_s: dict[ScoringMethod, list[float]] = {method: [] for method in ScoringMethod}
            largest = 0.0
            for round_ in range(num_rounds + 1):
                turns = list(ScoringMethod)
                logits = {}
                for method in turns if round_ % 2 else reversed(turns):
                    start_s = time.perf_counter()
                    layout = _lay_out(loaded, sequences[method], NUM_DRAFTS + 1)
                    logits[method] = _scored_logits(loaded, layout)
                    if round_:  # the first warms up
                        times_s[method].append(time.perf_counter() - start_s)
                difference = logits[turns[0]] - logits[turns[1]]
                largest = max(largest, float(abs(difference).max()))
            yield Figure(
                numerics=loaded.served.numerics,
                batch=batch,
                context_tokens=num_tokens,
                single_pass_ms=statistics.median(times_s[ScoringMethod.SINGLE_PASS]) * 1e3,
                batch_expansion_ms=statistics.median(times_s[ScoringMethod.BATCH_EXPANSION]) * 1e3,
                largest_difference=largest,
            )


def _table(figures: list[Figure]) -> str:
    lines = [
        "| numerics | batch | context | single pass, ms | batch expansion, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {figure.numerics} | {figure.batch} | {figure.context_tokens} "
        f"| {figure.single_pass_ms:.1f} | {figure.batch_expansion_ms:.1f} | {figure.ratio:.2f} |"
        for figure in figures
    ]
    return "\n".join(lines)


def _load(model: Path, dtype: str, numerics: str) -> LoadedModel:
    num_blocks = BATCHES[-1] * -(-(CONTEXTS[-1] + NUM_DRAFTS) // BLOCK_SIZE)
    return load_model(
        VerifierConfig.model_validate(
            {
                "server": ServerOptions(listen="127.0.0.1:0"),
                "model": model,
                "dtype": dtype,
                "device": "cpu",
                "numerics": numerics,
                "threads": 1,
                "block_size": BLOCK_SIZE,
                "num_kv_blocks": num_blocks,
            }
        )
    )


def _sequences(
    loaded: LoadedModel, method: ScoringMethod, batch: int, num_tokens: int
) -> list[Sequence]:
    """Sequences of random tokens with drafts, whose blocks are contiguous."""
    tasks = random_tasks(
        loaded.served.vocab_size, batch, prompt_length=num_tokens + NUM_DRAFTS, max_new_tokens=1
    )
    num_blocks = -(-(num_tokens + NUM_DRAFTS) // BLOCK_SIZE)
    return [
        Sequence(
            sequence_id=str(index),
            session_id=1,
            token_ids=list(task.prompt_token_ids),
            prompt_length=num_tokens,
            max_length=num_tokens + NUM_DRAFTS,
            sampling=Sampling(),
            stop_token_ids=frozenset(),
            draft_wait=DraftWait.NEVER,
            drafting=False,
            num_speculative_tokens=0,
            scoring=Scoring(method=method, num_top=0),
            rows_to_score=range(num_tokens - 1, num_tokens + NUM_DRAFTS),
            num_computed_tokens=num_tokens - 1,
            block_table=array("i", range(index * num_blocks, (index + 1) * num_blocks)),
        )
        for index, task in enumerate(tasks)
    ]


def _compute_contexts(loaded: LoadedModel, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        sequence.num_computed_tokens = 0
        _scored_logits(loaded, _lay_out(loaded, [sequence], sequence.prompt_length - 1))
        sequence.num_computed_tokens = sequence.prompt_length - 1


def _scored_logits(loaded: LoadedModel, layout: BatchLayout) -> FloatArray:
    step = loaded.model.launch(layout, [])
    step.wait()
    return step.result().logits_of(layout.scored_logits_indices)


def _lay_out(loaded: LoadedModel, sequences: list[Sequence], num_new_tokens: int) -> BatchLayout:
    scoring = StepBatch(
        [
            ScheduledSequence(
                sequence=sequence,
                num_new_tokens=num_new_tokens,
                draft_token_ids=[],
                is_sampled=False,
            )
            for sequence in sequences
        ]
    )
    return lay_out(scoring.entries, block_size=BLOCK_SIZE)


if __name__ == "__main__":
    # stdout is the table's.
    configure_logs("warning", "benchmark")
    main()
