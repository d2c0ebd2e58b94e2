"""Tokens per second of the verifier's engine, against plain decoding and transformers.

    python -m benchmarks.verifier [--model FOLDER] [--dtype float32] [--json FILE]

Greedy, on held-out rename prompts, one stream and 16, in one process: the engine with and without
drafts from the drafter's own kernel, under `strict` and `fast` numerics; transformers' `generate`
plain, with prompt lookup, as a left-padded batch of 16, and optionally its continuous batching.
Also text that never repeats, and the share of a step outside the model. `benchmarks.end_to_end`
measures all services over gRPC.

Every round uses the same prompts, which both systems compute anew. Only in the row "cached
prompts" the engine's prefix cache is on and holds each prompt.

Compared variants alternate, round after round, and a figure is the median over the rounds, so a
busy machine slows all alike. Compare figures of one run only. On a busy machine, tokens per second
of processor time are more reliable than those of the clock.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.arguments import add_measured, stated
from benchmarks.in_process import Counts, InProcessEngine
from benchmarks.machine import processor
from benchmarks.ratios import median_ratio
from benchmarks.transformers_baseline import generate, generate_batch
from benchmarks.workloads import Task, random_tasks, rename_tasks
from servicekit.logs import configure_logs
from verifier.config import VerifierConfig

BATCH = 16
# transformers recommends 10; which is best depends on the text.
LOOKUP_TOKENS = (8, 10, 20)
BEST_LOOKUP = "transformers, prompt lookup, the best"

Run = Callable[[Sequence[Task]], tuple[int, Counts | None]]


@dataclass(slots=True, kw_only=True)
class Row:
    """One thing to measure: tasks, how to run them, and the tokens per second of each round, by
    the clock and by the processor.
    """

    name: str
    streams: int
    tasks: Sequence[Task]
    run: Run
    max_rounds: int = 1 << 30
    asks_all_before: bool = False
    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    def measure(self) -> None:
        started_at_s, cpu_started_at_s = time.perf_counter(), time.process_time()
        num_tokens, counts = self.run(self.tasks)
        self.tokens_per_cpu_s.append(num_tokens / (time.process_time() - cpu_started_at_s))
        self.tokens_per_s.append(num_tokens / (time.perf_counter() - started_at_s))
        if counts is not None:
            self.counts.add(counts)


# Dividend, divisor and goal of each ratio. Rows by name and streams.
RATIOS: list[tuple[tuple[str, int], tuple[str, int], float | None]] = [
    (("strict, speculation", 1), ("strict, plain", 1), 2.5),
    (("strict, speculation", 1), (BEST_LOOKUP, 1), 1.5),
    (("strict, speculation", 1), ("fast, plain", 1), 2.0),
    (("strict, speculation", BATCH), ("transformers, plain", BATCH), 2.0),
    (("strict, speculation", BATCH), ("strict, plain", BATCH), None),
    (("strict, speculation, cached prompts", 1), ("strict, speculation", 1), None),
    (("strict, speculation, cached prompts", BATCH), ("strict, speculation", BATCH), None),
    (("random text, speculation", 1), ("random text, plain", 1), 0.98),
    (("random text, speculation", BATCH), ("random text, plain", BATCH), 0.98),
    (("strict, plain", 1), ("fast, plain", 1), None),
    (("strict, plain", BATCH), ("fast, plain", BATCH), None),
    (("strict, speculation", 1), ("fast, speculation", 1), None),
    (("strict, speculation", BATCH), ("fast, speculation", BATCH), None),
]
MAX_HOST_SHARE = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_measured(parser)
    parser.add_argument(
        "--generate-batch",
        action="store_true",
        help="also transformers' continuous batching, once; it may take minutes on a CPU",
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with contextlib.ExitStack() as stack:
        rows = _rows(arguments, stack)
        for row in rows:
            if row.max_rounds > 1:  # warm-up
                row.run(row.tasks if row.asks_all_before else row.tasks[: row.streams])
        for number in range(arguments.rounds):
            for row in rows:
                if number < row.max_rounds:
                    row.measure()
                    print(
                        f"round {number + 1}: {row.name}, {row.streams}: "
                        f"{row.tokens_per_s[-1]:.0f} tokens/s",
                        file=sys.stderr,
                    )
    result = _result(rows, arguments)
    print(
        f"{arguments.dtype}, {arguments.threads} model threads, torch {torch.__version__}, "
        f"{processor()}\n"
    )
    print(_table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _rows(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> list[Row]:
    model = arguments.model.resolve()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=arguments.dtype).eval()
    arguments.dtype = str(reference.dtype).removeprefix("torch.")
    renames = rename_tasks(model, arguments.prompts)
    strangers = random_tasks(reference.config.vocab_size, min(BATCH, len(renames)))
    engines = {}
    for name, numerics, options in (
        ("strict", "strict", {}),
        ("fast", "fast", {}),
        ("cached", "strict", {"prefix_cache": True}),
    ):
        config = VerifierConfig.model_validate(
            {
                "model": model,
                "device": "cpu",
                "dtype": arguments.dtype,
                "threads": arguments.threads,
                "numerics": numerics,
                "prefix_cache": False,
                **options,
            }
        )
        engines[name] = stack.enter_context(InProcessEngine(config).started())

    def tandem(engine: str, streams: int, speculate: bool) -> Run:
        def run(tasks: Sequence[Task]) -> tuple[int, Counts]:
            counts = engines[engine].run(tasks, streams=streams, speculate=speculate)
            return counts.num_tokens, counts

        return run

    def transformers(streams: int, **options: object) -> Run:
        return lambda tasks: (generate(reference, tasks, streams, **options), None)

    rows = []
    for streams in (1, BATCH):
        for numerics in ("strict", "fast"):
            for speculate in (True, False):
                name = f"{numerics}, {'speculation' if speculate else 'plain'}"
                run = tandem(numerics, streams, speculate)
                rows.append(Row(name=name, streams=streams, tasks=renames, run=run))
        run = transformers(streams)
        rows.append(Row(name="transformers, plain", streams=streams, tasks=renames, run=run))
        if streams == 1:
            for tokens in LOOKUP_TOKENS:
                run = transformers(1, prompt_lookup_num_tokens=tokens)
                name = f"transformers, prompt lookup {tokens}"
                rows.append(Row(name=name, streams=1, tasks=renames, run=run))
        rows.append(
            Row(
                name="strict, speculation, cached prompts",
                streams=streams,
                tasks=renames,
                run=tandem("cached", streams, True),
                asks_all_before=True,
            )
        )
        for speculate in (True, False):
            name = f"random text, {'speculation' if speculate else 'plain'}"
            run = tandem("strict", streams, speculate)
            rows.append(Row(name=name, streams=streams, tasks=strangers, run=run))
    if arguments.generate_batch:
        rows.append(
            Row(
                name="transformers, generate_batch",
                streams=BATCH,
                tasks=renames[:BATCH],
                run=lambda tasks: (generate_batch(reference, tasks), None),
                max_rounds=1,
            )
        )
    return rows


def _result(rows: Sequence[Row], arguments: argparse.Namespace) -> dict[str, object]:
    by_key = {(row.name, row.streams): row for row in rows}
    by_key[BEST_LOOKUP, 1] = max(
        (by_key[f"transformers, prompt lookup {tokens}", 1] for tokens in LOOKUP_TOKENS),
        key=lambda row: statistics.median(row.tokens_per_s),
    )
    ratios = []
    for above, below, goal in RATIOS:
        one, other = by_key[above], by_key[below]
        ratios.append(
            {
                "name": f"{above[0]} / {below[0]}, {above[1]}",
                "ratio": median_ratio(one.tokens_per_s, other.tokens_per_s),
                "cpu_ratio": median_ratio(one.tokens_per_cpu_s, other.tokens_per_cpu_s),
                "goal": goal,
            }
        )
    return {
        "command": "python -m benchmarks.verifier",
        **stated(arguments),
        "processor": processor(),
        "torch": torch.__version__,
        "ratios": ratios,
        "rows": [
            {
                "name": row.name,
                "streams": row.streams,
                "median": statistics.median(row.tokens_per_s),
                "cpu_median": statistics.median(row.tokens_per_cpu_s),
                "tokens_per_s": row.tokens_per_s,
                "tokens_per_cpu_s": row.tokens_per_cpu_s,
                "counts": asdict(row.counts) if row.counts.num_steps else None,
                "ms_per_step": row.counts.steps_s / row.counts.num_steps * 1e3
                if row.counts.num_steps
                else None,
                "host_share": row.counts.host_share if row.counts.num_steps else None,
            }
            for row in rows
        ],
    }


def _table(result: dict[str, object]) -> str:
    lines = [
        "| what | streams | tokens/s | of processor time | tokens/step | drafted per accepted "
        "| ms/step | host share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = result["rows"]
    ratios = result["ratios"]
    assert isinstance(rows, list)
    assert isinstance(ratios, list)
    for row in rows:
        cells = ["-"] * 4
        if counts := row["counts"]:
            accepted = counts["num_accepted_tokens"]
            cells = [
                f"{counts['num_tokens'] / counts['num_steps'] / row['streams']:.2f}",
                f"{counts['num_draft_tokens'] / accepted:.2f}" if accepted else "-",
                f"{row['ms_per_step']:.2f}",
                f"{row['host_share']:.0%}",
            ]
        lines.append(
            f"| {row['name']} | {row['streams']} | {row['median']:.0f} "
            f"| {row['cpu_median']:.0f} | {' | '.join(cells)} |"
        )
    lines += ["", "| ratio | goal | here | by processor time |", "|---|---|---|---|"]
    for ratio in ratios:
        goal = "reported" if ratio["goal"] is None else f"{ratio['goal']:g}"
        lines.append(
            f"| {ratio['name']} | {goal} | {ratio['ratio']:.2f} | {ratio['cpu_ratio']:.2f} |"
        )
    for row in rows:
        if row["name"] in ("strict, speculation", "strict, plain") and row["streams"] == BATCH:
            lines.append(
                f"| host share of a step, {row['name']}, {BATCH} | ≤ {MAX_HOST_SHARE:.0%} "
                f"| {row['host_share']:.0%} | |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    # stdout is the table's.
    configure_logs("warning", "benchmark")
    main()
