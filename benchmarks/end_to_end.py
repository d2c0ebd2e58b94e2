"""Tokens per second through all services, against plain decoding and transformers.

    python -m benchmarks.end_to_end [--model FOLDER] [--dtype float32] [--json FILE] [--quick]

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
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.arguments import add_model, command_parser, write_figures
from benchmarks.client_load import through_services
from benchmarks.machine import processor
from benchmarks.ratios import median_ratio
from benchmarks.report import table
from benchmarks.services import running_stack
from benchmarks.transformers_baseline import answers
from benchmarks.turns import Variant, by_turns
from benchmarks.workloads import Task, random_tasks, rename_tasks
from tandem.client import AsyncTandemClient, SpeculationParams, Usage

BATCH = 16
# transformers recommends 10; which is best depends on the text.
LOOKUP_TOKENS = (8, 10, 20)
# A fixed `num_speculative_tokens`, beside the default, which follows the match length.
FEW_DRAFTS = 7


@dataclass(slots=True, kw_only=True)
class Row:
    """A variant, and the usages of its requests."""

    variant: Variant
    usages: list[Usage] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """As the JSON has it."""
        positions = itertools.zip_longest(
            *(usage.accepted_per_position for usage in self.usages), fillvalue=0
        )
        return {
            "name": self.variant.name,
            "streams": self.variant.streams,
            "tokens_per_s": self.variant.figures,
            "median": self.variant.median,
            "num_steps": sum(usage.num_steps for usage in self.usages),
            "num_drafts": self.num_drafts,
            "num_draft_tokens": sum(usage.num_draft_tokens for usage in self.usages),
            "num_accepted_tokens": sum(usage.num_accepted_tokens for usage in self.usages),
            "accepted_per_position": [sum(accepted) for accepted in positions],
        }

    @property
    def num_drafts(self) -> int:
        return sum(usage.num_drafts for usage in self.usages)


async def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    torch.set_num_threads(arguments.threads)
    model = arguments.model.resolve()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=arguments.dtype).eval()
    arguments.dtype = str(reference.dtype).removeprefix("torch.")
    renames = rename_tasks(model, arguments.prompts)
    strangers = random_tasks(reference.config.vocab_size, min(BATCH, len(renames)))
    if arguments.quick:
        renames, strangers = (
            [dataclasses.replace(task, max_new_tokens=24) for task in tasks]
            for tasks in (renames, strangers)
        )
    flags = ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    async with contextlib.AsyncExitStack() as stack:

        async def client_of(*more: str) -> AsyncTandemClient:
            gateway = stack.enter_context(
                running_stack(model=model, verifier_flags=[*flags, *more])
            )
            client = AsyncTandemClient(gateway.address, retry=None)
            return await stack.enter_async_context(client)

        strict = await client_of("--numerics", "strict", "--no-prefix-cache")
        fast = await client_of("--numerics", "fast", "--no-prefix-cache")
        cached = await client_of("--numerics", "strict")
        on, off = SpeculationParams(), SpeculationParams(enabled=False)
        few = SpeculationParams(num_speculative_tokens=FEW_DRAFTS)
        rows = []
        for streams in (1, BATCH):
            rows += [
                _tandem(name, client, tasks, streams, speculation)
                for name, client, tasks, speculation in (
                    ("strict, speculation", strict, renames, on),
                    (f"strict, speculation, {FEW_DRAFTS} drafts", strict, renames, few),
                    ("strict, plain", strict, renames, off),
                    ("fast, speculation", fast, renames, on),
                    ("fast, plain", fast, renames, off),
                    ("strict, speculation, cached prompts", cached, renames, on),
                    ("random text, speculation", strict, strangers, on),
                    ("random text, plain", strict, strangers, off),
                )
            ]
            rows.append(_transformers("plain", reference, renames, streams))
        rows += [
            _transformers(
                f"prompt lookup {tokens}", reference, renames, 1, prompt_lookup_num_tokens=tokens
            )
            for tokens in LOOKUP_TOKENS
        ]
        await by_turns([row.variant for row in rows], arguments.rounds)
    ratios = _ratios(rows)
    print(
        f"{arguments.dtype}, {arguments.threads} model threads, torch {torch.__version__}, "
        f"{processor()}\n"
    )
    print(table([_cells(row) for row in rows]))
    print()
    print(table([{"ratio": name, "here": f"{value:.2f}"} for name, value in ratios.items()]))
    first = rows[0].figures()
    accepted = first["accepted_per_position"]
    assert isinstance(accepted, list)
    shares = ", ".join(f"{each / max(1, rows[0].num_drafts):.2f}" for each in accepted)
    print(f"\nAcceptance by position ({first['name']}, one stream): {shares}.")
    figures = {"figures": [row.figures() for row in rows], "ratios": ratios}
    write_figures("end_to_end", arguments, {"torch": torch.__version__, **figures})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("end_to_end", __doc__)
    add_model(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="auto: the checkpoint's",
    )
    parser.add_argument("--prompts", type=int, default=32, help="rename prompts, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.prompts = arguments.rounds = 1
    return arguments


def _tandem(
    name: str,
    client: AsyncTandemClient,
    tasks: Sequence[Task],
    streams: int,
    speculation: SpeculationParams,
) -> Row:
    usages: list[Usage] = []
    variant = through_services(
        client, tasks, streams, name=name, speculation=speculation, observe=usages.extend
    )
    return Row(variant=variant, usages=usages)


def _transformers(
    name: str, model: PreTrainedModel, tasks: Sequence[Task], streams: int, **options: object
) -> Row:
    """The tasks through `generate`, in left-padded batches."""

    async def turn() -> float:
        started_at_s = time.perf_counter()
        # The clients' connections are served meanwhile.
        outputs = await asyncio.to_thread(answers, model, tasks, streams, **options)
        return sum(map(len, outputs)) / (time.perf_counter() - started_at_s)

    return Row(variant=Variant(name=f"transformers, {name}", streams=streams, turn=turn))


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    speed = {(row.variant.name, row.variant.streams): row.variant.figures for row in rows}
    best_lookup = max(
        (f"transformers, prompt lookup {tokens}" for tokens in LOOKUP_TOKENS),
        key=lambda name: statistics.median(speed[name, 1]),
    )
    ratios = {}
    for streams in (1, BATCH):
        mine = speed["strict, speculation", streams]
        against = ["strict, plain", "fast, plain", "transformers, plain"]
        for name in [*against, best_lookup] if streams == 1 else against:
            ratios[f"strict, speculation / {name}, {streams}"] = median_ratio(
                mine, speed[name, streams]
            )
        ratios[f"cached prompts / not cached, strict, speculation, {streams}"] = median_ratio(
            speed["strict, speculation, cached prompts", streams], mine
        )
        ratios[f"random text, speculation / plain, {streams}"] = median_ratio(
            speed["random text, speculation", streams], speed["random text, plain", streams]
        )
    return ratios


def _cells(row: Row) -> dict[str, object]:
    num_steps, num_draft_tokens, num_accepted = (
        sum(getattr(usage, name) for usage in row.usages)
        for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens")
    )
    return {
        "what": row.variant.name,
        "streams": row.variant.streams,
        "tokens/s": f"{row.variant.median:.0f}",
        "tokens/step": f"{1 + num_accepted / num_steps:.2f}" if num_draft_tokens else "-",
        "drafted per accepted": f"{num_draft_tokens / num_accepted:.2f}" if num_accepted else "-",
    }


if __name__ == "__main__":
    asyncio.run(main())
