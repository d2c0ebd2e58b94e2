"""Tokens per second through all services, against plain decoding and transformers.

    python -m benchmarks.end_to_end [--model FOLDER] [--dtype float32] [--json FILE]

Greedy, on held-out rename prompts, one stream and 16: Tandem (gateway, drafter, verifier and this
client as processes of their own, over gRPC) with and without speculation, under `strict` and
`fast` numerics; transformers' `generate` plain, with prompt lookup, and as a left-padded batch of
16, with the same model, dtype and threads. Also text that never repeats: random-token prompts
continued at a temperature at which nothing repeats.

Every round uses the same prompts, which both systems compute anew. Only in the rows "cached
prompts" Tandem's prefix cache is on and holds each prompt.

Compared variants alternate, round after round; a speed is the median over the rounds, a ratio the
median of the rounds' ratios, so a busy machine slows all alike. Compare figures of one run only.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import progress_line
from benchmarks.arguments import add_measured, stated
from benchmarks.client_load import run_tasks
from benchmarks.machine import processor
from benchmarks.metrics import read_metrics
from benchmarks.ratios import median_ratio
from benchmarks.services import running_stack
from benchmarks.transformers_baseline import generate
from benchmarks.workloads import Task, random_tasks, rename_tasks
from tandem.client import AsyncTandemClient, SpeculationParams, Usage

BATCH = 16
# transformers recommends 10; which is best depends on the text.
LOOKUP_TOKENS = (8, 10, 20)
# A fixed `num_speculative_tokens`, beside the default, which follows the match length.
FEW_DRAFTS = 7


@dataclass(slots=True, kw_only=True)
class Figure:
    """One row: tokens per second of each round, and counts of speculation.

    Attributes:
        num_hops, hops_s: hints that no step delayed, and how long they took together.
    """

    name: str
    streams: int
    tokens_per_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_hops: int = 0
    hops_s: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)

    def count(self, usages: Sequence[Usage]) -> None:
        for usage in usages:
            self.num_steps += usage.num_steps
            self.num_drafts += usage.num_drafts
            self.num_draft_tokens += usage.num_draft_tokens
            self.num_accepted_tokens += usage.num_accepted_tokens
            missing = len(usage.accepted_per_position) - len(self.accepted_per_position)
            self.accepted_per_position += [0] * max(0, missing)
            for position, accepted in enumerate(usage.accepted_per_position):
                self.accepted_per_position[position] += accepted


Run = Callable[[Sequence[Task]], Awaitable[tuple[int, Sequence[Usage]]]]


@dataclass(frozen=True, slots=True)
class Row:
    """A variant: tasks, how to run them, whether to run all of them once before, and the verifier's
    metrics port if its hops are of interest.
    """

    name: str
    streams: int
    tasks: Sequence[Task]
    run: Run
    asks_all_before: bool = False
    hops_from: str | None = None


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_measured(parser)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = arguments.model.resolve()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=arguments.dtype).eval()
    arguments.dtype = str(reference.dtype).removeprefix("torch.")
    flags = ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    renames = rename_tasks(model, arguments.prompts)
    strangers = random_tasks(reference.config.vocab_size, min(BATCH, len(renames)))

    async with contextlib.AsyncExitStack() as stack:
        strict, fast, cached = (
            stack.enter_context(running_stack(model=model, verifier_flags=[*flags, *more]))
            for more in (
                ("--numerics", "strict", "--no-prefix-cache"),
                ("--numerics", "fast", "--no-prefix-cache"),
                ("--numerics", "strict"),
            )
        )
        on_strict, on_fast, on_cached = [
            await stack.enter_async_context(AsyncTandemClient(each.gateway, retry=None))
            for each in (strict, fast, cached)
        ]

        def tandem(
            client: AsyncTandemClient,
            streams: int,
            *,
            speculate: bool,
            num_drafts: int | None = None,
        ) -> Run:
            speculation = SpeculationParams(enabled=speculate, num_speculative_tokens=num_drafts)
            return lambda tasks: run_tasks(client, tasks, streams, speculation)

        def transformers(streams: int, **options: object) -> Run:
            return lambda tasks: _transformers(reference, tasks, streams, options)

        rows: list[Row] = []
        for streams in (1, BATCH):
            rows += [
                Row(
                    "strict, speculation",
                    streams,
                    renames,
                    tandem(on_strict, streams, speculate=True),
                    hops_from=strict.services["verifier"].metrics,
                ),
                Row(
                    f"strict, speculation, {FEW_DRAFTS} drafts",
                    streams,
                    renames,
                    tandem(on_strict, streams, speculate=True, num_drafts=FEW_DRAFTS),
                ),
                Row("strict, plain", streams, renames, tandem(on_strict, streams, speculate=False)),
                Row(
                    "fast, speculation", streams, renames, tandem(on_fast, streams, speculate=True)
                ),
                Row("fast, plain", streams, renames, tandem(on_fast, streams, speculate=False)),
                Row("transformers, plain", streams, renames, transformers(streams)),
            ]
            if streams == 1:
                rows += [
                    Row(
                        f"transformers, prompt lookup {tokens}",
                        1,
                        renames,
                        transformers(1, prompt_lookup_num_tokens=tokens),
                    )
                    for tokens in LOOKUP_TOKENS
                ]
            rows.append(
                Row(
                    "strict, speculation, cached prompts",
                    streams,
                    renames,
                    tandem(on_cached, streams, speculate=True),
                    asks_all_before=True,
                )
            )
            for speculate in (True, False):
                name = f"random text, {'speculation' if speculate else 'plain'}"
                run = tandem(on_strict, streams, speculate=speculate)
                rows.append(Row(name, streams, strangers, run))
        figures = await _measure(rows, arguments.rounds)

    result = _result(figures, arguments)
    print(
        f"{arguments.dtype}, {arguments.threads} model threads, torch {torch.__version__}, "
        f"{processor()}\n"
    )
    print(_table(figures, result["ratios"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


async def _measure(rows: Sequence[Row], rounds: int) -> list[Figure]:
    figures = [Figure(name=row.name, streams=row.streams) for row in rows]
    for row in rows:
        progress_line.show(f"warm-up: {row.name}, {row.streams} streams")
        await row.run(row.tasks if row.asks_all_before else row.tasks[: row.streams])
    num_done = 0
    for _ in range(rounds):
        for figure, row in zip(figures, rows, strict=True):
            num_done += 1
            progress_line.show(
                f"{num_done} of {rounds * len(rows)}: {row.name}, {row.streams} streams"
            )
            num_hops, hops_s = await _hops(row)
            started_at_s = time.perf_counter()
            num_tokens, usages = await row.run(row.tasks)
            figure.tokens_per_s.append(num_tokens / (time.perf_counter() - started_at_s))
            figure.count(usages)
            num_hops_after, hops_after_s = await _hops(row)
            figure.num_hops += num_hops_after - num_hops
            figure.hops_s += hops_after_s - hops_s
    progress_line.clear()
    return figures


async def _transformers(
    model: PreTrainedModel, tasks: Sequence[Task], streams: int, options: dict[str, object]
) -> tuple[int, Sequence[Usage]]:
    """Runs the tasks through `generate`, in left-padded batches."""
    return await asyncio.to_thread(generate, model, tasks, streams, **options), ()


async def _hops(row: Row) -> tuple[int, float]:
    """How many hops the row's verifier has counted so far, and the sum of their seconds."""
    if row.hops_from is None:
        return 0, 0.0
    metrics = await asyncio.to_thread(read_metrics, row.hops_from)
    name = "tandem_draft_hop_seconds"
    return int(metrics.total(f"{name}_count")), metrics.total(f"{name}_sum")


def _result(figures: Sequence[Figure], arguments: argparse.Namespace) -> dict[str, object]:
    speed = {(figure.name, figure.streams): figure.tokens_per_s for figure in figures}
    ratios = {}
    for streams in (1, BATCH):
        mine = speed["strict, speculation", streams]
        against = ["strict, plain", "fast, plain", "transformers, plain"]
        if streams == 1:
            against.append(
                max(
                    (f"transformers, prompt lookup {tokens}" for tokens in LOOKUP_TOKENS),
                    key=lambda name: statistics.median(speed[name, 1]),
                )
            )
        for name in against:
            ratios[f"strict, speculation / {name}, {streams}"] = median_ratio(
                mine, speed[name, streams]
            )
        ratios[f"cached prompts / not cached, strict, speculation, {streams}"] = median_ratio(
            speed["strict, speculation, cached prompts", streams], mine
        )
        ratios[f"random text, speculation / plain, {streams}"] = median_ratio(
            speed["random text, speculation", streams], speed["random text, plain", streams]
        )
    return {
        "command": "python -m benchmarks.end_to_end",
        **stated(arguments),
        "processor": processor(),
        "torch": torch.__version__,
        "figures": [{**asdict(figure), "median": figure.median} for figure in figures],
        "ratios": ratios,
    }


def _table(figures: Sequence[Figure], ratios: object) -> str:
    lines = [
        "| what | streams | tokens/s | tokens/step | drafted per accepted |",
        "|---|---|---|---|---|",
    ]
    for figure in figures:
        tokens_per_step = drafted_per_accepted = "-"
        if figure.num_drafts:
            tokens_per_step = f"{1 + figure.num_accepted_tokens / figure.num_steps:.2f}"
            drafted_per_accepted = (
                f"{figure.num_draft_tokens / max(1, figure.num_accepted_tokens):.2f}"
            )
        lines.append(
            f"| {figure.name} | {figure.streams} | {figure.median:.0f} "
            f"| {tokens_per_step} | {drafted_per_accepted} |"
        )
    assert isinstance(ratios, dict)
    lines += ["", "| ratio | |", "|---|---|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in ratios.items()]
    first = figures[0]
    acceptance = ", ".join(
        f"{accepted / first.num_drafts:.2f}" for accepted in first.accepted_per_position
    )
    lines += ["", f"Acceptance by position ({first.name}, one stream): {acceptance}."]
    lines += [
        f"Hop that no step delayed, verifier to drafter and back ({figure.name}, "
        f"{figure.streams}): {figure.hops_s / figure.num_hops * 1e3:.2f} ms (mean of "
        f"{figure.num_hops:,})."
        for figure in figures
        if figure.num_hops
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    asyncio.run(main())
